"""train.py and eval.py on small image and diffusion models: figures, pictures, exact resume, and wrong input."""

import json
import shutil
import signal

import numpy as np
import pytest
from image_place import CLASSES, Images
from programs import checkpoints_of, records, shared_place, snapshot, steps_written


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return Images(shared_place(tmp_path_factory))


def summary(workdir):
    return json.loads((workdir / "summary.json").read_text())


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_an_image_run_ends_with_its_figures_and_a_picture(images):
    workdir = images.finished("vision")
    told, lines = summary(workdir), records(workdir)
    assert told["family"] == "vision" and told["images"] == 24 * 8
    assert told["validation"]["top1"] > 0.5  # by chance a third; images beside wrong labels would not be learnt
    assert is_png(workdir / "confusion.png") and told["pictures"] == [str(workdir / "confusion.png")]
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert {"validation/loss", "validation/top1", "validation/top5"} <= set(lines[8])
    assert {"post_rms/0", "pre_rms/1"} <= set(lines[4])
    found = images.evaluate(workdir)
    assert found["total"] == told["validation"] and found["averaged"]
    assert sum(map(sum, found["confusion"])) == found["total"]["images"]
    assert found["class_names"] == list(CLASSES)
    assert images.evaluate(workdir, "--noaverage")["total"] != found["total"]
    assert images.evaluate(workdir, "--batch_size=64")["total"]["top1"] == found["total"]["top1"]
    train = images.evaluate(workdir, "--split=train", "--max_images=10", f"--picture={workdir}/train.png")
    assert train["total"]["images"] == 10 and is_png(workdir / "train.png")
    whole = images.evaluate(workdir, f"--data.source={images.data}")
    assert whole["split"] == "all" and whole["total"]["images"] == 90
    with np.load(images.data) as file:
        two, names = file["labels"] > 0, file["class_names"][1:]
        np.savez(workdir / "two.npz", images=file["images"][two], labels=file["labels"][two] - 1, class_names=names)
    part = images.evaluate(workdir, f"--data.source={workdir / 'two.npz'}")
    assert part["confusion"] == [[0, 0, 0], *whole["confusion"][1:]]  # classes are found by their names


@pytest.mark.parametrize("family", ["vision", pytest.param("diffusion", marks=pytest.mark.slow)])
def test_killed_runs_continue_exactly_with_all_that_is_drawn(images, family, tmp_path):
    reference, workdir = images.finished(family), tmp_path / "run"
    kills = 0
    for after in (13,) if family == "vision" else (4, 13):
        started = images.place.start(*images.arguments(family, workdir))
        if started.until(lambda after=after: steps_written(workdir) > after):
            started.signal(signal.SIGKILL)
            kills += started.ended().code == -signal.SIGKILL
    assert kills
    ended = images.place.run(*images.arguments(family, workdir))
    assert ended.code == 0, ended.err
    assert records(workdir) == records(reference)
    assert summary(workdir)["validation"] == summary(reference)["validation"]
    assert checkpoints_of(workdir) == [18, 21, 24]


def test_a_diffusion_run_is_sampled_judged_and_measured(images, tmp_path):
    workdir, judge = images.finished("diffusion"), images.finished("vision")
    told = summary(workdir)
    assert is_png(workdir / "samples.png") and told["validation"]["loss"] > 0
    stats, out, picture = tmp_path / "stats.npz", tmp_path / "out.npz", tmp_path / "grid.png"
    judged = f"--classifier={judge}"
    written = images.evaluate(workdir, f"--write_stats={stats}", judged, "--split=train")
    assert written["written"]["features"] == 16 and "samples" not in written
    by_hand = tmp_path / "pixels.npz"
    images.evaluate(workdir, f"--write_stats={by_hand}", "--features=image_place:mean_pixels", "--split=all")
    with np.load(images.data) as file, np.load(by_hand) as stats_of:
        rows = file["images"].mean(axis=(2, 3))
        np.testing.assert_allclose(stats_of["mu"], rows.mean(0), rtol=1e-6)
        np.testing.assert_allclose(stats_of["sigma"], np.cov(rows.T), rtol=1e-6)
    ask = ("--samples_per_class=3", "--guidance=2", "--sampling_steps=10", "--seed=4", judged)
    first = images.evaluate(
        workdir, *ask, f"--reference-stats={stats}", f"--samples_out={out}", f"--picture={picture}"
    )
    assert first["total"] == told["validation"]
    samples = first["samples"]
    assert samples["count"] == 9 and 0 <= samples["agreement"] <= 1 and samples["frechet_distance"] > 0
    assert set(samples["agreement_by_class"]) == set(CLASSES) and is_png(picture)
    with np.load(out) as file:
        assert file["images"].shape == (9, 8, 8, 1) and file["images"].dtype == np.uint8
        np.testing.assert_array_equal(file["labels"], np.repeat([0, 1, 2], 3))
        made = file["images"]
    images.evaluate(workdir, *ask, f"--samples_out={out}", "--batch_size=2")
    again = np.load(out)["images"]
    assert np.abs(again.astype(int) - made).max() <= 1  # the same samples in other batches
    images.evaluate(workdir, *ask, "--sampler=ddpm", f"--samples_out={out}")
    assert np.abs(np.load(out)["images"].astype(int) - made).max() > 1


WRONG = [
    ("vision", "model.patch_size=3", ("model.patch_size 3", "model.image_size 8")),
    ("vision", "model.channels=3", ("images of 1 channel", "model.channels 3", "grey_to_colour")),
    ("vision", "model.num_classes=2", ("3 classes", "model.num_classes 2")),
    ("vision", "data.source=/nothing.npz", ("/nothing.npz", "is not there")),
    ("vision", "data.source=nothing", ("'nothing'", "fashion_mnist")),
    ("vision", "data.source=tfds:cifar1", ("'cifar1'", "nearest:", "cifar10")),
    ("vision", "data.source=tfds:cifar10", ("not prepared", "download_and_prepare")),
    ("vision", "data.crop=centre", ("data.crop", "'centre'", "random_resized")),
    ("vision", "data.erase=2.0", ("data.erase is 2.0",)),
    ("vision", "data.tokenizer=bytes", ("'data.tokenizer'", "nearest: data.")),
    ("vision", "training.label_smoothing=1.0", ("label_smoothing is 1.0",)),
    ("vision", "model.vocab_size=3", ("'model.vocab_size'",)),
    ("vision", "seed=-1", ("seed is -1",)),
    ("vision", "seed=4294967296", ("seed is 4294967296", "4294967295")),
    ("vision", "family=diffusion", ("family is 'diffusion'", "base_config('diffusion')")),
    ("vision", "data.source=", ("data.source is empty",)),
    ("diffusion", "eval.samples_per_class=1000", ("eval.samples_per_class 1000", "over 32000")),
    ("diffusion", "model.label_dropout=0.0", ("eval.guidance is 4", "label_dropout is 0")),
    ("diffusion", "model.residual=peri", ("'peri'", "choose another scheme")),
    ("diffusion", "eval.sampling_steps=30", ("30", "100", "25 or 34")),
    ("diffusion", "training.diffusion_steps=20", ("training.diffusion_steps is 20", "at least 21")),
    ("diffusion", "training.mixup=0.8", ("'training.mixup'",)),
    ("diffusion", "eval.sampler=euler", ("eval.sampler", "'euler'", "ddim")),
]


@pytest.mark.parametrize(("family", "override", "words"), WRONG, ids=[f"{f}-{o}" for f, o, _ in WRONG])
def test_wrong_input_ends_in_one_line_and_leaves_nothing(images, tmp_path, family, override, words):
    workdir = tmp_path / "run"
    ended = images.place.run(*images.arguments(family, workdir, override, "data.data_dir=/nowhere"))
    assert ended.code == 2 and ended.out == "", ended
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1, ended.err
    assert [word for word in words if word not in ended.err] == [], ended.err
    assert not workdir.exists()


WRONG_QUESTIONS = [
    ("vision", ("--guidance=2",), ("--guidance", "vision model")),
    ("vision", ("--max_windows=2",), ("--max_windows", "vision model")),
    ("vision", ("--split=all", "--data.source=digits"), ("digits has parts of its own",)),
    ("vision", ("--data.source=OTHER_CLASSES",), ("the class 'grey'", "dark, light, left")),
    ("vision", ("--picture=/nowhere/x.png",), ("--picture is /nowhere/x.png", "a folder that exists")),
    ("diffusion", ("--samples_out=/nowhere/x.npz", "--samples_per_class=1"), ("--samples_out is /nowhere/x.npz",)),
    ("diffusion", ("--guidance=2",), ("--guidance", "--samples_per_class")),
    ("diffusion", ("--classifier=JUDGE",), ("--classifier", "--samples_per_class or --write_stats")),
    ("diffusion", ("--samples_per_class=1000", "--picture=x.png"), ("over 32000",)),
    (
        "diffusion",
        ("--samples_per_class=1", "--classifier=JUDGE", "--reference_stats=NARROW"),
        ("is of 4 features", "makes 16"),
    ),
    ("diffusion", ("--samples_per_class=1", "--features=.m:f"), (".m:f cannot be loaded",)),
    ("diffusion", ("--reference_stats=STATS",), ("--classifier", "--features")),
    ("diffusion", ("--reference_stats=/nothing.npz", "--classifier=JUDGE"), ("/nothing.npz",)),
    ("diffusion", ("--classifier=OWN", "--samples_per_class=1"), ("holds a diffusion model",)),
    ("diffusion", ("--features=nothing",), ("--features is 'nothing'", "package.module:function")),
    ("diffusion", ("--features=json:nothing",), ("json:nothing", "cannot be loaded")),
    ("diffusion", ("--picture=a.png",), ("--picture", "--samples_per_class")),
    ("diffusion", ("--samples_per_class=1", "--sampling_steps=30"), ("30", "25 or 34")),
    ("diffusion", ("--samples_per_class=1", "--sampler=ddpm", "--eta=0.5"), ("eta is 0.5",)),
    ("diffusion", ("--data.source=OTHER",), ("latents of shape (8, 8, 2)", "(8, 8, 1)")),
]


@pytest.mark.parametrize(
    ("family", "arguments", "words"), WRONG_QUESTIONS, ids=[" ".join(a) for _, a, _ in WRONG_QUESTIONS]
)
def test_wrong_questions_end_in_one_line(images, tmp_path, family, arguments, words):
    workdir = images.finished(family)
    np.savez(tmp_path / "stats.npz", mu=np.zeros(16), sigma=np.eye(16))
    np.savez(tmp_path / "other.npz", latents=np.zeros((9, 8, 8, 2), np.float32), labels=np.arange(9) % 3)
    np.savez(tmp_path / "narrow.npz", mu=np.zeros(4), sigma=np.eye(4))
    with np.load(images.data) as file:
        grey = np.array(["dark", "grey", "left"])
        np.savez(tmp_path / "grey.npz", images=file["images"], labels=file["labels"], class_names=grey)
    places = {"NARROW": tmp_path / "narrow.npz", "OTHER_CLASSES": tmp_path / "grey.npz",
              "STATS": tmp_path / "stats.npz", "JUDGE": images.folder / "run_vision", "OWN": workdir,
              "OTHER": tmp_path / "other.npz"}  # fmt: skip
    images.finished("vision")
    for name, path in places.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    before = snapshot(workdir)
    ended = images.place.run(f"--workdir={workdir}", *arguments, program="eval.py")
    assert ended.code == 2 and ended.out == "", ended
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1, ended.err
    assert [word for word in words if word not in ended.err] == [], ended.err
    assert snapshot(workdir) == before


@pytest.mark.slow
def test_guidance_without_label_dropout_is_refused_in_evaluation_too(images, tmp_path):
    workdir = tmp_path / "run"
    keys = ("model.label_dropout=0.0", "eval.guidance=1.0", "training.steps=3", "eval.samples_per_class=1")
    ended = images.place.run(*images.arguments("diffusion", workdir, *keys))
    assert ended.code == 0, ended.err
    ended = images.place.run(f"--workdir={workdir}", "--samples_per_class=1", "--guidance=3", program="eval.py")
    assert ended.code == 2 and "guidance" in ended.err and "label_dropout is 0" in ended.err


def test_a_folder_with_a_broken_image_stops_with_its_name_or_goes_on_counting(images, tmp_path):
    image = pytest.importorskip("PIL.Image")
    with np.load(images.data) as file:
        for i, (pixels, label) in enumerate(zip(file["images"], file["labels"], strict=True)):
            folder = tmp_path / "set" / CLASSES[label]
            folder.mkdir(parents=True, exist_ok=True)
            image.fromarray(pixels[..., 0]).save(folder / f"{i:03}.png")
    # The first one is looked at before anything else; this one is met on the way.
    broken = sorted((tmp_path / "set" / "left").glob("*.png"))[5]
    broken.write_bytes(broken.read_bytes()[:60])
    source = f"data.source={tmp_path / 'set'}"
    ended = images.place.run(*images.arguments("vision", tmp_path / "stop", source))
    assert ended.code == 2 and str(broken) in ended.err and "data.on_broken=skip" in ended.err
    ended = images.place.run(*images.arguments("vision", tmp_path / "skip", source, "data.on_broken=skip"))
    assert ended.code == 0, ended.err
    assert f"1 broken image(s), others took their place: {broken}" in ended.out


def test_a_vision_run_goes_on_from_the_weights_of_another(images, tmp_path):
    ended = images.place.run(
        *images.arguments("vision", tmp_path / "run", f"training.init_from={images.finished('vision')}")
    )
    assert ended.code == 0 and "from the weights of" in ended.out
    shutil.rmtree(tmp_path / "run")
