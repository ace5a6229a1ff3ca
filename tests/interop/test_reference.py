"""The reference's configuration keys and parameter names, both ways, for every option that it has."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from siamese_jax.errors import InputError
from siamese_jax.interop import reference
from siamese_jax.interop.layout import check_tensors
from siamese_jax.models.initialize import parameter_shapes
from siamese_jax.models.language import LanguageConfig
from siamese_jax.residual.scheme import resolve_options

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
BASE = LanguageConfig(
    num_layers=3, width=32, num_heads=4, num_kv_heads=2, mlp_hidden=24, vocab_size=40, vocab_multiple=1
)  # fmt: skip
STAR = "{0: {'attn_norm': True, 'ffn_residual_after_norm': False}}"


def hybrid(residual, overrides="", norms="qkv", **options):
    """A configuration of the hybrid blocks as a file of theirs gives it: the four places written out."""
    places = {
        "attn_norm": False,
        "attn_residual_after_norm": False,
        "ffn_norm": True,
        "ffn_residual_after_norm": True,
    }
    return dataclasses.replace(
        BASE,
        residual=residual,
        residual_options=tuple(sorted((places | options).items())),
        residual_overrides=overrides,
        query_norm="head" if "q" in norms else "none",
        key_norm="head" if "k" in norms else "none",
        value_norm="head" if "v" in norms else "none",
        context_norm="head" if "c" in norms else "none",
    )


def plain(residual, qk="none", **options):
    return dataclasses.replace(BASE, residual=residual, query_norm=qk, key_norm=qk, **options)


MODELS = {
    "siamese": hybrid("siamese_hybrid"),
    "siamese_star": hybrid("siamese_hybrid", STAR),
    "siamese_places": hybrid("siamese_hybrid", attn_norm=True, ffn_norm=False, ffn_residual_after_norm=False),
    "siamese_norms_qc": hybrid("siamese_hybrid", norms="qc"),
    "siamese_norms_kvc": hybrid("siamese_hybrid", norms="kvc"),
    "siamese_no_norms": hybrid("siamese_hybrid", norms=""),
    "siamese_tied": dataclasses.replace(hybrid("siamese_hybrid"), tie_embedding=True, use_bias=True),
    "siamese_gelu": dataclasses.replace(hybrid("siamese_hybrid"), activation="gelu", norm="layer"),
    "hybrid": hybrid("hybrid"),
    "hybrid_star": hybrid("hybrid", STAR),
    "hybrid_mixed": hybrid("hybrid", "{2: {'ffn_norm': False}}", attn_norm=True, attn_residual_after_norm=True),
    "pre": plain("pre"),
    "pre_full": plain("pre", "full"),
    "pre_head": plain("pre", "head"),
    "pre_plain": plain("pre", norm="layer_plain", num_kv_heads=1),
    "pre_full_one_kv_head": plain("pre", "full", num_kv_heads=1),
    "pre_no_bias": plain("pre", norm="layer_no_bias", num_kv_heads=0),
    "reordered": plain("reordered", "full"),
}


def random_tensors(shapes):
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "loop"])
def test_weights_go_round_exactly(name, scan):
    config = dataclasses.replace(MODELS[name], scan=scan)
    tensors = random_tensors(reference.layout(config).tensors())
    params = reference.from_reference(tensors, config)
    shapes = jax.tree.map(lambda leaf: leaf.shape, parameter_shapes(config))
    assert jax.tree.map(np.shape, params) == shapes  # the whole tree, and nothing beside it
    back = reference.to_reference(params, config)
    assert back.keys() == tensors.keys()
    assert all(np.array_equal(back[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("name", MODELS)
def test_configurations_go_round(name):
    config = MODELS[name]
    theirs = reference.reference_config(config)
    assert json.loads(json.dumps(theirs)) == theirs
    assert reference.language_config(theirs, reference.layout(config).tensors()) == config


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("[ab]*.npz")), ids=lambda path: path.stem)
def test_recorded_names_and_configurations_come_back(path):
    with np.load(path) as file:
        theirs = json.loads(str(file["config"]))
        tensors = {name.removeprefix("param/"): file[name] for name in file.files if name.startswith("param/")}
    config = reference.language_config(theirs, reference.shapes_of(tensors))
    back = reference.to_reference(reference.from_reference(tensors, config), config)
    assert back.keys() == tensors.keys()
    assert all(np.array_equal(back[name], tensors[name]) for name in tensors)
    again = reference.reference_config(config, theirs)
    used = {key for key in theirs if key not in reference.IGNORED} - {"mlp_ratio", "init_fn", "init_std"}
    if not any(key in again for key in reference.OVERRIDES.values()):  # OLMo's own blocks do not have these
        used -= set(reference.HYBRID_DEFAULTS)
    assert {key: again[key] for key in used} == {key: theirs[key] for key in used}


def test_rows_are_query_key_value_and_value_gate():
    """By hand, with two query heads to one key/value head: which row of a fused weight is what."""
    config = dataclasses.replace(plain("pre"), num_layers=1, width=4, num_heads=2, num_kv_heads=1, mlp_hidden=1)
    tensors = random_tensors(reference.layout(config).tensors())
    prefix = "transformer.blocks.0."
    tensors[f"{prefix}att_proj.weight"] = np.arange(8, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    tensors[f"{prefix}ff_proj.weight"] = np.array([[10.0] * 4, [20.0] * 4], np.float32)
    layer = reference.from_reference(tensors, config)["layers"]
    qkv = layer["attention"]["qkv"]["kernel"][0]  # [D, J, G + 2, K]
    assert qkv[0, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]  # head 0, head 1, key, value
    assert layer["mlp"]["up"]["kernel"][0][0].tolist() == [[10], [20]]  # value, gate


def test_padding_of_the_vocabulary_is_kept_in_the_softmax_or_out_of_it():
    theirs = reference.reference_config(MODELS["pre"]) | {"vocab_size": 37, "embedding_size": 40}
    shapes = reference.layout(MODELS["pre"]).tensors()
    inside = reference.language_config(theirs, shapes)
    assert (inside.vocab_size, inside.padded_vocab) == (40, 40)
    outside = reference.language_config(theirs, shapes, exclude_padding=True)
    assert (outside.vocab_size, outside.padded_vocab) == (37, 40)
    for config in (inside, outside):
        back = reference.reference_config(config, theirs)
        assert (back["vocab_size"], back["embedding_size"]) == (37, 40)


CONFIG = reference.reference_config(MODELS["siamese"])
SHAPES = reference.layout(MODELS["siamese"]).tensors()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_modle": 32}, ("'d_modle'", "nearest: d_model")),
        ({"d_model": "32"}, ("d_model", "'32'", "whole number")),
        ({"d_model": True}, ("d_model", "True")),
        ({"n_kv_heads": 2.0}, ("n_kv_heads", "2.0")),
        ({"rope_theta": float("inf")}, ("rope_theta", "inf")),
        ({"rope_theta": 10**400}, ("rope_theta", "number above 0")),
        ({"layer_norm_eps": "1e-6x"}, ("layer_norm_eps", "1e-6x")),
        ({"layer_norm_eps": -1.0}, ("layer_norm_eps", "-1.0")),
        ({"use_query_norm": "false"}, ("use_query_norm", "'false'", "true or false")),
        ({"weight_tying": "no"}, ("weight_tying", "'no'")),
        ({3: 4}, ("unknown key 3",)),
        (
            {"norm_pos_special_config": "_{0:{'ffn_residual':'False'}}_"},
            ("'ffn_residual': 'False'", "True or False"),
        ),
        ({"norm_pos_special_config": "_{0:{'attn_norm':True},0:{}}_"}, ("twice",)),
        ({"n_layers": 0}, ("n_layers", "0")),
        ({"rope": False}, ("rope", "False", "True")),
        ({"alibi": True}, ("alibi",)),
        ({"block_type": "llama"}, ("block_type", "'llama'", "'sequential'")),
        ({"clip_qkv": 8}, ("clip_qkv", "8")),
        ({"activation_type": "relu"}, ("'relu'", "swiglu", "gelu")),
        ({"layer_norm_type": "gemma"}, ("'gemma'", "rms")),
        ({"bias_for_layer_norm": True}, ("rms", "bias_for_layer_norm")),
        ({"include_bias": True, "bias_for_layer_norm": False}, ("include_bias", "head")),
        ({"mlp_hidden_size": 47}, ("47", "even")),
        ({"embedding_size": 48}, ("padded differently", "(40, 32)", "48")),
        ({"vocab_size": 41}, ("41", "40")),
        ({"norm_after": True}, ("norm_after",)),
        ({"ffn_norm": None}, ("ffn_norm", "two-stream")),
        ({"norm_pos_special_config": "_{0:{'attn_norm'}}_"}, ("norm_pos_special_config", "form")),
        ({"norm_pos_special_config": "_{7:{'attn_norm':True}}_"}, ("layer 7", "0 to 2")),
        ({"norm_pos_special_config": "_{0:{'atn':True}}_"}, ("'atn'", "attn_norm")),
        ({"norm_pos_special_config": "_{0:__import__('os').getcwd()}_"}, ("norm_pos_special_config", "form")),
    ],
)
def test_a_wrong_configuration_ends_in_one_line(change, words):
    with pytest.raises(InputError) as caught:
        reference.language_config(CONFIG | change, SHAPES)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"residual": "siamese", "residual_options": ()}, ("'siamese'", "siamese_hybrid, hybrid")),
        ({"residual": "mix", "residual_options": (), "num_layers": 4}, ("'mix'",)),
        ({"residual_options": (("depth_scale", "layer"),)}, ("depth_scale", "'layer'", "'layer2'")),
        ({"residual_overrides": "{1: {'input_norm': False}}"}, ("input_norm", "False")),
        ({"query_norm": "full", "key_norm": "full"}, ("full", "siamese_hybrid")),
        ({"activation": "gelu_tanh"}, ("gelu_tanh",)),
        ({"head_dim": 6}, ("head_dim 6",)),
        ({"use_bias": True}, ("use_bias", "head")),
        ({"norm": "layer_plain"}, ("without gains",)),
    ],
)
def test_what_the_reference_does_not_have_is_named(change, words):
    with pytest.raises(InputError) as caught:
        reference.reference_config(dataclasses.replace(MODELS["siamese"], **change))
    assert all(word in str(caught.value) for word in words)


def test_full_width_norms_of_q_alone_are_not_in_the_reference():
    with pytest.raises(InputError, match="both q and k"):
        reference.reference_config(dataclasses.replace(MODELS["pre_full"], key_norm="none"))


def test_tensors_that_do_not_fit_are_named_with_both_shapes():
    found = dict(SHAPES)
    del found["transformer.ln_f.weight"]
    found["transformer.blocks.7.c1"] = (32,)
    found["transformer.blocks.0.att_proj.weight"] = (48, 32)
    with pytest.raises(InputError) as caught:
        check_tensors(SHAPES, found, "x.pt")
    message = str(caught.value)
    words = (
        "x.pt",
        "lacks transformer.ln_f.weight (32,)",
        "has transformer.blocks.7.c1 (32,)",
        "(48, 32), not (64, 32)",
    )
    assert all(word in message for word in words) and "\n" not in message


def test_scheme_options_that_the_layout_fixes_exist():
    assert set(reference.OVERRIDES.values()) <= set(resolve_options("siamese_hybrid", {}))
    assert set(reference.OVERRIDES.values()) <= set(resolve_options("hybrid", {}))
