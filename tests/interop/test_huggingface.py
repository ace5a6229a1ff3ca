"""The Hugging Face layout against `transformers` itself: it loads our export and computes the same."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.errors import InputError
from siamese_jax.interop import huggingface
from siamese_jax.interop.layout import join_all, split_all
from siamese_jax.models.initialize import parameter_shapes
from siamese_jax.models.language import LanguageConfig, LanguageModel

BASE = LanguageConfig(
    residual="pre", num_layers=3, width=32, num_heads=4, num_kv_heads=2, mlp_hidden=48, vocab_size=61,
    vocab_multiple=8, query_norm="none", key_norm="none", rope_theta=5000.0, norm_epsilon=1e-4,
)  # fmt: skip
MODELS = {
    "llama": BASE,
    "llama_tied_bias": dataclasses.replace(BASE, tie_embedding=True, use_bias=True),
    "qwen3": dataclasses.replace(BASE, query_norm="head", key_norm="head", head_dim=12),
    "olmo": dataclasses.replace(BASE, norm="layer_plain", norm_epsilon=1e-5),
    "olmo2": dataclasses.replace(BASE, residual="reordered", query_norm="full", key_norm="full", num_kv_heads=0),
}


def random_params(config):
    """Random parameters, gains around 1 and biases off 0, so that one in the wrong place shows."""
    random = np.random.default_rng(0)

    def draw(path, leaf):
        around = 1.0 if path[-1].key == "scale" else 0.0
        return random.normal(around, 0.15, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, parameter_shapes(config))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from safetensors.numpy import save_file

    config = MODELS[name]
    params = random_params(config)
    tensors = split_all(huggingface.layout(config), config, params)
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    theirs = huggingface.huggingface_config(config, {}, 64, "float32")
    (tmp_path / "config.json").write_text(json.dumps(theirs))

    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 20))
    with torch.no_grad():
        expected = model.float()(torch.from_numpy(tokens)).logits.numpy()
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(LanguageModel(config).apply)({"params": params}, jnp.asarray(tokens))
    np.testing.assert_allclose(
        logits[..., : config.vocab_size], expected[..., : config.vocab_size], rtol=0, atol=2e-5
    )

    # And what transformers itself writes comes back, configuration and weights.
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    read = huggingface.language_config(saved)
    padded = {"vocab_size": config.padded_vocab, "vocab_multiple": 1}
    assert dataclasses.replace(read, init=config.init) == dataclasses.replace(config, **padded)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scan", [True, False])
def test_round_trip_is_exact(name, scan):
    config = dataclasses.replace(MODELS[name], scan=scan)
    params = random_params(config)
    layout = huggingface.layout(config)
    back = join_all(layout, config, split_all(layout, config, params))
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True))


CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 61, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, ("gpt2", "llama, qwen3, olmo, olmo2")),
        ({"hiden_size": 3}, ("'hiden_size'", "nearest: hidden_size")),
        ({"hidden_size": None}, ("hidden_size", "None")),
        ({"hidden_act": "relu"}, ("hidden_act", "'relu'", "'silu'")),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ("yarn", "default")),
        ({"rope_scaling": {"type": "linear"}}, ("rope_scaling",)),
        ({"clip_qkv": 8.0}, ("clip_qkv", "8.0")),
        ({"attention_bias": True}, ("attention_bias is True", "mlp_bias False")),
        ({"rms_norm_eps": None}, ("rms_norm_eps",)),
        ({"rms_norm_eps": "1e-6"}, ("rms_norm_eps", "1e-6")),
        ({"rms_norm_eps": True}, ("rms_norm_eps", "True")),
        ({"rms_norm_eps": -1.0}, ("rms_norm_eps", "-1.0")),
        ({"head_dim": "8"}, ("head_dim", "'8'")),
        ({"num_key_value_heads": 2.0}, ("num_key_value_heads", "2.0")),
        ({"model_type": ["llama"]}, ("model_type", "['llama']")),
        ({"tie_word_embeddings": "false"}, ("tie_word_embeddings", "'false'")),
        ({"rope_theta": -5}, ("rope_theta", "-5")),
        ({"rope_parameters": 5}, ("rope_parameters", "5")),
        ({"rope_parameters": {"rope_theta": "x"}}, ("rope_theta", "'x'")),
        ({"rope_parameters": {"type": "linear", "factor": 4.0}}, ("rope_parameters", "linear")),
        ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, ("rope_parameters", "factor")),
        ({"layer_types": ["sliding_attention"]}, ("layer_types", "full_attention")),
        ({"use_sliding_window": True, "sliding_window": 4}, ("use_sliding_window",)),
    ],
)
def test_a_wrong_configuration_ends_in_one_line(change, words):
    with pytest.raises(InputError) as caught:
        huggingface.language_config(CONFIG | change)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"residual": "siamese_hybrid"}, ("siamese_hybrid", "--layout=reference")),
        ({"query_norm": "head"}, ("key_norm none with query_norm head",)),
        ({"value_norm": "head"}, ("value_norm head",)),
        ({"activation": "gelu"}, ("activation gelu",)),
        ({"norm": "layer_plain"}, ("norm_epsilon 0.0001",)),
        ({"norm": "layer_plain", "norm_epsilon": 1e-5, "head_dim": 12}, ("head_dim 12",)),
    ],
)
def test_what_transformers_does_not_have_is_named(change, words):
    with pytest.raises(InputError) as caught:
        huggingface.layout(dataclasses.replace(BASE, **change))
    assert all(word in str(caught.value) for word in words)
