"""The PyTorch reference: OLMo v1, its HybridNorm and SiameseNorm blocks. Configuration keys and parameter names.

Legend: D width, H heads, J key/value heads, K head dim, F hidden width, V rows of the embedding.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from siamese_jax.errors import InputError
from siamese_jax.interop import keys
from siamese_jax.interop.layout import Layout, Rule, Shape, gated, join_all, matrix, norm, qkv, split_all
from siamese_jax.layers.mlp import GATED
from siamese_jax.models.language import INITIALIZERS, LanguageConfig
from siamese_jax.residual.scheme import SchemeFactory, layer_rows
from siamese_jax.residual.single_stream import Hybrid, Pre, Reordered
from siamese_jax.residual.two_stream import SiameseHybrid

# Keys of an OLMo v1 model configuration that decide what is computed, with OLMo's defaults.
DEFAULTS = {
    "d_model": 768, "n_heads": 12, "n_kv_heads": None, "n_layers": 12, "mlp_ratio": 4, "mlp_hidden_size": None,
    "activation_type": "swiglu", "rope_theta": 10000, "multi_query_attention": None,
    "attention_layer_norm": False, "layer_norm_type": "default", "layer_norm_with_affine": True,
    "layer_norm_eps": 1e-5, "max_sequence_length": 1024, "include_bias": True, "bias_for_layer_norm": None,
    "vocab_size": 50257, "embedding_size": 50304, "weight_tying": True, "norm_after": False,
    "init_fn": "normal", "init_std": 0.02,
}  # fmt: skip
# What the HybridNorm and SiameseNorm blocks add.
HYBRID_DEFAULTS = {
    "use_query_norm": False, "use_key_norm": False, "use_value_norm": False, "use_context_norm": False,
    "attn_norm": None, "attn_residual_after_norm": None, "ffn_norm": None, "ffn_residual_after_norm": None,
    "norm_pos_special_config": "",
}  # fmt: skip
# Keys whose other values this model does not have, with the one that it has.
ONLY = {
    "block_type": "sequential", "block_group_size": 1, "alibi": False, "rope": True, "clip_qkv": None,
    "embedding_layer_norm": False, "scale_logits": False, "attention_layer_norm_with_affine": True,
}  # fmt: skip
# Keys that change neither the parameters nor, at evaluation, what is computed from them.
IGNORED = (
    "flash_attention", "attention_dropout", "residual_dropout", "embedding_dropout", "rope_full_precision",
    "alibi_bias_max", "eos_token_id", "pad_token_id", "init_device", "init_cutoff_factor", "precision",
    "scale_emb_init", "emb_init_std",
)  # fmt: skip
KNOWN = (*DEFAULTS, *HYBRID_DEFAULTS, *ONLY, *IGNORED)
# The keys of one layer in norm_pos_special_config -> our options.
OVERRIDES = {
    "attn_norm": "attn_norm",
    "attn_residual": "attn_residual_after_norm",
    "ffn_norm": "ffn_norm",
    "ffn_residual": "ffn_residual_after_norm",
}
# Pre-Norm, as a setting of the hybrid blocks.
PRE_NORM = {
    "attn_norm": True,
    "attn_residual_after_norm": False,
    "ffn_norm": True,
    "ffn_residual_after_norm": False,
}
NORM_TYPES = {"rms": "rms", "default": "layer", "low_precision": "layer"}
BRANCH_NORMS = {"query": "q_norm", "key": "k_norm", "value": "v_norm", "context": "c_norm"}
TWO_STREAM_MARK = "transformer.ln_y_f.weight"
TABLE = "transformer.wte.weight"


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, Shape]:
    """Name -> shape."""
    return {name: tuple(np.shape(tensor)) for name, tensor in tensors.items()}


# ------------------------------------------------------------------------------ their configuration -> ours


def language_config(
    reference: Mapping[str, Any], shapes: Mapping[str, Shape], exclude_padding: bool = False
) -> LanguageConfig:
    """Our configuration for a reference configuration and the shapes of its parameters.

    Which blocks they are, and whether q/k norms are per head, stands in the parameters alone. The reference
    takes rows that only pad the vocabulary into its softmax, and so does the result, unless `exclude_padding`.
    """
    keys.check_known(reference, KNOWN, ONLY)
    given = DEFAULTS | {key: value for key, value in reference.items() if key in DEFAULTS}
    width, num_heads, num_layers = (keys.whole(given, key) for key in ("d_model", "n_heads", "n_layers"))
    multi_query = keys.flag(given, "multi_query_attention", False)
    kv_heads = keys.whole(given, "n_kv_heads", 1 if multi_query else num_heads)
    vocab_size = keys.whole(given, "vocab_size")
    rows = keys.whole(given, "embedding_size", vocab_size)
    _check_vocabulary(rows, vocab_size, shapes)
    activation = keys.word(given, "activation_type", ("swiglu", "gelu"))
    hidden = keys.whole(given, "mlp_hidden_size", int(keys.number(given, "mlp_ratio") * width))
    if activation in GATED:
        if hidden % 2:
            raise InputError(f"mlp_hidden_size is {hidden}: swiglu splits it into two halves, so it must be even")
        hidden //= 2
    use_bias, tied = keys.flag(given, "include_bias"), keys.flag(given, "weight_tying")
    if use_bias and not tied:
        raise InputError("include_bias with weight_tying off gives the head a bias, which this model does not have")
    init = given["init_fn"] if given["init_fn"] in INITIALIZERS else "mitchell"
    residual, options, overrides = _scheme(reference, given, shapes, num_layers)
    return LanguageConfig(
        residual=residual,
        residual_options=tuple(sorted(options.items())),
        residual_overrides=overrides,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=0 if kv_heads == num_heads else kv_heads,
        mlp_hidden=hidden,
        activation=activation,
        norm=_norm_kind(given),
        norm_epsilon=keys.number(given, "layer_norm_eps"),
        use_bias=use_bias,
        rope_theta=keys.number(given, "rope_theta"),
        vocab_size=vocab_size if exclude_padding else rows,
        vocab_multiple=rows if exclude_padding else 1,
        tie_embedding=tied,
        init=init,
        init_std=keys.number(given, "init_std"),
        **_norm_places(reference, given, shapes, kv_heads),
    )


def _check_vocabulary(rows: int, vocab_size: int, shapes: Mapping[str, Shape]) -> None:
    if vocab_size > rows:
        raise InputError(f"vocab_size {vocab_size} is above embedding_size {rows} in the reference configuration")
    if TABLE in shapes and shapes[TABLE][:1] != (rows,):
        raise InputError(
            f"the vocabulary is padded differently: {TABLE} has shape {shapes[TABLE]}, the configuration says "
            f"embedding_size {rows}: set embedding_size to the rows of the table"
        )


def _norm_kind(given: Mapping[str, Any]) -> str:
    kind = NORM_TYPES[keys.word(given, "layer_norm_type", NORM_TYPES)]
    bias = keys.flag(given, "bias_for_layer_norm", keys.flag(given, "include_bias"))
    affine = keys.flag(given, "layer_norm_with_affine")
    if kind == "rms" and (bias or not affine):
        raise InputError("layer_norm_type 'rms' needs layer_norm_with_affine on and bias_for_layer_norm off")
    return kind if kind == "rms" else "layer_plain" if not affine else "layer" if bias else "layer_no_bias"


def _is_hybrid_code(reference: Mapping[str, Any], shapes: Mapping[str, Shape]) -> bool:
    return TWO_STREAM_MARK in shapes or any(key in reference for key in HYBRID_DEFAULTS)


def _scheme(reference, given, shapes, num_layers: int) -> tuple[str, dict[str, bool], str]:
    """(residual, its options, its overrides)."""
    if not _is_hybrid_code(reference, shapes):
        return "reordered" if keys.flag(given, "norm_after") else "pre", {}, ""
    if keys.flag(given, "norm_after"):
        raise InputError("norm_after is on in a configuration of the hybrid blocks, which do not have it")
    two_stream = TWO_STREAM_MARK in shapes
    needed = OVERRIDES.values()
    missing = [key for key in needed if not isinstance(reference.get(key), bool)]
    if missing:  # the weights do not tell whether a residual is normalised: there is nothing to guess from
        kind = "two-stream" if two_stream else "HybridNorm"
        raise InputError(f"a configuration of the {kind} blocks must set {', '.join(missing)} to true or false")
    options = {key: reference[key] for key in needed}
    overrides = _parse_special(reference.get("norm_pos_special_config") or "", num_layers)
    if two_stream:
        return "siamese_hybrid", options, repr(overrides) if overrides else ""
    if options == PRE_NORM and not overrides:
        return "pre", {}, ""
    return "hybrid", options, repr(overrides) if overrides else ""


def _parse_special(text: Any, num_layers: int) -> dict[int, dict[str, bool]]:
    """norm_pos_special_config, such as "_{0:{'attn_norm':True,'ffn_residual':False}}_", in our options."""
    where = f"norm_pos_special_config {text!r}"
    overrides: dict[int, dict[str, bool]] = {}
    for layer, row in layer_rows(str(text).strip("_ "), num_layers, where):
        for key, value in row.items():
            if key not in OVERRIDES or not isinstance(value, bool):
                raise InputError(
                    f"{where} has {key!r}: {value!r}; it may set {', '.join(OVERRIDES)} to True or False"
                )
            overrides.setdefault(layer, {})[OVERRIDES[key]] = value
    return overrides


def _norm_places(reference, given, shapes, kv_heads: int) -> dict[str, str]:
    """Where q, k, v and the context are normalised: per head, or over all heads together."""
    both = keys.flag(given, "attention_layer_norm")
    usual = "head" if _is_hybrid_code(reference, shapes) else "full"
    head_dim = given["d_model"] // given["n_heads"]
    places = {}
    for name, short in BRANCH_NORMS.items():
        wanted = keys.flag(reference, f"use_{name}_norm", False) or (both and name in ("query", "key"))
        # Either is found with either code. The gain's size tells which, but for a single head.
        size = sum(shapes.get(f"transformer.blocks.0.{short}.weight", ()))
        heads = given["n_heads"] if name in ("query", "context") else kv_heads
        place = usual if heads == 1 or not size else "head" if size == head_dim else "full"
        places[f"{name}_norm"] = place if wanted else "none"
    return places


# ------------------------------------------------------------------------------ our configuration -> theirs


def _factories(config: LanguageConfig) -> list[SchemeFactory]:
    """The scheme of every layer, which the reference must have."""
    factories = [factory for factory, count in config.segments() for _ in range(count)]
    schemes = {factory.scheme for factory in factories}
    if len(schemes) > 1 or not schemes <= {SiameseHybrid, Hybrid, Pre, Reordered}:
        raise InputError(
            f"the PyTorch reference has no {config.residual!r} model: it has siamese_hybrid, hybrid, hybrid_star, "
            "pre and reordered"
        )
    return factories


def reference_config(config: LanguageConfig, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The reference's configuration of our model; what ours does not say comes from `base`.

    InputError where the reference has no such model.
    """
    factories = _factories(config)
    scheme = factories[0].scheme
    _check_expressible(config, factories)
    reference = dict(
        DEFAULTS | ONLY | {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    )
    reference |= {"eos_token_id": 0, "pad_token_id": 0, "init_device": "cpu"} | dict(base or {})
    gate = 2 if config.activation in GATED else 1
    reference |= {
        "d_model": config.width, "n_heads": config.num_heads, "n_layers": config.num_layers,
        "n_kv_heads": config.num_kv_heads or None, "multi_query_attention": None,
        "mlp_hidden_size": gate * config.mlp_hidden, "activation_type": config.activation,
        "rope_theta": int(config.rope_theta) if config.rope_theta.is_integer() else config.rope_theta,
        "layer_norm_type": "rms" if config.norm == "rms" else "default",
        "layer_norm_with_affine": config.norm != "layer_plain", "layer_norm_eps": config.norm_epsilon,
        "include_bias": config.use_bias, "bias_for_layer_norm": config.norm == "layer",
        "vocab_size": min(config.vocab_size, dict(base or {}).get("vocab_size", config.vocab_size)),
        "embedding_size": config.padded_vocab, "weight_tying": config.tie_embedding,
        "init_fn": config.init, "init_std": config.init_std, "norm_after": scheme is Reordered,
        "attention_layer_norm": config.query_norm == "full",
    }  # fmt: skip
    for key in HYBRID_DEFAULTS:
        reference.pop(key, None)
    if _needs_hybrid_code(config, scheme):
        reference |= {f"use_{name}_norm": getattr(config, f"{name}_norm") == "head" for name in BRANCH_NORMS}
        layers = [_layer_options(factory) for factory in factories]
        common = max(layers, key=layers.count)
        reference |= common | {"norm_pos_special_config": _format_special(common, layers)}
    return reference


def _needs_hybrid_code(config: LanguageConfig, scheme) -> bool:
    per_head = any(getattr(config, f"{name}_norm") == "head" for name in BRANCH_NORMS)
    return scheme in (SiameseHybrid, Hybrid) or (scheme is Pre and per_head)


def _layer_options(factory: SchemeFactory) -> dict[str, bool]:
    """The four keys of one layer of the hybrid blocks; Pre-Norm is one of their settings."""
    if factory.scheme is Pre:
        return PRE_NORM
    options = {field.name: field.default for field in dataclasses.fields(factory.scheme)} | dict(factory.options)
    return {key: options[key] for key in OVERRIDES.values()}


def _format_special(common: Mapping[str, bool], layers: list[dict[str, bool]]) -> str:
    short = {option: key for key, option in OVERRIDES.items()}
    rows = {}
    for i, own in enumerate(layers):
        if own != common:
            rows[i] = {short[key]: value for key, value in own.items() if value != common[key]}
    return f"_{rows!r}_".replace(" ", "") if rows else ""


def _check_expressible(config: LanguageConfig, factories) -> None:
    places = {getattr(config, f"{name}_norm") for name in BRANCH_NORMS} - {"none"}
    scheme = factories[0].scheme
    hybrid = _needs_hybrid_code(config, scheme)
    two = scheme is SiameseHybrid
    fixed = {"depth_scale": "layer2", "input_norm": True, "final_norm": True}
    odd = [
        f"residual_options.{key} {value!r} (only {fixed[key]!r})"
        for factory in factories
        for key, value in (factory.options if two else ())
        if key in fixed and value != fixed[key]
    ]
    if config.head_dim and config.head_dim * config.num_heads != config.width:
        odd.append(f"head_dim {config.head_dim} with {config.num_heads} heads at width {config.width}")
    if places - ({"head"} if hybrid else {"full"}) or (scheme is Reordered and "head" in places):
        odd.append(f"{' and '.join(sorted(places))} norms of q, k, v or the context in a {config.residual} model")
    elif places == {"full"} and (config.query_norm, config.key_norm, config.value_norm, config.context_norm) != (
        "full", "full", "none", "none",
    ):  # fmt: skip
        odd.append("full-width norms of anything but both q and k")
    if places and config.norm == "layer_plain":
        odd.append("norms of q, k, v or the context beside norms without gains")
    if config.activation not in ("swiglu", "gelu"):
        odd.append(f"activation {config.activation!r} (swiglu or gelu)")
    if config.use_bias and not config.tie_embedding:
        odd.append("use_bias with an untied head (its head would have a bias)")
    if odd:
        raise InputError(f"the PyTorch reference does not have: {odd[0]}")


# ------------------------------------------------------------------------------ parameter names


def layout(config: LanguageConfig) -> Layout:
    """The reference's parameters of our model; InputError where the reference has no such scheme."""
    factories = _factories(config)
    two_stream = factories[0].scheme is SiameseHybrid
    tops = {"ln_f": "final_post", "ln_y_f": "final_pre", "ln_final_f": "final"} if two_stream else {"ln_f": "final"}
    table = (config.padded_vocab, config.width)
    whole = [Rule("embedding/table", {TABLE: table})]
    for theirs, ours in tops.items():
        whole += norm(f"residual/{ours}", f"transformer.{theirs}", config.width, config.norm)
    if not config.tie_embedding:
        whole.append(matrix("head/kernel", "transformer.ff_out.weight", table))
    layers = tuple(
        tuple(_layer(config, factory, f"transformer.blocks.{i}.")) for i, factory in enumerate(factories)
    )
    return Layout(tuple(whole), layers)


def _layer(config: LanguageConfig, factory: SchemeFactory, prefix: str) -> list[Rule]:
    width, heads = config.width, config.num_heads * config.key_dim
    rules = [
        qkv("attention/qkv/kernel", (f"{prefix}att_proj.weight",), config),
        matrix("attention/out/kernel", f"{prefix}attn_out.weight", (width, heads)),
        matrix("mlp/down/kernel", f"{prefix}ff_out.weight", (width, config.mlp_hidden)),
    ]
    is_gated = config.activation in GATED
    if is_gated:
        rules.append(gated("mlp/up/kernel", (f"{prefix}ff_proj.weight",), config))
    else:
        rules.append(matrix("mlp/up/kernel", f"{prefix}ff_proj.weight", (config.mlp_hidden, width)))
    if config.use_bias:
        up = f"{prefix}ff_proj.bias"
        rules += [
            qkv("attention/qkv/bias", (f"{prefix}att_proj.bias",), config, bias=True),
            Rule("attention/out/bias", {f"{prefix}attn_out.bias": (width,)}),
            gated("mlp/up/bias", (up,), config, bias=True)
            if is_gated
            else Rule("mlp/up/bias", {up: (config.mlp_hidden,)}),
            Rule("mlp/down/bias", {f"{prefix}ff_out.bias": (width,)}),
        ]
    for name, short in BRANCH_NORMS.items():
        place = getattr(config, f"{name}_norm")
        if place != "none":
            heads_of = config.num_heads if name in ("query", "context") else config.kv_heads
            size = config.key_dim * (1 if place == "head" else heads_of)
            rules += norm(f"attention/{name}_norm", f"{prefix}{short}", size, config.norm)
    for ours, theirs in _layer_norms(factory).items():
        if theirs == "c1":
            rules.append(Rule(f"residual/{ours}/gain", {f"{prefix}c1": (width,)}))
        else:
            rules += norm(f"residual/{ours}", f"{prefix}{theirs}", width, config.norm)
    return rules


def _layer_norms(factory: SchemeFactory) -> dict[str, str]:
    """Our norms of one layer -> the reference's."""
    options = _layer_options(factory) if factory.scheme is not Reordered else {"attn_norm": True, "ffn_norm": True}
    if factory.scheme is SiameseHybrid:
        norms = {
            "attention_post": "attn_norm" if options["attn_norm"] else "c1",
            "attention_pre": "attn_y_norm",
            "mlp_pre": "ff_y_norm",
            "mlp_input": "ff_input_norm",
        }
        return norms | ({"mlp_post": "ff_norm"} if options["ffn_norm"] else {})
    norms = {"attention_norm": "attn_norm"} if options["attn_norm"] else {}
    return norms | ({"mlp_norm": "ff_norm"} if options["ffn_norm"] else {})


def from_reference(tensors: Mapping[str, np.ndarray], config: LanguageConfig) -> dict:
    """The parameter tree of a reference state dict, numpy arrays; gradients have the layout of their weights."""
    return join_all(layout(config), config, tensors)


def to_reference(params: Mapping, config: LanguageConfig) -> dict[str, np.ndarray]:
    """The reference state dict of a parameter tree."""
    return split_all(layout(config), config, params)
