"""The models against outputs, streams and gradients recorded from PyTorch.

tests/golden was recorded from the reference implementation; further options are recorded here, from the
PyTorch model that test_torch_model.py holds against the same files.
"""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from siamese_jax.errors import InputError
from siamese_jax.interop import golden as goldens
from siamese_jax.interop import reference
from siamese_jax.interop.golden import compare_golden, format_golden
from siamese_jax.models.language import LanguageConfig

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
CASES = sorted(GOLDEN.glob("[abcd]*.npz"))
A1 = GOLDEN / "a1_hybridpre_hybridnorm_tied.npz"


@pytest.fixture(autouse=True)
def narrow_again():
    """64-bit types are off after every test."""
    yield
    jax.config.update("jax_enable_x64", False)


def compare(path, **options):
    """compare_golden with the types that the file needs."""
    jax.config.update("jax_enable_x64", str(path).endswith("_f64.npz"))
    return compare_golden(str(path), **options)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_everything_recorded_agrees(path):
    check_recorded(path, scan=True)


@pytest.mark.parametrize("path", [CASES[2], CASES[7]], ids=lambda path: path.stem)
def test_unrolled_layers_agree_too(path):
    check_recorded(path, scan=False)


def check_recorded(path, scan):
    result = compare(path, scan=scan)
    assert result["ok"], format_golden(result)
    exact = path.stem.endswith("_f64")
    assert (result["atol"], result["rtol"]) == ((1e-10, 1e-10) if exact else (2e-5, 1e-5))
    with np.load(path) as file:
        recorded = [name for name in file.files if name.startswith(("out/", "state/", "grad/", "rope/"))]
    assert len(result["rows"]) == len(recorded)  # nothing is passed over


BASE = LanguageConfig(
    num_layers=3, width=32, num_heads=4, num_kv_heads=2, mlp_hidden=24, vocab_size=40, vocab_multiple=1,
    query_norm="head", key_norm="head", value_norm="head",
)  # fmt: skip
STAR = "{0: {'attn_norm': True, 'ffn_residual_after_norm': False}}"
PLACES = {"attn_norm": False, "attn_residual_after_norm": False, "ffn_norm": True, "ffn_residual_after_norm": True}


def variant(residual, overrides="", **changes):
    places = {key: changes.pop(key, value) for key, value in PLACES.items()}
    options = tuple(sorted(places.items())) if "hybrid" in residual else ()
    return dataclasses.replace(
        BASE, residual=residual, residual_options=options, residual_overrides=overrides, **changes
    )


NONE = {"query_norm": "none", "key_norm": "none", "value_norm": "none"}
FULL = {"query_norm": "full", "key_norm": "full", "value_norm": "none"}
VARIANTS = {
    "siamese_star_gelu": variant("siamese_hybrid", STAR, activation="gelu", num_layers=2),
    "siamese_attn_norm_no_ffn_norm": variant("siamese_hybrid", attn_norm=True, ffn_norm=False),
    "siamese_raw_ffn_residual_context_norm": variant(
        "siamese_hybrid", ffn_residual_after_norm=False, context_norm="head", query_norm="none"
    ),
    "siamese_no_norms_mqa_tied": variant("siamese_hybrid", **NONE, num_kv_heads=1, tie_embedding=True),
    "siamese_overrides": variant("siamese_hybrid", "{(1, 2): {'attn_norm': True}, 2: {'ffn_norm': False}}"),
    "hybrid_star": variant("hybrid", STAR, num_layers=4),
    "hybrid_attn_residual_context_norm": variant(
        "hybrid", attn_norm=True, attn_residual_after_norm=True, context_norm="head"
    ),
    "pre_per_head": variant("pre", value_norm="none"),
    "olmo2": variant("reordered", **FULL),
    "olmo2_no_qk_norm_tied": variant("reordered", **NONE, tie_embedding=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_option_of_the_reference_agrees(name, tmp_path):
    pytest.importorskip("torch")
    from recording import record

    config = VARIANTS[name]
    path = tmp_path / f"{name}_f64.npz"
    record(path, reference.reference_config(config), two_stream=config.residual == "siamese_hybrid")
    result = compare(path)
    assert result["ok"], format_golden(result)
    assert config.residual in result["model"]


def altered(path, tmp_path, change):
    """A copy of a golden file with its arrays changed by `change(arrays)`."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    change(arrays)
    copy = tmp_path / path.name
    np.savez(copy, **arrays)
    return copy


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("out/logits", "logits"),
        ("out/loss", "loss"),
        ("state/y_2", "state/y_2"),
        ("grad/transformer.blocks.1.c1", "grad/transformer.blocks.1.c1"),
        ("rope/cos", "rope/cos"),
    ],
)
def test_one_wrong_number_is_found_and_stands_first(name, row, tmp_path):
    def change(arrays):
        array = np.array(arrays[name])
        array.flat[-1] += 1e-3
        arrays[name] = array

    result = compare(altered(A1, tmp_path, change))
    assert not result["ok"] and result["rows"][0]["name"] == row
    if not name.startswith("rope"):  # a wrong table spoils what is computed from it
        assert [r["name"] for r in result["rows"] if not r["ok"]] == [row]
    assert "FAILS" in format_golden(result) and "FAIL (" in format_golden(result)


def test_a_gain_in_the_wrong_place_is_found(tmp_path):
    def swap(arrays):
        first, second = (f"param/transformer.blocks.0.{name}.weight" for name in ("attn_y_norm", "ff_y_norm"))
        arrays[first], arrays[second] = arrays[second], arrays[first]

    result = compare(altered(A1, tmp_path, swap))
    failed = {row["name"] for row in result["rows"] if not row["ok"]}
    assert {"logits", "loss", "state/x_1", "state/y_1"} <= failed and "state/x_0" not in failed


def test_nan_fails_and_stands_first(tmp_path):
    def change(arrays):
        arrays["out/loss"] = np.float32("nan")

    result = compare(altered(A1, tmp_path, change))
    assert not result["ok"] and result["rows"][0]["name"] == "loss"


def test_float64_file_in_float32_has_the_limits_of_float32():
    result = compare_golden(str(GOLDEN / "b1_olmo_prenorm_tied_f64.npz"), dtype="float32")
    assert result["ok"] and (result["dtype"], result["atol"]) == ("float32", 2e-5)
    assert not compare_golden(str(GOLDEN / "b1_olmo_prenorm_tied_f64.npz"), dtype="float32", atol=1e-12)["ok"]


def config_changed(**changes):
    def change(arrays):
        arrays["config"] = json.dumps(json.loads(str(arrays["config"])) | changes)

    return change


def removed(*names):
    return lambda arrays: [arrays.pop(name) for name in names]


def added(name, array):
    return lambda arrays: arrays.update({name: array})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (removed("config"), ("no 'config'",)),
        (removed("param/transformer.blocks.1.c1"), ("lacks transformer.blocks.1.c1 (32,)",)),
        (removed("in/input_ids"), ("inputs none",)),
        (added("weights/x", np.zeros(1)), ("another format", "'weights/x'")),
        (added("out/probabilities", np.zeros(1)), ("out/probabilities",)),
        (added("state/z_1", np.zeros(1)), ("state/z_1",)),
        (added("grad/nothing", np.zeros(1)), ("nothing", "no parameter")),
        (added("param/nothing", np.zeros(1)), ("has nothing (1,)",)),
        (added("out/logits", np.zeros((2, 24, 81), np.float32)), ("(2, 24, 81)", "(2, 24, 80)")),
        (added("param/transformer.blocks.0.att_proj.weight", np.zeros((95, 32))), ("(95, 32), not (96, 32)",)),
        (added("in/input_ids", np.full((2, 24), 80)), ("80", "vocabulary of 80")),
        (added("in/input_ids", np.full((2, 24), 0.4)), ("float64", "whole numbers")),
        (added("in/input_ids", np.zeros((2, 0), int)), ("(2, 0)", "at least two")),
        (added("in/input_ids", np.full((2, 24), "a")), ("whole numbers",)),
        (added("out/logits", np.full((2, 24, 80), 5j)), ("out/logits is complex128",)),
        (added("param/transformer.wte.weight", np.full((80, 32), "x")), ("transformer.wte.weight is <U1",)),
        (removed("rope/sin"), ("tables rope/cos", "sin and cos")),
        (added("rope/xyz", np.zeros(2, np.float32)), ("rope/xyz",)),
        (added("meta", json.dumps({"dtype": ["float32"]})), ("meta",)),
        (config_changed(n_layers=4), ("lacks transformer.blocks.3",)),
        (config_changed(d_modle=4), ("'d_modle'", "d_model")),
        (config_changed(embedding_size=96), ("padded differently", "(80, 32)", "96")),
        (added("meta", json.dumps({"dtype": "int8"})), ("meta",)),
        (lambda arrays: [arrays.pop(n) for n in list(arrays) if n[:4] in ("out/", "stat", "grad")], ("no output",)),
    ],
)
def test_a_wrong_file_ends_in_one_line(change, words, tmp_path):
    with pytest.raises(InputError) as caught:
        compare(altered(A1, tmp_path, change))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("c1_deit_siamese", added("in/image", np.zeros((0, 3, 16, 16), np.float32)), ("labels", "not 0 whole")),
        (
            "c1_deit_siamese",
            lambda a: a.update({f"in/{name}": a[f"in/{name}"][:0] for name in ("image", "labels", "labels_dist")}),
            ("labels is empty",),
        ),
        ("c1_deit_siamese", added("in/labels", np.array([0, 1, 10])), ("labels from 0 to 10", "0 to 9")),
        ("d1_dit_siamese", added("in/cfg_scale", np.ones(2, np.float32)), ("cfg_scale", "(2,)")),
        (
            "d1_dit_siamese",
            lambda a: a.update({f"in/{name}": a[f"in/{name}"][:3] for name in ("cfg_x", "cfg_t", "cfg_y")}),
            ("cfg_x 3 rows", "two equal halves"),
        ),
        ("d1_dit_siamese", added("in/t", np.array([0, 1000])), ("t from 0 to 1000", "0 to 999")),
        ("d1_dit_siamese", removed("in/target"), ("inputs", "target")),
    ],
)
def test_a_wrong_file_of_an_image_model_ends_in_one_line(file, change, words, tmp_path):
    with pytest.raises(InputError) as caught:
        compare(altered(GOLDEN / f"{file}.npz", tmp_path, change))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", b"just text"], ids=["empty", "zip", "text"])
def test_a_file_that_is_no_npz_ends_in_one_line(content, tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a golden file"):
        compare(path)


def test_a_truncated_file_and_one_of_pickles_end_in_one_line(tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(A1.read_bytes()[:50_000])
    with pytest.raises(InputError, match="not a golden file"):
        compare(path)
    np.savez(path, config=np.array([{"a": 1}], dtype=object), meta="{}")
    with pytest.raises(InputError, match="not a golden file"):
        compare(path)
    with pytest.raises(InputError, match="no golden file"):
        compare(tmp_path / "missing.npz")


def test_a_family_that_is_not_here_is_named(tmp_path):
    def change(arrays):
        arrays["config"] = json.dumps({"sample_rate": 16, "patch_size": 4})

    with pytest.raises(InputError, match="sample_rate"):
        compare(altered(A1, tmp_path, change))
    assert set(goldens.FAMILIES) == {"d_model", "img_size", "input_size"}
