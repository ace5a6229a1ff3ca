"""What eval.py finds of image classifiers and diffusion models.

Legend: N samples, K classes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from siamese_jax.data.augment import Augmentation
from siamese_jax.data.image_loader import check_images, make_augmentation, open_image_set
from siamese_jax.data.image_set import ImageSet, has_names, with_classes_of
from siamese_jax.errors import InputError
from siamese_jax.evaluation.classification import ClassificationEvaluator, names_of
from siamese_jax.evaluation.diffusion import NoiseEvaluator, Sampler
from siamese_jax.evaluation.features import Judge, in_batches, load_features
from siamese_jax.evaluation.frechet import (
    Statistics,
    check_output,
    frechet_distance,
    read_statistics,
    statistics_of,
    whole_file,
    write_statistics,
)
from siamese_jax.evaluation.pictures import check_grid, confusion_matrix, sample_grid
from siamese_jax.evaluation.run import OpenRun, Weights, progress_bar, restore_weights, told


def _open_images(run: OpenRun, split: str, source: str) -> tuple[ImageSet, Augmentation]:
    """(images, what is done to them) of a split of the run's own data, or of another source."""
    augmentation = make_augmentation(run.config.data, run.model.config)
    images = open_image_set(run.config.data, split if source else split or "validation", source)
    check_images(images, augmentation, run.model.config.num_classes)
    return images, augmentation


def _size(images: ImageSet, max_images: int) -> int:
    return min(max_images or len(images), len(images))


def evaluate_vision(
    run: OpenRun,
    *,
    step: int | None = None,
    average: bool = True,
    split: str = "",
    source: str = "",
    batch_size: int | None = None,
    max_images: int = 0,
    picture: str = "",
    say: Callable[[str], None] = print,
) -> dict:
    """Top-1, top-5, loss and the confusion matrix; picture: a PNG of it. Arguments as eval.py's options.

    split: '' = validation of the run's own data, and as `open_images` of another source.
    """
    if picture:
        check_output("--picture", picture)
    images, augmentation = _open_images(run, split, source)
    batch_size = batch_size or run.config.eval.batch_size
    weights, size = restore_weights(run, step, say, average), _size(images, max_images)
    images = with_classes_of(images, weights.class_names)
    names = names_of(images, run.model.config.num_classes)
    evaluator = ClassificationEvaluator(
        run.model, images, augmentation, run.mesh, batch_size, run.config.data.workers
    )
    with progress_bar(size, "image") as progress:
        found = evaluator(weights.params, progress, size)
    if picture and jax.process_index() == 0:
        confusion_matrix(picture, found["confusion"], names, f"{images.name}, {run.config.model.residual}")
    return {
        **told(run, weights), "source": source or run.config.data.source, "split": images.split,
        "total": found["total"], "class_names": names, "confusion": found["confusion"].tolist(),
        "broken": images.broken, "picture": picture or None,
    }  # fmt: skip


class Sampling(NamedTuple):
    """How samples are made and judged; see eval.py's options."""

    per_class: int = 0
    classes: int = 0  # 0 = all
    sampler: str = "ddim"
    steps: int = 50
    guidance: float = 4.0
    eta: float = 0.0
    seed: int = 0
    picture: str = ""
    samples_out: str = ""
    classifier: str = ""
    features: str = ""
    reference_stats: str = ""
    write_stats: str = ""


def evaluate_diffusion(
    run: OpenRun,
    sampling: Sampling,
    *,
    step: int | None = None,
    average: bool = True,
    split: str = "",
    source: str = "",
    batch_size: int | None = None,
    max_images: int = 0,
    say: Callable[[str], None] = print,
) -> dict:
    """The error of the noise on images held out and, where samples are asked for, how they are judged."""
    images, augmentation = _open_images(run, split, source)
    batch_size, config = batch_size or run.config.eval.batch_size, run.config
    reference = read_statistics(sampling.reference_stats) if sampling.reference_stats else None
    sampler = None
    if sampling.per_class:
        sampler = Sampler(
            run.model, run.mesh, num_steps=config.training.diffusion_steps, sampling_steps=sampling.steps,
            method=sampling.sampler, guidance=sampling.guidance, batch_size=batch_size, eta=sampling.eta,
        )  # fmt: skip
    judge = Judge(sampling.classifier, say) if sampling.classifier else None
    features = load_features(sampling.features) if sampling.features else judge and judge.features
    _check(sampling, run, images, judge, features, reference)
    weights, size = restore_weights(run, step, say, average), _size(images, max_images)
    images = with_classes_of(images, weights.class_names)
    names = list(weights.class_names) or names_of(images, run.model.config.num_classes)
    own = _numbers_of(names, judge) if judge else None
    evaluator = NoiseEvaluator(
        run.model, images, augmentation, run.mesh, batch_size, config.training.diffusion_steps, config.data.workers
    )
    with progress_bar(size, "image") as progress:
        result = {**told(run, weights), "split": images.split, "source": source or config.data.source,
                  "total": evaluator(weights.params, progress, size)}  # fmt: skip
    if sampling.write_stats:
        result["written"] = _write_statistics(
            sampling.write_stats, images, size, augmentation, features, batch_size
        )
    if sampler:
        judging = Judging(judge, own, features, reference)
        result["samples"] = _samples(run, weights, sampling, sampler, images, augmentation, names, judging)
    return result


def _numbers_of(names: list[str], judge: Judge) -> np.ndarray:
    """The judge's number of each of these classes: that of the same name, where both have names."""
    theirs = list(judge.class_names)
    if not theirs or not has_names(theirs) or not has_names(names):
        return np.arange(len(names))
    unknown = [name for name in names if name not in theirs]
    if unknown:
        raise InputError(
            f"--classifier {judge.path} does not know the class {unknown[0]!r}: "
            "name a classifier of the same classes"
        )
    return np.array([theirs.index(name) for name in names])


def _check(
    sampling: Sampling, run: OpenRun, images: ImageSet, judge: Judge | None, features: Any,
    reference: Statistics | None,
) -> None:  # fmt: skip
    """InputError for options that need another one, and for what could not be written in the end."""
    for name in ("picture", "samples_out", "write_stats"):
        if getattr(sampling, name):
            check_output(f"--{name}", getattr(sampling, name))
    if sampling.picture and sampling.per_class:
        num_classes = run.model.config.num_classes
        rows = min(sampling.classes or num_classes, num_classes)
        check_grid(rows, sampling.per_class, run.model.config.image_size)
    if reference is not None and judge is not None and not sampling.features:
        if len(reference.mean_F) != judge.num_features:
            raise InputError(
                f"--reference_stats {sampling.reference_stats} is of {len(reference.mean_F)} features, "
                f"--classifier makes {judge.num_features}: write them with --write_stats and the same classifier"
            )
    if (sampling.reference_stats or sampling.write_stats) and features is None:
        which = "--reference_stats" if sampling.reference_stats else "--write_stats"
        raise InputError(
            f"{which} needs --classifier=RUN or --features=MODULE:FUNCTION: statistics are of features"
        )
    if (sampling.classifier or sampling.features) and not (sampling.per_class or sampling.write_stats):
        raise InputError(
            "--classifier and --features judge samples or images: give --samples_per_class or --write_stats"
        )
    needs = ("picture", "samples_out", "reference_stats")
    for name in needs if not sampling.per_class else ():
        if getattr(sampling, name):
            raise InputError(f"--{name} is about samples: say how many with --samples_per_class")
    judged = sampling.classifier or sampling.features or sampling.picture or sampling.write_stats
    if judged and not (images.shows_pixels and run.model.config.channels in (1, 3)):
        raise InputError(
            "this run works on latents: take --samples_out=FILE.npz and decode them; pictures, classifiers and "
            "features need pixels"
        )
    if judge is not None and judge.num_classes < run.model.config.num_classes:
        raise InputError(
            f"--classifier knows {judge.num_classes} classes, the diffusion model {run.model.config.num_classes}: "
            "name a classifier of the same classes"
        )


def _write_statistics(
    path: str, images: ImageSet, size: int, augmentation: Augmentation, features: Any, batch_size: int
) -> dict:
    """Of `size` images, evenly spaced, as the model sees them: in its size and channels."""

    def image_of(number: int) -> np.ndarray:
        image, _ = images.example(number * len(images) // size)
        return augmentation.pixels(augmentation.plain(image))

    with progress_bar(size, "image") as progress:
        statistics = statistics_of(in_batches(image_of, size, features, batch_size, progress))
    if jax.process_index() == 0:
        write_statistics(path, statistics)
    return {"path": path, "images": statistics.count, "features": len(statistics.mean_F)}


class Judging(NamedTuple):
    """What samples are judged by. numbers: the classifier's of the model's classes; features: a function."""

    judge: Judge | None
    numbers: np.ndarray | None
    features: Any
    reference: Statistics | None


def _samples(
    run: OpenRun, weights: Weights, sampling: Sampling, sampler: Sampler, images: ImageSet,
    augmentation: Augmentation, names: list[str], judging: Judging,
) -> dict:  # fmt: skip
    """Makes the samples, writes what is asked for, and says how they are judged."""
    num_classes = run.model.config.num_classes
    names = names + [str(k) for k in range(len(names), num_classes)]
    classes = range(min(sampling.classes or num_classes, num_classes))
    labels = np.repeat(np.array(classes, np.int32), sampling.per_class)
    with progress_bar(len(labels), "sample") as progress:
        made = sampler(weights.params, labels, sampling.seed, progress)
    result: dict[str, Any] = {
        "count": len(labels), "sampler": sampling.sampler, "steps": sampling.steps, "guidance": sampling.guidance,
        "seed": sampling.seed,
    }  # fmt: skip
    is_main = jax.process_index() == 0
    kind = "images" if images.shows_pixels else "latents"
    pixels = augmentation.pixels(made) if images.shows_pixels else augmentation.stored_latents(made)
    if sampling.samples_out:
        result["samples_out"] = sampling.samples_out
        if is_main:
            with whole_file(sampling.samples_out) as file:
                np.savez(file, labels=labels, **{kind: pixels})
    if sampling.picture:
        result["picture"] = sampling.picture
        rows = {names[k]: pixels[labels == k] for k in classes}
        title = f"{images.name}, {run.config.model.residual}, guidance {sampling.guidance:g}"
        if is_main:
            sample_grid(sampling.picture, rows, title)
    if judging.judge is not None:
        right = judging.judge.guesses(pixels) == judging.numbers[labels]
        result["agreement"] = float(np.mean(right))
        result["agreement_by_class"] = {names[k]: float(np.mean(right[labels == k])) for k in classes}
    if judging.reference is not None:
        of_samples = in_batches(
            pixels.__getitem__, len(pixels), judging.features, sampler.batch_size, lambda done: None
        )
        result["frechet_distance"] = frechet_distance(statistics_of(of_samples), judging.reference)
        result["features"] = sampling.features or f"the classifier {judging.judge.path}"
    return result


def format_image_result(result: dict) -> str:
    """The result for the reader."""
    average = ", running average" if result["averaged"] else ""
    lines = [f"model: {result['checkpoint']}{average}", f"data:  {result['source']}, split {result['split']}"]
    total = result["total"]
    if result["family"] == "vision":
        lines.append(
            f"top-1 {total['top1']:.2%}   top-5 {total['top5']:.2%}   loss {total['loss']:.4f}   "
            f"{total['images']:,} images"
        )
        lines += _by_class(result)
        if result["broken"]:
            lines.append(f"{len(result['broken'])} broken image(s), replaced by others: {result['broken'][0]}")
        if result["picture"]:
            lines.append(f"picture: {result['picture']}")
        return "\n".join(lines)
    lines.append(
        f"noise error {total['loss']:.5f}   variational bound {total['vb']:.5f} bits per dimension   "
        f"{total['images']:,} images"
    )
    if "written" in result:
        lines.append("statistics of {images:,} images, {features} features: {path}".format(**result["written"]))
    return "\n".join([*lines, *_sample_lines(result.get("samples"))])


def _by_class(result: dict) -> list[str]:
    """A line for each class: how many of it are recognised, and what it is most often taken for."""
    counts, names = np.array(result["confusion"]), result["class_names"]
    if len(names) > MOST_LISTED:
        return []
    width = max(map(len, [*names, "class"]))
    lines = [f"{'class':{width}}  {'images':>7}  {'top-1':>7}  most often taken for"]
    for k, name in enumerate(names):
        row = counts[k].copy()
        total, right, row[k] = row.sum(), row[k], -1
        other = int(np.argmax(row))
        taken = f"{names[other]} ({row[other] / max(total, 1):.1%})" if row[other] > 0 else "-"
        lines.append(f"{name:{width}}  {total:>7,}  {right / max(total, 1):>7.2%}  {taken}")
    return lines


MOST_LISTED = 30


def _sample_lines(samples: dict | None) -> list[str]:
    if samples is None:
        return []
    lines = ["{count:,} samples, {sampler} in {steps} steps, guidance {guidance:g}, seed {seed}".format(**samples)]
    if "agreement" in samples:
        classes = ", ".join(f"{name} {share:.0%}" for name, share in samples["agreement_by_class"].items())
        lines.append(f"the classifier sees the asked class in {samples['agreement']:.2%} of them: {classes}")
    if "frechet_distance" in samples:
        lines.append(
            f"Frechet distance {samples['frechet_distance']:.3f} by {samples['features']}: comparable only with "
            "the same features and number of samples, and not the published FID (Inception's, 50,000 samples)"
        )
    lines += [f"{what}: {samples[key]}" for what, key in WRITTEN.items() if key in samples]
    return lines


WRITTEN = {"samples": "samples_out", "picture": "picture"}
