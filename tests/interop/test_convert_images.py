"""DeiT and DiT checkpoints in and out: bit for bit, with and without their arguments beside them."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from siamese_jax.checkpoint import open_weights
from siamese_jax.errors import InputError
from siamese_jax.interop.convert import export_checkpoint, import_checkpoint
from siamese_jax.models.families import make_model
from siamese_jax.run_folder import read_config

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
CASES = ("c1_deit_siamese", "c3_timm_vit_prenorm_baseline", "d1_dit_siamese")


def state_dict(case):
    """(weights, arguments) of a golden file."""
    with np.load(GOLDEN / f"{case}.npz") as file:
        weights = {name[6:]: file[name] for name in file.files if name.startswith("param/")}
        return weights, json.loads(str(file["config"]))


def quiet(line):
    del line


@pytest.fixture(params=CASES)
def imported(request, tmp_path):
    """(weights, arguments, run folder made of them)."""
    weights, theirs = state_dict(request.param)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "model.json").write_text(json.dumps(theirs))
    told = import_checkpoint(str(tmp_path / "model.safetensors"), str(tmp_path / "run"), say=quiet)
    assert told["layout"] == ("dit" if "input_size" in theirs else "deit")
    return weights, theirs, tmp_path / "run"


def test_weights_come_back_bit_for_bit(imported, tmp_path):
    weights, theirs, run = imported
    export_checkpoint(str(run), str(tmp_path / "out.safetensors"), say=quiet)
    back = load_file(tmp_path / "out.safetensors")
    assert set(back) == set(weights)
    for name, weight in weights.items():
        if name == "pos_embed" and "input_size" in theirs:  # computed here and there
            np.testing.assert_allclose(back[name], weight, atol=1e-6)
        else:
            np.testing.assert_array_equal(back[name], weight, err_msg=name)
    arguments = json.loads((tmp_path / "out.json").read_text())
    assert {key: arguments[key] for key in theirs} == theirs


def test_the_run_folder_computes_what_was_recorded(imported):
    _, theirs, run = imported
    config = read_config(str(run))
    with open_weights(run / "checkpoints") as opened:
        flat = {name.removeprefix("params/"): jnp.asarray(opened.read(name)) for name in opened.shapes}
    params = {}
    for name, array in flat.items():
        *path, last = name.split("/")
        place = params
        for part in path:
            place = place.setdefault(part, {})
        place[last] = array
    from siamese_jax.config import model_config

    model = make_model(model_config(config))
    case = "d1" if config.family == "diffusion" else "c1" if config.model.residual == "siamese" else "c3"
    with np.load(next(GOLDEN.glob(f"{case}_*[!4].npz"))) as file, jax.default_matmul_precision("highest"):
        if config.family == "vision":
            images = jnp.moveaxis(jnp.asarray(file["in/image"]), 1, -1)
            np.testing.assert_allclose(model.apply({"params": params}, images), file["out/logits"], atol=2e-5)
        else:
            x = jnp.moveaxis(jnp.asarray(file["in/x"]), 1, -1)
            out = model.apply({"params": params}, x, jnp.asarray(file["in/t"]), jnp.asarray(file["in/y"]))
            np.testing.assert_allclose(jnp.moveaxis(out, -1, 1), file["out/output"], atol=2e-5)
    assert config.model.channels == theirs.get("in_chans", theirs.get("in_channels"))


def widened(weights, theirs, width=64):
    """Weights of random numbers with heads of 64, as published ones have."""
    random = np.random.default_rng(0)
    key = "embed_dim" if "embed_dim" in theirs else "hidden_size"
    old = theirs[key]
    shapes = {
        name: tuple(size // old * width if size % old == 0 and size >= old else size for size in weight.shape)
        for name, weight in weights.items()
    }
    made = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return made


@pytest.mark.parametrize("case", CASES)
def test_files_without_arguments_are_told_by_their_shapes(case, tmp_path):
    weights, theirs = state_dict(case)
    if "input_size" in theirs:
        theirs = theirs | {"hidden_size": 64}
        from siamese_jax.layers.patches import sine_cosine_table

        shapes = _dit_shapes()
        weights = {
            name: np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        weights["pos_embed"] = sine_cosine_table(4, 64)[None].astype(np.float32)
    else:
        weights = widened(weights, theirs, 192)
    save_file(weights, tmp_path / "model.safetensors")
    lines = []
    import_checkpoint(str(tmp_path / "model.safetensors"), str(tmp_path / "run"), say=lines.append)
    assert any("the shapes of its weights" in line for line in lines)
    config = read_config(str(tmp_path / "run"))
    assert config.model.num_heads == config.model.width // 64 and config.model.num_layers == 2
    if config.family == "vision":
        assert (config.model.image_size, config.model.patch_size, config.model.num_classes) == (16, 4, 10)
    else:
        assert (config.model.image_size, config.model.num_classes, config.model.learn_sigma) == (8, 10, True)
    export_checkpoint(str(tmp_path / "run"), str(tmp_path / "out.safetensors"), say=quiet)
    back = load_file(tmp_path / "out.safetensors")
    assert all(np.array_equal(back[name], weight) for name, weight in weights.items())


def _dit_shapes(width=64):
    from siamese_jax.interop.images import diffusion_layout
    from siamese_jax.models.diffusion import DiffusionConfig

    config = DiffusionConfig(
        num_layers=2, width=width, num_heads=1, mlp_hidden=4 * width, image_size=8, patch_size=2, num_classes=10
    )
    return diffusion_layout(config).tensors()


def broken(case, change):
    weights, theirs = state_dict(case)
    change(weights, theirs)
    return weights, theirs


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("c1_deit_siamese", lambda w, t: w.pop("head.bias"), ("lacks head.bias (10,)",)),
        ("c1_deit_siamese", lambda w, t: w.update(extra=np.zeros(2)), ("has extra (2,)",)),
        (
            "c1_deit_siamese",
            lambda w, t: t.update(img_size=32),
            ("pos_embed of shape (1, 17, 24), not (1, 65, 24)",),
        ),
        ("c1_deit_siamese", lambda w, t: t.update(patch_size=5), ("patch_size 5", "image_size 16")),
        ("c1_deit_siamese", lambda w, t: t.update(dept=2), ("'dept'", "depth")),
        ("c1_deit_siamese", lambda w, t: t.update(drop_rate=0.1), ("drop_rate is 0.1",)),
        ("c1_deit_siamese", lambda w, t: t.update(qkv_bias=False), ("qkv_bias is False",)),
        ("d1_dit_siamese", lambda w, t: w.update(pos_embed=w["pos_embed"] + 1), ("pos_embed differs", "trained")),
        ("d1_dit_siamese", lambda w, t: t.update(num_classes=9), ("(11, 32), not (10, 32)",)),
        ("d1_dit_siamese", lambda w, t: t.update(class_dropout_prob="x"), ("class_dropout_prob is 'x'",)),
    ],
)
def test_what_does_not_fit_ends_in_one_line_and_leaves_nothing(case, change, words, tmp_path):
    weights, theirs = broken(case, change)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "model.json").write_text(json.dumps(theirs))
    with pytest.raises(InputError) as caught:
        import_checkpoint(str(tmp_path / "model.safetensors"), str(tmp_path / "run"), say=quiet)
    assert "\n" not in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_image_model_has_no_tokenizer_and_no_other_layout(tmp_path):
    weights, theirs = state_dict("c1_deit_siamese")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "model.json").write_text(json.dumps(theirs))
    source = str(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="--tokenizer: an image model reads no text"):
        import_checkpoint(source, str(tmp_path / "run"), tokenizer="bytes", say=quiet)
    with pytest.raises(InputError, match="--exclude_padding: an image model has no vocabulary"):
        import_checkpoint(source, str(tmp_path / "run"), exclude_padding=True, say=quiet)
    import_checkpoint(source, str(tmp_path / "run"), say=quiet)
    with pytest.raises(InputError, match="--layout huggingface is not for the vision model"):
        export_checkpoint(str(tmp_path / "run"), str(tmp_path / "out.safetensors"), layout="huggingface", say=quiet)
