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
from siamese_jax.interop import images
from siamese_jax.interop.convert import export_checkpoint, foreign_model, import_checkpoint
from siamese_jax.models.diffusion import DiffusionConfig
from siamese_jax.models.families import make_model
from siamese_jax.models.vision import VisionConfig
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


def published(family, width, heads, **changes):
    """Weights of zeros of a model as wide as a published one, with the frozen positions."""
    if family == "vision":
        config = VisionConfig(width=width, num_heads=heads, mlp_hidden=4 * width, image_size=16, patch_size=4,
                              num_classes=10, num_layers=1, **changes)  # fmt: skip
        layout = images.vision_layout(config)
    else:
        config = DiffusionConfig(width=width, num_heads=heads, mlp_hidden=4 * width, image_size=8, num_classes=10,
                                 num_layers=1, **changes)  # fmt: skip
        layout = images.diffusion_layout(config)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in layout.tensors().items()}
    return config, zeros | dict(layout.fixed)


@pytest.mark.parametrize(
    ("family", "width", "heads", "changes"),
    [
        ("vision", 192, 3, {}),
        ("vision", 384, 6, {"distilled": True}),
        ("vision", 768, 12, {"residual": "pre"}),
        ("vision", 1280, 16, {"residual": "pre"}),
        ("diffusion", 384, 6, {"residual": "pre"}),
        ("diffusion", 1152, 16, {"learn_sigma": False}),
    ],
)
def test_files_without_arguments_are_told_by_their_shapes(family, width, heads, changes):
    """The head counts are those of the published models."""
    config, weights = published(family, width, heads, **changes)
    shapes = {name: weight.shape for name, weight in weights.items()}
    _, found, _ = foreign_model(images.told_by_shapes(shapes, {}), shapes)
    assert found == config


def random_file(path, family, width, heads, **changes):
    _, weights = published(family, width, heads, **changes)
    random = np.random.default_rng(0)
    for name, weight in weights.items():
        if not weight.any():
            weights[name] = random.standard_normal(weight.shape).astype(np.float32)
    save_file(weights, path)
    return weights


@pytest.mark.parametrize("family", ["vision", "diffusion"])
def test_what_a_configuration_lacks_is_told_by_shapes(family, tmp_path):
    """Eight heads of 16: no published model, so their number must be given, and nothing else."""
    weights = random_file(tmp_path / "model.safetensors", family, 128, 8)
    source, run = str(tmp_path / "model.safetensors"), str(tmp_path / "run")
    with pytest.raises(InputError, match=r"number of heads.*width 128.*--config_file"):
        import_checkpoint(source, run, say=quiet)
    (tmp_path / "model.json").write_text('{"num_heads": 8}')
    lines = []
    import_checkpoint(source, run, say=lines.append)
    assert any("configuration: model.json and the shapes of its weights: " in line for line in lines)
    assert read_config(run).model.num_heads == 8
    export_checkpoint(run, str(tmp_path / "out.safetensors"), say=quiet)
    back = load_file(tmp_path / "out.safetensors")
    assert all(np.array_equal(back[name], weight) for name, weight in weights.items())
    (tmp_path / "other.json").write_text('{"numheads": 8}')
    with pytest.raises(InputError, match=r"unknown key 'numheads' .*nearest: num_heads"):
        import_checkpoint(source, str(tmp_path / "run2"), config_file=str(tmp_path / "other.json"), say=quiet)


def test_a_configuration_of_another_kind_is_named_and_not_read(tmp_path):
    random_file(tmp_path / "model.safetensors", "vision", 192, 3)
    (tmp_path / "config.json").write_text('{"architecture": "deit_tiny_patch16_224", "num_classes": 10}')
    lines = []
    import_checkpoint(str(tmp_path / "model.safetensors"), str(tmp_path / "run"), say=lines.append)
    assert "note: config.json has no arguments of this model's class: it is not read" in lines
    assert any(line.startswith("data.normalise: imagenet ") for line in lines)


def test_a_model_without_a_label_for_none_says_so(tmp_path):
    """Shapes alone would take its last class for the label that stands for none."""
    random_file(tmp_path / "model.safetensors", "diffusion", 384, 6, label_dropout=0.0)
    (tmp_path / "model.json").write_text('{"class_dropout_prob": 0}')
    import_checkpoint(str(tmp_path / "model.safetensors"), str(tmp_path / "run"), say=quiet)
    config = read_config(str(tmp_path / "run"))
    assert (config.model.num_classes, config.model.label_dropout) == (10, 0.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_exports_come_back(dtype, tmp_path):
    """Their frozen positions are rounded like all else; those that were trained are still refused."""
    weights, theirs = state_dict("d1_dit_siamese")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "model.json").write_text(json.dumps(theirs))
    import_checkpoint(str(tmp_path / "model.safetensors"), str(tmp_path / "run"), say=quiet)
    export_checkpoint(str(tmp_path / "run"), str(tmp_path / "out.safetensors"), dtype=dtype, say=quiet)
    import_checkpoint(str(tmp_path / "out.safetensors"), str(tmp_path / "back"), say=quiet)
    narrow = load_file(tmp_path / "out.safetensors")
    save_file(narrow | {"pos_embed": narrow["pos_embed"] * 0.99}, tmp_path / "out.safetensors")
    with pytest.raises(InputError, match="pos_embed differs"):
        import_checkpoint(str(tmp_path / "out.safetensors"), str(tmp_path / "again"), say=quiet)


@pytest.mark.parametrize("hidden", [488, 920, 976, 1840])
def test_the_mlp_ratio_gives_the_hidden_width_back(hidden):
    """At this width the plain quotient times the width is a little less than the whole number."""
    config = VisionConfig(width=448, num_heads=7, mlp_hidden=hidden)
    assert int(images.reference_config(config)["mlp_ratio"] * 448) == hidden


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"patch_embed.proj.weight": (192, 3, 2, 4, 4)}, "patch_embed.proj.weight has the shape (192, 3, 2, 4, 4)"),
        ({"patch_embed.proj.weight": (192, 3, 4, 2)}, "square patches"),
        ({"patch_embed.proj.weight": (192, 3, 0, 0)}, "square patches"),
        ({"pos_embed": (17,)}, "pos_embed has the shape (17,)"),
        ({"pos_embed": (1, 1, 192)}, "pos_embed has the shape (1, 1, 192)"),
        ({"blocks.0.mlp.fc1.weight": (768,)}, "blocks.0.mlp.fc1.weight (768,)"),
    ],
)
def test_other_models_with_patches_end_in_one_line(changed, words):
    _, weights = published("vision", 192, 3)
    shapes = {name: weight.shape for name, weight in weights.items()} | changed
    with pytest.raises(InputError) as caught:
        images.told_by_shapes(shapes, {})
    assert words in str(caught.value) and "\n" not in str(caught.value)


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
