"""Parameter names and layouts of the PyTorch reference (OLMo v1 and its hybrid blocks), as our tree.

Legend: N layers, D width, J key/value heads, G query heads of one, K head dim, F hidden width, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import numpy as np

from siamese_jax.errors import InputError
from siamese_jax.models.language import LanguageConfig

# Reference block name -> our path inside a layer, for every array that needs no reordering.
SIAMESE_HYBRID = {
    "c1": "residual/attention_post/gain",
    "attn_norm.weight": "residual/attention_post/scale",
    "attn_y_norm.weight": "residual/attention_pre/scale",
    "ff_norm.weight": "residual/mlp_post/scale",
    "ff_y_norm.weight": "residual/mlp_pre/scale",
    "ff_input_norm.weight": "residual/mlp_input/scale",
}
SINGLE_STREAM = {
    "attn_norm.weight": "residual/attention_norm/scale",
    "ff_norm.weight": "residual/mlp_norm/scale",
}
BRANCH_NORMS = {
    f"{short}_norm.weight": f"attention/{name}_norm/scale"
    for short, name in (("q", "query"), ("k", "key"), ("v", "value"), ("context", "context"))
}
TOP = {
    "transformer.wte.weight": "embedding/table",
    "transformer.ln_y_f.weight": "residual/final_pre/scale",
    "transformer.ln_final_f.weight": "residual/final/scale",
}


def _is_two_stream(names) -> bool:
    return "transformer.ln_y_f.weight" in names


def language_config(reference: Mapping[str, Any], names) -> LanguageConfig:
    """Our configuration for a reference configuration and the names of its parameters."""
    two_stream = _is_two_stream(names)
    hybrid_code = "use_query_norm" in reference
    place = {True: "head", False: "none"}
    if hybrid_code:
        norms = {f"{n}_norm": place[reference[f"use_{n}_norm"]] for n in ("query", "key", "value", "context")}
        options = {
            key: reference[key]
            for key in ("attn_norm", "attn_residual_after_norm", "ffn_norm", "ffn_residual_after_norm")
        }
        residual = "siamese_hybrid" if two_stream else "hybrid"
    else:
        full = "full" if reference["attention_layer_norm"] else "none"
        norms = {"query_norm": full, "key_norm": full, "value_norm": "none", "context_norm": "none"}
        options, residual = {}, "pre"
    return LanguageConfig(
        residual=residual,
        residual_options=tuple(sorted(options.items())),
        num_layers=reference["n_layers"],
        width=reference["d_model"],
        num_heads=reference["n_heads"],
        num_kv_heads=reference["n_kv_heads"] or 0,
        mlp_hidden=reference["mlp_hidden_size"] // 2,
        norm_epsilon=reference["layer_norm_eps"],
        rope_theta=float(reference["rope_theta"]),
        vocab_size=reference["embedding_size"],
        vocab_multiple=1,
        tie_embedding=reference["weight_tying"],
        **norms,
    )


def _qkv_kernel(weight: np.ndarray, config: LanguageConfig) -> np.ndarray:
    """att_proj rows q | k | v, (out, in) -> [D, J, G + 2, K]."""
    kv_heads, key_dim, width = config.kv_heads, config.key_dim, config.width
    groups = config.num_heads // kv_heads
    rows = (config.num_heads + 2 * kv_heads) * key_dim
    if weight.shape != (rows, width):
        raise InputError(f"att_proj has shape {weight.shape}, expected {(rows, width)} = (q | k | v, width)")
    q, k, v = np.split(weight, [config.num_heads * key_dim, (config.num_heads + kv_heads) * key_dim])
    q = q.reshape(kv_heads, groups, key_dim, width)
    k, v = (part.reshape(kv_heads, 1, key_dim, width) for part in (k, v))
    return np.moveaxis(np.concatenate([q, k, v], axis=1), -1, 0)


def _layer(weights: Mapping[str, np.ndarray], config: LanguageConfig, two_stream: bool) -> dict:
    """One block of the reference as {our path: array}."""
    plain = BRANCH_NORMS | (SIAMESE_HYBRID if two_stream else SINGLE_STREAM)
    layer = {}
    for name, weight in weights.items():
        if name in plain:
            layer[plain[name]] = weight
        elif name == "att_proj.weight":
            layer["attention/qkv/kernel"] = _qkv_kernel(weight, config)
        elif name == "attn_out.weight":
            layer["attention/out/kernel"] = weight.T
        elif name == "ff_proj.weight":
            value, gate = np.split(weight, 2)
            layer["mlp/up/kernel"] = np.stack([value.T, gate.T], axis=1)
        elif name == "ff_out.weight":
            layer["mlp/down/kernel"] = weight.T
        else:
            raise InputError(f"parameter {name!r} of a reference block has no place in our model")
    return layer


def from_reference(weights: Mapping[str, np.ndarray], config: LanguageConfig) -> dict:
    """The parameter tree (scanned layout) of a reference state dict, given as numpy arrays.

    Works for gradients too: they have the names and the layout of their weights.
    """
    two_stream = _is_two_stream(weights)
    top = TOP | {"transformer.ln_f.weight": f"residual/{'final_post' if two_stream else 'final'}/scale"}
    flat, blocks = {}, [{} for _ in range(config.num_layers)]
    for name, weight in weights.items():
        if name in top:
            flat[top[name]] = weight
        elif name == "transformer.ff_out.weight":
            flat["head/kernel"] = weight.T
        elif name.startswith("transformer.blocks."):
            index, _, rest = name.removeprefix("transformer.blocks.").partition(".")
            blocks[int(index)][rest] = weight
        else:
            raise InputError(f"parameter {name!r} of the reference has no place in our model")
    layers = [_layer(block, config, two_stream) for block in blocks]
    flat |= {f"layers/{path}": np.stack([layer[path] for layer in layers]) for path in layers[0]}
    return flax.traverse_util.unflatten_dict(flat, sep="/")
