"""The converter as a user runs it: there and back, into eval.py and train.py, and every wrong input."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import yaml
from programs import shared_place, snapshot, undisturbed

from siamese_jax.checkpoint import Checkpoints
from siamese_jax.interop import huggingface, reference
from siamese_jax.interop.convert import export_checkpoint, import_checkpoint
from siamese_jax.interop.layout import split_all
from siamese_jax.interop.weights import open_weights_file
from siamese_jax.models.language import LanguageConfig, LanguageModel
from siamese_jax.residual.scheme import resolve_options

CONVERT = "siamese_jax/interop/convert.py"
GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
MODEL = LanguageConfig(
    residual="siamese_hybrid", residual_options=tuple(sorted(resolve_options("siamese_hybrid", {}).items())),
    num_layers=2, width=16, num_heads=2, mlp_hidden=32, vocab_size=257, vocab_multiple=1, value_norm="head",
)  # fmt: skip
PRE = LanguageConfig(
    residual="pre", num_layers=2, width=16, num_heads=2, mlp_hidden=32, vocab_size=257, vocab_multiple=1,
    query_norm="none", key_norm="none",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return shared_place(tmp_path_factory)


def tensors_of(layout):
    random = np.random.default_rng(0)
    return {name: random.normal(0, 0.2, shape).astype(np.float32) for name, shape in layout.tensors().items()}


def make_checkpoint(folder, model=MODEL, suffix="json", **changes):
    """A folder with a checkpoint of random weights in the reference layout, and its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(reference.layout(model))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    theirs = reference.reference_config(model) | changes
    text = json.dumps(theirs) if suffix == "json" else yaml.safe_dump({"run_name": "x", "model": theirs})
    (folder / f"config.{suffix}").write_text(text)
    return folder, tensors


def convert(place, source, to, *more, code=0):
    ended = place.run(f"--from={source}", f"--to={to}", *more, program=CONVERT)
    assert ended.code == code, ended
    return ended


def assert_same(path, tensors):
    with open_weights_file(path) as file:
        assert file.shapes == {name: tensor.shape for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            assert np.array_equal(file.read(name).view(np.uint32), tensor.view(np.uint32)), name


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_there_and_back_is_exact(suffix, place, tmp_path):
    source, tensors = make_checkpoint(tmp_path / "theirs", suffix=suffix)
    ended = convert(place, source, tmp_path / "ours")
    assert "next: python eval.py" in ended.out and "train.py --config=" in ended.out and ended.err == ""
    convert(place, tmp_path / "ours", tmp_path / "back.safetensors")
    assert_same(tmp_path / "back.safetensors", tensors)
    convert(place, tmp_path / "back.safetensors", tmp_path / "again")  # the file's own configuration is found
    convert(place, tmp_path / "again", tmp_path / "folder")
    assert_same(tmp_path / "folder", tensors)
    assert yaml.safe_load((tmp_path / "folder" / "config.yaml").read_text())["model"]["n_layers"] == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("[ab]*[!4].npz")), ids=lambda path: path.stem)
def test_recorded_models_go_there_and_back(path, tmp_path):
    with np.load(path) as file:
        tensors = {name[6:]: file[name] for name in file.files if name.startswith("param/")}
        config = str(file["config"])
    (tmp_path / "theirs").mkdir()
    safetensors.numpy.save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "config.json").write_text(config)
    import_checkpoint(str(tmp_path / "theirs"), str(tmp_path / "ours"), say=lambda line: None)
    export_checkpoint(str(tmp_path / "ours"), str(tmp_path / "back.safetensors"), say=lambda line: None)
    assert_same(tmp_path / "back.safetensors", tensors)
    recorded, back = json.loads(config), json.loads((tmp_path / "back.json").read_text())
    assert {key: back[key] for key in recorded if key in back} == {k: v for k, v in recorded.items() if k in back}


def test_pickles_of_pytorch_and_nested_state_dicts(place, tmp_path):
    torch = pytest.importorskip("torch")
    source, tensors = make_checkpoint(tmp_path / "theirs")
    (source / "model.safetensors").unlink()
    state = {f"module.{name}": torch.from_numpy(tensor) for name, tensor in tensors.items()}
    torch.save({"model": state}, source / "model.pt")
    convert(place, source / "model.pt", tmp_path / "ours")
    convert(place, tmp_path / "ours", tmp_path / "back.safetensors")
    assert_same(tmp_path / "back.safetensors", tensors)


def test_a_trained_run_computes_the_same_after_a_round_trip(place, tmp_path):
    """eval.py on the run, and on what came back; train.py starts from it with the loss it had."""
    workdir, _ = undisturbed(place)
    ended = convert(place, workdir, tmp_path / "model.safetensors", "--json")
    said = json.loads(ended.out)
    assert said["step"] == 30 and said["residual"] == "siamese_hybrid" and said["tensors"] > 20
    assert "only pad it" in ended.err
    convert(place, tmp_path / "model.safetensors", tmp_path / "back", "--exclude_padding")
    evaluate = ("--json", f"--data.source={place.corpus}", "--max_windows=40")
    ours, back = (
        json.loads(place.run(f"--workdir={folder}", *evaluate, program="eval.py").out)
        for folder in (workdir, tmp_path / "back")
    )
    assert ours["total"] == back["total"] and ours["windows"] == 40

    new = tmp_path / "new"
    keys = {"data.source": place.corpus, "training.steps": 3, "schedule.warmup_steps": 1, "logging.every": 1}
    keys |= {"training.batch_size": 4, "eval.max_windows": 4}
    arguments = [f"--config.{key}={value}" for key, value in keys.items()]
    ended = place.run(f"--config={tmp_path / 'back' / 'config.py'}", f"--workdir={new}", *arguments)
    assert ended.code == 0, ended
    # What it was made of is not forgotten by training: the layout, and keys that ours does not have.
    back = json.loads((tmp_path / "model.json").read_text()) | {"eos_token_id": 7}
    (tmp_path / "other.json").write_text(json.dumps(back))
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    convert(place, tmp_path / "other.safetensors", tmp_path / "again", "--exclude_padding")
    tuned = tmp_path / "tuned"
    ended = place.run(f"--config={tmp_path / 'again' / 'config.py'}", f"--workdir={tuned}", *arguments)
    assert ended.code == 0, ended
    convert(place, tuned, tmp_path / "tuned.safetensors")
    assert json.loads((tmp_path / "tuned.json").read_text()) == back

    first = json.loads((new / "metrics.jsonl").read_text().splitlines()[0])
    assert abs(first["loss"] - ours["total"]["loss"]) < 0.3 < abs(first["loss"] - np.log(257))


def test_padding_takes_part_as_in_pytorch_unless_excluded(tmp_path):
    source, _ = make_checkpoint(tmp_path / "theirs", vocab_size=250)
    for name, exclude, expected in (("in", False, 257), ("out", True, 250)):
        import_checkpoint(str(source), str(tmp_path / name), exclude_padding=exclude, say=lambda line: None)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["model"]["vocab_size"] == expected
        export_checkpoint(str(tmp_path / name), str(tmp_path / f"{name}.safetensors"), say=lambda line: None)
        back = json.loads((tmp_path / f"{name}.json").read_text())
        assert (back["vocab_size"], back["embedding_size"]) == (250, 257)


def test_huggingface_there_and_back(place, tmp_path):
    source = tmp_path / "theirs"
    source.mkdir()
    tensors = tensors_of(huggingface.layout(PRE))
    safetensors.numpy.save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(huggingface.huggingface_config(PRE, {}, 64, "float32")))
    ended = convert(place, source, tmp_path / "ours")
    assert "huggingface layout, pre" in ended.out
    convert(place, tmp_path / "ours", tmp_path / "back")  # the layout of the origin
    assert_same(tmp_path / "back", tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    convert(place, tmp_path / "ours", tmp_path / "reference.safetensors", "--layout=reference")
    names = reference.layout(PRE).tensors()
    with open_weights_file(tmp_path / "reference.safetensors") as file:
        assert file.shapes == names
    convert(place, tmp_path / "ours", tmp_path / "half", "--dtype=bfloat16")
    with open_weights_file(tmp_path / "half") as file:
        assert set(file.types.values()) == {"bfloat16"}
    half = json.loads((tmp_path / "half" / "config.json").read_text())
    assert half["dtype"] == half["torch_dtype"] == "bfloat16"  # or transformers would widen it again


def test_transformers_loads_an_export_and_computes_what_the_run_does(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source, tensors = make_checkpoint(tmp_path / "theirs", PRE)
    import_checkpoint(str(source), str(tmp_path / "ours"), say=lambda line: None)
    export_checkpoint(str(tmp_path / "ours"), str(tmp_path / "hf"), layout="huggingface", say=lambda line: None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = np.random.default_rng(0).integers(0, 257, (2, 12))
    with torch.no_grad():
        theirs = model.float()(torch.from_numpy(tokens)).logits.numpy()
    params = reference.from_reference(tensors, PRE)
    np.testing.assert_allclose(
        jax.jit(LanguageModel(PRE).apply)({"params": params}, jnp.asarray(tokens)), theirs, rtol=0, atol=2e-5
    )
    assert split_all(huggingface.layout(PRE), PRE, params).keys() <= model.state_dict().keys()


def test_a_tied_head_that_is_another_matrix_is_not_dropped(place, tmp_path):
    tied = dataclasses.replace(PRE, tie_embedding=True)
    source = tmp_path / "theirs"
    source.mkdir()
    tensors = tensors_of(huggingface.layout(tied))
    (source / "config.json").write_text(json.dumps(huggingface.huggingface_config(tied, {}, 64, "float32")))
    for factor, code in ((1.0, 0), (2.0, 2)):
        head = {huggingface.HEAD: factor * tensors[huggingface.TABLE]}
        safetensors.numpy.save_file(tensors | head, source / "model.safetensors")
        ended = convert(place, source, tmp_path / f"ours{code}", code=code)
        assert ("tie_word_embeddings is on" in ended.err) == (code == 2)
    convert(place, source, tmp_path / "x", "--exclude_padding", code=2)


def test_yaml_is_read_as_olmo_reads_it(tmp_path):
    """1e-6 without a dot is a number to OLMo's reader, a string to PyYAML's."""
    source, _ = make_checkpoint(tmp_path / "theirs", suffix="yaml")
    text = (source / "config.yaml").read_text().replace("layer_norm_eps: 1.0e-05", "layer_norm_eps: 1e-6")
    (source / "config.yaml").write_text(text)
    import_checkpoint(str(source), str(tmp_path / "ours"), say=lambda line: None)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model"]["norm_epsilon"] == 1e-6


def test_a_tokenizer_beside_the_weights_is_found(place, tmp_path):
    source, _ = make_checkpoint(tmp_path / "theirs")
    (source / "tokenizer.json").write_text("no tokenizer")
    ended = convert(place, source, tmp_path / "ours", code=2)
    assert "tokenizer" in ended.err and not (tmp_path / "ours").exists()
    ended = convert(place, source, tmp_path / "ours", "--tokenizer=bytes")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["data"]["tokenizer"] == "bytes"


def test_the_running_average_is_what_is_exported(tmp_path):
    source, tensors = make_checkpoint(tmp_path / "theirs")
    import_checkpoint(str(source), str(tmp_path / "run"), say=lambda line: None)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["optimizer"]["ema"] = 0.5
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    average = reference.from_reference(tensors, MODEL)
    params = jax.tree.map(np.zeros_like, average)
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        state = {"params": params, "ema": {"count": np.int32(3), "params": average}}
        checkpoints.save(7, jax.tree.map(jnp.asarray, state), {})
    said = export_checkpoint(str(tmp_path / "run"), str(tmp_path / "a.safetensors"), say=lambda line: None)
    assert said["averaged"] and said["step"] == 7
    assert_same(tmp_path / "a.safetensors", tensors)


# ------------------------------------------------------------------------------ wrong input


def change_tensors(source, change):
    path = source / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


BLOCK = "transformer.blocks.0."
WRONG_WEIGHTS = [
    (lambda t: t.pop(f"{BLOCK}c1"), (f"lacks {BLOCK}c1 (16,)",)),
    (lambda t: t.update({f"{BLOCK}c2": np.zeros(3, np.float32)}), (f"has {BLOCK}c2 (3,)", "does not")),
    (lambda t: t.update({f"{BLOCK}c1": np.zeros(3, np.float32)}), (f"{BLOCK}c1 of shape (3,), not (16,)",)),
    (
        lambda t: t.update({f"{BLOCK}att_proj.weight": np.zeros((47, 16), np.float32)}),
        ("att_proj.weight of shape (47, 16), not (48, 16)",),
    ),
    (
        lambda t: t.update({"transformer.wte.weight": np.zeros((320, 16), np.float32)}),
        ("padded differently", "(320, 16)", "257"),
    ),
    (lambda t: t.update({f"{BLOCK}c1": np.zeros(16)}), ("c1 is float64", "float32")),
    (lambda t: [t.pop(name) for name in list(t) if ".blocks.1." in name], ("lacks transformer.blocks.1",)),
]


@pytest.mark.parametrize(("change", "words"), WRONG_WEIGHTS)
def test_wrong_weights_end_in_one_line_and_leave_nothing(change, words, place, tmp_path):
    source, _ = make_checkpoint(tmp_path / "theirs")
    change_tensors(source, change)
    refused(place, source, tmp_path, words)


def refused(place, source, tmp_path, words, *more, to="ours"):
    before = snapshot(tmp_path)
    ended = convert(place, source, tmp_path / to, *more, code=2)
    lines = ended.err.splitlines()
    assert lines[-1].startswith("error: ") and sum(line.startswith("error") for line in lines) == 1, ended.err
    assert not [word for word in words if word not in lines[-1]], ended.err
    assert "Traceback" not in ended.err
    assert snapshot(tmp_path).keys() == before.keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_modle": 3}, ("'d_modle'", "nearest: d_model")),
        ({"n_layers": 3}, ("lacks transformer.blocks.2",)),
        ({"use_context_norm": True}, ("lacks transformer.blocks.0.c_norm.weight (8,)",)),
        ({"embedding_size": 320}, ("padded differently", "257", "320")),
        ({"n_heads": 3}, ("num_heads 3", "16")),
        ({"rope": False}, ("rope",)),
    ],
)
def test_wrong_configurations_end_in_one_line_and_leave_nothing(changes, words, place, tmp_path):
    source, _ = make_checkpoint(tmp_path / "theirs", **changes)
    refused(place, source, tmp_path, words)


def test_wrong_files_end_in_one_line_and_leave_nothing(place, tmp_path):
    source, _ = make_checkpoint(tmp_path / "theirs")
    weights, config = source / "model.safetensors", source / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    refused(place, tmp_path / "nothing", tmp_path, ("does not exist",))
    weights.write_bytes(whole[: len(whole) // 2])
    refused(place, source, tmp_path, ("not a whole .safetensors file", str(weights)))
    weights.write_bytes(whole)
    for content, words in (
        ("{", ("cannot be read",)),
        ("[1]", ("is a list",)),
        ('{"model_type": "gpt2"}', ("gpt2",)),
    ):
        config.write_text(content)
        refused(place, source, tmp_path, words)
    config.unlink()
    refused(place, source, tmp_path, ("no configuration beside", "config.json", "--config_file"))
    refused(place, source, tmp_path, ("no configuration file",), f"--config_file={tmp_path / 'x.json'}")
    (tmp_path / "other.json").write_text(text)
    convert(place, source, tmp_path / "ours", f"--config_file={tmp_path / 'other.json'}")
    for name, value in (("layout", "reference"), ("step", 0), ("dtype", "float32")):
        refused(place, source, tmp_path, (f"--{name}", "a PyTorch checkpoint"), f"--{name}={value}")
    refused(place, source, tmp_path, ("ours exists",), f"--config_file={tmp_path / 'other.json'}")
    given = f"--config_file={tmp_path / 'other.json'}"
    refused(place, source, tmp_path, ("a run folder is made", ".pt"), given, to="x.pt")
    refused(place, source, tmp_path, ("cannot write --to", "choose another"), given, to="other.json/a/b")
    refused(place, source, tmp_path, ("cannot write --to", "too long"), given, to="n" * 300)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "link exists" in convert(place, source, tmp_path / "link", given, code=2).err
    (tmp_path / "link").unlink()
    change_tensors(source, lambda t: t.update({f"{BLOCK}c1": np.zeros(16)}))
    refused(place, source, tmp_path, ("c1 is float64",), given, to="new/parents/run")
    for line in ("rope_theta: 1\nrope_theta: 2", "d_model: [1"):
        (tmp_path / "x.yaml").write_text(line)
        refused(place, source, tmp_path, ("cannot be read",), f"--config_file={tmp_path / 'x.yaml'}", to="x")


def test_wrong_exports_end_in_one_line_and_leave_nothing(place, tmp_path):
    source, _ = make_checkpoint(tmp_path / "theirs")
    ours = tmp_path / "ours"
    convert(place, source, ours)
    refused(place, ours, tmp_path, ("siamese_hybrid", "--layout=reference"), "--layout=huggingface", to="hf")
    refused(place, ours, tmp_path, ("no checkpoint 3", "there are: 0"), "--step=3", to="x.safetensors")
    refused(place, ours, tmp_path, ("--tokenizer", "a run folder"), "--tokenizer=bytes", to="x.safetensors")
    refused(place, ours, tmp_path, ("exists",), to="theirs")
    refused(place, ours, tmp_path, (".safetensors file or a folder", ".pt"), to="x.pt")
    (tmp_path / "x.json").write_text("mine")
    refused(place, ours, tmp_path, ("x.json exists",), to="x.safetensors")
    largest = max((ours / "checkpoints").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    refused(place, ours, tmp_path, ("no checkpoint asked for", "sound"), to="y.safetensors")


def test_a_full_disk_is_a_fault_that_leaves_nothing(place, tmp_path):
    source, _ = make_checkpoint(tmp_path / "theirs")
    convert(place, source, tmp_path / "ours")
    before = snapshot(tmp_path).keys()
    for arguments in ((source, "again"), (tmp_path / "ours", "x.safetensors"), (tmp_path / "ours", "folder")):
        ended = place.run(
            f"--from={arguments[0]}", f"--to={tmp_path / arguments[1]}", program=CONVERT, file_bytes=4000
        )
        assert ended.code == 1 and ended.err.splitlines()[-1].startswith("fault: "), ended
        assert snapshot(tmp_path).keys() == before


def test_help_teaches(place):
    ended = place.run("--help", program=CONVERT)
    assert ended.code == 0 and "--from" in ended.out and "huggingface" in ended.out and ended.err == ""
    ended = place.run("--from=x", program=CONVERT)
    assert ended.code == 2 and "--to is missing" in ended.err
