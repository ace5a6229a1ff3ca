"""The Hugging Face layout: our single-stream models that `transformers` has too, by its names and keys.

`pre` without q/k norms is a Llama, with per-head q/k norms a Qwen3, with LayerNorm without parameters an
OLMo; `reordered` with full-width q/k norms is an OLMo 2. Legend: D width, H heads, J key/value heads, K head dim.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from siamese_jax.errors import InputError
from siamese_jax.interop import keys
from siamese_jax.interop.layout import Layout, Rule, Shape, gated, matrix, norm, qkv
from siamese_jax.models.language import LanguageConfig

TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Family:
    """A model of `transformers`: its class, and which of our models it is."""

    architecture: str
    residual: str = "pre"
    norm: str = "rms"
    qk_norm: str = "none"
    mlp_bias: bool = False  # whether it can have one
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")


FAMILIES = {
    "llama": Family("LlamaForCausalLM", mlp_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head"),
    "olmo": Family("OlmoForCausalLM", norm="layer_plain"),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        residual="reordered",
        qk_norm="full",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
USED = (
    *NEEDED, "model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "max_position_embeddings",
)  # fmt: skip
# Keys whose other values our model does not have. None stands for a missing key, too.
ONLY = {
    "hidden_act": "silu", "rope_scaling": None, "clip_qkv": None, "use_sliding_window": False,
    "is_encoder_decoder": False, "quantization_config": None,
}  # fmt: skip
IGNORED = (
    "architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "return_dict",
    "output_hidden_states", "output_attentions", "attention_dropout", "initializer_range", "pretraining_tp",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "id2label", "label2id", "problem_type",
    "chunk_size_feed_forward", "max_window_layers", "sliding_window", "layer_types",
    "auto_map", "_attn_implementation",
)  # fmt: skip
KNOWN = (*USED, *ONLY, *IGNORED)
OLMO_EPSILON = 1e-5  # fixed in its code


def is_huggingface(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of `transformers`."""
    return "model_type" in config or "hidden_size" in config


def language_config(theirs: Mapping[str, Any]) -> LanguageConfig:
    """Our configuration for a config.json of `transformers`; InputError where our model differs."""
    family = FAMILIES[keys.word(theirs, "model_type", FAMILIES)]
    hint = ": if it changes nothing that the model computes, remove it"
    # A null stands for a missing key.
    keys.check_known({k: v for k, v in theirs.items() if v is not None or k not in ONLY}, KNOWN, ONLY, hint)
    if set(theirs.get("layer_types") or ()) - {"full_attention"}:
        raise InputError(f"layer_types has {theirs['layer_types']}: this model has full_attention only")
    width, hidden, num_layers, heads, rows = (keys.whole(theirs, key) for key in NEEDED)
    kv_heads = keys.whole(theirs, "num_key_value_heads", heads)
    head_dim = keys.whole(theirs, "head_dim", max(width // heads, 1))
    biases = [keys.flag(theirs, f"{part}_bias", False) for part in ("attention", "mlp")]
    if biases[0] != biases[1]:
        raise InputError(
            f"attention_bias is {biases[0]} and mlp_bias {biases[1]}: this model has biases everywhere or nowhere"
        )
    epsilon = OLMO_EPSILON if family.norm == "layer_plain" else keys.number(theirs, "rms_norm_eps")
    return LanguageConfig(
        residual=family.residual,
        num_layers=num_layers,
        width=width,
        num_heads=heads,
        num_kv_heads=0 if kv_heads == heads else kv_heads,
        head_dim=0 if head_dim * heads == width else head_dim,
        mlp_hidden=hidden,
        norm=family.norm,
        norm_epsilon=epsilon,
        query_norm=family.qk_norm,
        key_norm=family.qk_norm,
        use_bias=biases[0],
        rope_theta=_rope_theta(theirs),
        vocab_size=rows,
        vocab_multiple=1,
        tie_embedding=keys.flag(theirs, "tie_word_embeddings", False),
    )


def _rope_theta(theirs: Mapping[str, Any]) -> float:
    rope = {} if theirs.get("rope_parameters") is None else theirs["rope_parameters"]
    plain = {"rope_type": "default", "type": "default", "rope_theta": None}
    if not isinstance(rope, Mapping) or any(
        key not in plain or value not in (plain[key], None) for key, value in rope.items() if key != "rope_theta"
    ):
        raise InputError(f"rope_parameters is {rope!r}: this model has rope_type 'default' with a rope_theta only")
    return keys.number(rope, "rope_theta", keys.number(theirs, "rope_theta", 10_000.0))


def family(config: LanguageConfig) -> str:
    """The name of the family that our model belongs to; InputError where `transformers` has no such model."""
    wanted = (config.residual, config.norm, config.query_norm)
    name = next((name for name, it in FAMILIES.items() if wanted == (it.residual, it.norm, it.qk_norm)), None)
    if name is None:
        raise InputError(
            f"transformers has no model with residual {config.residual}, norm {config.norm} and q norm "
            f"{config.query_norm}: it has pre with rms and no or per-head q/k norms, pre with layer_plain, and "
            "reordered with full-width q/k norms; --layout=reference takes more"
        )
    found = FAMILIES[name]
    odd = {
        "residual_overrides": config.residual_overrides != "",
        f"value_norm {config.value_norm}": config.value_norm != "none",
        f"context_norm {config.context_norm}": config.context_norm != "none",
        f"key_norm {config.key_norm} with query_norm {config.query_norm}": config.key_norm != config.query_norm,
        f"activation {config.activation}": config.activation != "swiglu",
        "use_bias": config.use_bias and not found.mlp_bias,
        f"norm_epsilon {config.norm_epsilon}": name == "olmo" and config.norm_epsilon != OLMO_EPSILON,
        f"head_dim {config.head_dim}": name in ("olmo", "olmo2")
        and config.key_dim * config.num_heads != config.width,
    }
    if any(odd.values()):
        first = next(what for what, is_odd in odd.items() if is_odd)
        raise InputError(f"{found.architecture} of transformers has no {first}: --layout=reference may have it")
    return name


def huggingface_config(config: LanguageConfig, base: Mapping[str, Any], length: int, dtype: str) -> dict[str, Any]:
    """The config.json of our model; what ours does not say comes from `base`. length: positions trained on."""
    name = family(config)
    theirs = {"max_position_embeddings": length, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    theirs |= dict(base) | {
        "architectures": [FAMILIES[name].architecture], "model_type": name, "hidden_size": config.width,
        "intermediate_size": config.mlp_hidden, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.kv_heads, "hidden_act": "silu",
        "vocab_size": config.padded_vocab, "tie_word_embeddings": config.tie_embedding,
        "attention_bias": config.use_bias, "torch_dtype": dtype, "dtype": dtype,
        "rope_theta": config.rope_theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # transformers 5
    }  # fmt: skip
    if name != "olmo":
        theirs["rms_norm_eps"] = config.norm_epsilon
    if name in ("llama", "qwen3"):
        theirs["head_dim"] = config.key_dim
    if FAMILIES[name].mlp_bias:
        theirs["mlp_bias"] = config.use_bias
    return theirs


def superfluous(name: str, config: LanguageConfig) -> bool:
    """Tensors that some files hold beside the parameters: the copy of a tied head, computed rotary tables."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embedding and name == HEAD)


def layout(config: LanguageConfig) -> Layout:
    """The parameters of `transformers` for our model; InputError where it has no such model."""
    found = FAMILIES[family(config)]
    table: Shape = (config.padded_vocab, config.width)
    whole = [Rule("embedding/table", {TABLE: table})]
    whole += norm("residual/final", "model.norm", config.width, config.norm)
    if not config.tie_embedding:
        whole.append(matrix("head/kernel", HEAD, table))
    layers = tuple(tuple(_layer(config, found, f"model.layers.{i}.")) for i in range(config.num_layers))
    return Layout(tuple(whole), layers)


def _layer(config: LanguageConfig, found: Family, prefix: str) -> list[Rule]:
    width, hidden, heads = config.width, config.mlp_hidden, config.num_heads * config.key_dim
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    projections, halves = ("q_proj", "k_proj", "v_proj"), ("up_proj", "gate_proj")  # up_proj is the value
    rules = [
        qkv("attention/qkv/kernel", tuple(f"{attention}{name}.weight" for name in projections), config),
        matrix("attention/out/kernel", f"{attention}o_proj.weight", (width, heads)),
        gated("mlp/up/kernel", tuple(f"{mlp}{name}.weight" for name in halves), config),
        matrix("mlp/down/kernel", f"{mlp}down_proj.weight", (width, hidden)),
    ]
    if config.use_bias:
        rules += [
            qkv("attention/qkv/bias", tuple(f"{attention}{name}.bias" for name in projections), config, bias=True),
            Rule("attention/out/bias", {f"{attention}o_proj.bias": (width,)}),
            gated("mlp/up/bias", tuple(f"{mlp}{name}.bias" for name in halves), config, bias=True),
            Rule("mlp/down/bias", {f"{mlp}down_proj.bias": (width,)}),
        ]
    if found.qk_norm != "none":
        sizes = {"query": config.num_heads, "key": config.kv_heads}
        for name, count in sizes.items():
            size = config.key_dim * (1 if found.qk_norm == "head" else count)
            rules += norm(f"attention/{name}_norm", f"{attention}{name[0]}_norm", size, config.norm)
    for ours, theirs in zip(("attention_norm", "mlp_norm"), found.norms, strict=True):
        rules += norm(f"residual/{ours}", f"{prefix}{theirs}", width, config.norm)
    return rules
