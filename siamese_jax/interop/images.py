"""The PyTorch references for images: DeiT (timm 0.4.12's names) and DiT, Pre-Norm and SiameseNorm.

Their configurations are the arguments of their classes. Legend: D width, F hidden width, P side of a patch,
C channels, K classes.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from siamese_jax.errors import InputError
from siamese_jax.interop import keys
from siamese_jax.interop.layout import Layout, Rule, Shape, matrix, norm, qkv
from siamese_jax.layers.patches import sine_cosine_table
from siamese_jax.models.diffusion import DiffusionConfig
from siamese_jax.models.transformer import TransformerConfig
from siamese_jax.models.vision import VisionConfig

DEIT_DEFAULTS = {
    "img_size": 224, "patch_size": 16, "in_chans": 3, "num_classes": 1000, "embed_dim": 768, "depth": 12,
    "num_heads": 12, "mlp_ratio": 4.0, "qkv_bias": True, "distilled": False, "drop_path_rate": 0.0,
}  # fmt: skip
DIT_DEFAULTS = {
    "input_size": 32, "patch_size": 2, "in_channels": 4, "hidden_size": 1152, "depth": 28, "num_heads": 16,
    "mlp_ratio": 4.0, "class_dropout_prob": 0.1, "num_classes": 1000, "learn_sigma": True,
}  # fmt: skip
# Keys whose other values our models do not have, with the one that they have.
DEIT_ONLY = {"drop_rate": 0.0, "attn_drop_rate": 0.0, "qk_scale": None, "representation_size": None}
ARGUMENTS = {"vision": DEIT_DEFAULTS | DEIT_ONLY, "diffusion": DIT_DEFAULTS}
SIAMESE_MARKS = {"blocks.0.post_norm1.weight": "vision", "blocks.0.postnorm1.weight": "diffusion"}
PATCHES = {"vision": "patch_embed.proj", "diffusion": "x_embedder.proj"}
FIRST_HIDDEN = "blocks.0.mlp.fc1.weight"
HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1152: 16, 1280: 16}  # of the published widths: T, S, B, L, XL, H
# Our norm of a sub-block -> theirs, which carries the number of the sub-block.
DEIT_NORMS = {"post": "post_norm", "pre": "pre_norm", "input": "input_norm"}
DIT_NORMS = {"post": "postnorm", "pre": "prenorm"}
# DeiT's own names of the last norms are swapped: its pre_norm acts on the post stream.
DEIT_LAST = {"final_post": "pre_norm", "final_pre": "post_norm", "final": "final_norm"}
DIT_LAST = {"final_post": "postnorm", "final_pre": "prenorm"}
# Our options that theirs have no choice of.
SAME = ("activation", "norm", "norm_epsilon", "query_norm", "key_norm", "value_norm", "context_norm", "use_bias")
SUB_BLOCKS = {"attention": 1, "mlp": 2}


def family_of(shapes: Mapping[str, Shape]) -> str | None:
    """vision or diffusion, where parameters of these names are those of DeiT or DiT; None elsewhere."""
    found = [family for family, name in PATCHES.items() if f"{name}.weight" in shapes]
    return found[0] if found and FIRST_HIDDEN in shapes else None


def holds_arguments(found: Mapping[str, Any], family: str) -> bool:
    """Whether a configuration is of this class; timm's own, which names an architecture, is of another kind."""
    return "architecture" not in found and bool(ARGUMENTS[family].keys() & found.keys())


# ------------------------------------------------------------------------------ their configuration -> ours


def vision_config(theirs: Mapping[str, Any], shapes: Mapping[str, Shape]) -> VisionConfig:
    """Our configuration for DeiT's arguments and the shapes of its parameters, which tell the scheme."""
    keys.check_known(theirs, ARGUMENTS["vision"], DEIT_ONLY)
    given = DEIT_DEFAULTS | dict(theirs)
    width = keys.whole(given, "embed_dim")
    if not keys.flag(given, "qkv_bias"):
        raise InputError("qkv_bias is False in the configuration: this model has biases everywhere")
    return VisionConfig(
        residual=_scheme(shapes, "vision"),
        num_layers=keys.whole(given, "depth"),
        width=width,
        num_heads=keys.whole(given, "num_heads"),
        mlp_hidden=int(keys.number(given, "mlp_ratio") * width),
        image_size=keys.whole(given, "img_size"),
        patch_size=keys.whole(given, "patch_size"),
        channels=keys.whole(given, "in_chans"),
        num_classes=keys.whole(given, "num_classes"),
        distilled=keys.flag(given, "distilled"),
        drop_path=_share(given, "drop_path_rate"),
    )


def diffusion_config(theirs: Mapping[str, Any], shapes: Mapping[str, Shape]) -> DiffusionConfig:
    """Our configuration for DiT's arguments and the shapes of its parameters, which tell the scheme."""
    keys.check_known(theirs, ARGUMENTS["diffusion"], {})
    given = DIT_DEFAULTS | dict(theirs)
    width = keys.whole(given, "hidden_size")
    return DiffusionConfig(
        residual=_scheme(shapes, "diffusion"),
        num_layers=keys.whole(given, "depth"),
        width=width,
        num_heads=keys.whole(given, "num_heads"),
        mlp_hidden=int(keys.number(given, "mlp_ratio") * width),
        image_size=keys.whole(given, "input_size"),
        patch_size=keys.whole(given, "patch_size"),
        channels=keys.whole(given, "in_channels"),
        num_classes=keys.whole(given, "num_classes"),
        label_dropout=_share(given, "class_dropout_prob"),
        learn_sigma=keys.flag(given, "learn_sigma"),
    )


def _scheme(shapes: Mapping[str, Shape], family: str) -> str:
    return "siamese" if any(mark in shapes for mark, kind in SIAMESE_MARKS.items() if kind == family) else "pre"


def _share(given: Mapping[str, Any], key: str) -> float:
    return 0.0 if given[key] == 0 else keys.number(given, key)


def told_by_shapes(shapes: Mapping[str, Shape], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of DeiT or DiT that parameters of these shapes have, but for those given.

    Files of timm and DiT bring none. What shapes do not tell is as in every published model: the number of heads
    by the width (InputError for another width), and a DiT's last label stands for none.
    """
    family = family_of(shapes)
    keys.check_known(given, ARGUMENTS[family], {})
    kernel, table = f"{PATCHES[family]}.weight", shapes.get("pos_embed", ())
    extra = 1 + ("dist_token" in shapes) if family == "vision" else 0
    if len(shapes[kernel]) != 4 or not shapes[kernel][2] == shapes[kernel][3] >= 1:
        raise InputError(f"{kernel} has the shape {shapes[kernel]}: square patches of images have (D, C, P, P)")
    if len(table) != 3 or table[1] <= extra or len(shapes[FIRST_HIDDEN]) != 2:
        raise InputError(
            f"pos_embed has the shape {table or 'none'} and {FIRST_HIDDEN} {shapes[FIRST_HIDDEN]}: "
            "these are not the positions and the MLP of DeiT or DiT"
        )
    width, channels, side, _ = shapes[kernel]
    told = {
        "patch_size": side, "depth": len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}),
        "mlp_ratio": _ratio(shapes[FIRST_HIDDEN][0], width), "num_heads": HEADS.get(width),
    }  # fmt: skip
    size = side * round((table[1] - extra) ** 0.5)
    if family == "vision":
        told |= {
            "img_size": size, "in_chans": channels, "embed_dim": width,
            "num_classes": shapes.get("head.weight", (0,))[0], "distilled": "dist_token" in shapes,
        }  # fmt: skip
    else:
        told |= {
            "input_size": size, "in_channels": channels, "hidden_size": width, "class_dropout_prob": 0.1,
            "num_classes": shapes.get("y_embedder.embedding_table.weight", (0,))[0]
            - (given.get("class_dropout_prob", 0.1) != 0),
            "learn_sigma": shapes.get("final_layer.linear.weight", (0,))[0] == 2 * channels * side**2,
        }  # fmt: skip
    told |= given
    if told["num_heads"] is None:
        raise InputError(
            f"shapes do not tell the number of heads, and no published model has the width {width}: "
            'give --config_file=FILE.json with {"num_heads": NUMBER}'
        )
    return told


def _ratio(hidden: int, width: int) -> float:
    """The smallest mlp_ratio of which int(mlp_ratio * width), as the references compute it, is `hidden`."""
    ratio = hidden / width
    return ratio if int(ratio * width) == hidden else math.nextafter(ratio, math.inf)


# ------------------------------------------------------------------------------ our configuration -> theirs


def reference_config(config: TransformerConfig, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The arguments of the reference's class for our model; InputError where it has no such model."""
    _check_expressible(config)
    common = {
        "patch_size": config.patch_size, "depth": config.num_layers, "num_heads": config.num_heads,
        "mlp_ratio": _ratio(config.mlp_hidden, config.width), "num_classes": config.num_classes,
    }  # fmt: skip
    if isinstance(config, VisionConfig):
        return dict(base or {}) | common | {
            "img_size": config.image_size, "in_chans": config.channels, "embed_dim": config.width,
            "qkv_bias": True, "distilled": config.distilled, "drop_path_rate": config.drop_path,
        }  # fmt: skip
    return dict(base or {}) | common | {
        "input_size": config.image_size, "in_channels": config.channels, "hidden_size": config.width,
        "class_dropout_prob": config.label_dropout, "learn_sigma": config.learn_sigma,
    }  # fmt: skip


def _check_expressible(config: TransformerConfig) -> None:
    name, usual = ("DeiT", VisionConfig()) if isinstance(config, VisionConfig) else ("DiT", DiffusionConfig())
    if config.residual not in ("siamese", "pre"):
        raise InputError(f"the PyTorch {name} has no {config.residual!r} model: it has siamese and pre")
    fixed = {"depth_scale": "layer2", "input_norm": True, "final_norm": True, "post_norm": "read"}
    options = dict(config.residual_options)
    odd = [
        f"residual_options.{key} {options[key]!r}" for key in fixed if options.get(key, fixed[key]) != fixed[key]
    ]
    if config.residual_overrides:
        odd.append("residual_overrides")
    for field in SAME:
        if getattr(config, field) != getattr(usual, field):
            odd.append(f"{field} {getattr(config, field)!r}")
    if config.kv_heads != config.num_heads or config.key_dim * config.num_heads != config.width:
        odd.append(f"{config.num_heads} heads of {config.key_dim} with {config.kv_heads} key heads")
    if odd:
        raise InputError(f"the PyTorch {name} has no such model: {', '.join(odd)}")


# ------------------------------------------------------------------------------ layouts


def vision_layout(config: VisionConfig) -> Layout:
    """The parameters of DeiT for our model; InputError where it has no such model."""
    _check_expressible(config)
    width, length = config.width, config.num_tokens
    whole = [
        _token("tokens/class", "cls_token", width),
        Rule("positions/table", {"pos_embed": (1, length, width)}, lambda t: t[0], lambda a: (a[None],)),
        *_patches("patch_embed.proj", config),
        *_linear("classifier", "head", width, config.num_classes),
    ]
    if config.distilled:
        whole.append(_token("tokens/distillation", "dist_token", width))
        whole += _linear("distillation_classifier", "head_dist", width, config.num_classes)
    last = DEIT_LAST if config.residual == "siamese" else {"final": "norm"}
    for ours, theirs in last.items():
        whole += norm(f"residual/{ours}", theirs, width, config.norm)
    layers = tuple(tuple(_layer(config, DEIT_NORMS, f"blocks.{i}.")) for i in range(config.num_layers))
    return Layout(tuple(whole), layers)


def diffusion_layout(config: DiffusionConfig) -> Layout:
    """The parameters of DiT for our model, and its frozen table of positions."""
    _check_expressible(config)
    width = config.width
    outputs = config.patch_size**2 * config.out_channels
    rows = config.num_classes + (config.label_dropout > 0)
    whole = [
        *_patches("x_embedder.proj", config),
        *_linear("time/up", "t_embedder.mlp.0", 256, width),
        *_linear("time/down", "t_embedder.mlp.2", width, width),
        Rule("labels/table", {"y_embedder.embedding_table.weight": (rows, width)}),
        *_linear("output", "final_layer.linear", width, outputs),
        *_modulation("output_modulation", "final_layer.adaLN_modulation.1", width, 2),
    ]
    for ours, theirs in DIT_LAST.items() if config.residual == "siamese" else ():
        whole += norm(f"residual/{ours}", theirs, width, config.norm)
    blocks = [f"blocks.{i}." for i in range(config.num_layers)]
    layers = tuple(
        (*_layer(config, DIT_NORMS, block), *_modulation("modulation", f"{block}adaLN_modulation.1", width, 6))
        for block in blocks
    )
    table = sine_cosine_table(config.image_size // config.patch_size, width)[None]
    return Layout(tuple(whole), layers, fixed={"pos_embed": table.astype(np.float32)})


def _layer(config: TransformerConfig, norms: Mapping[str, str], prefix: str) -> list[Rule]:
    width, hidden = config.width, config.mlp_hidden
    rules = [
        qkv("attention/qkv/kernel", (f"{prefix}attn.qkv.weight",), config),
        qkv("attention/qkv/bias", (f"{prefix}attn.qkv.bias",), config, bias=True),
        *_linear("attention/out", f"{prefix}attn.proj", width, width),
        *_linear("mlp/up", f"{prefix}mlp.fc1", width, hidden),
        *_linear("mlp/down", f"{prefix}mlp.fc2", hidden, width),
    ]
    for branch, number in SUB_BLOCKS.items():
        if config.residual == "siamese":
            for ours, theirs in norms.items():
                rules += norm(f"residual/{branch}_{ours}", f"{prefix}{theirs}{number}", width, config.norm)
        elif isinstance(config, VisionConfig):
            rules += norm(f"residual/{branch}_norm", f"{prefix}norm{number}", width, config.norm)
    return rules


def _linear(ours: str, name: str, inputs: int, outputs: int) -> list[Rule]:
    kernel = matrix(f"{ours}/kernel", f"{name}.weight", (outputs, inputs))
    return [kernel, Rule(f"{ours}/bias", {f"{name}.bias": (outputs,)})]


def _token(ours: str, name: str, width: int) -> Rule:
    return Rule(ours, {name: (1, 1, width)}, lambda t: t[0, 0], lambda a: (a[None, None],))


def _patches(name: str, config: TransformerConfig) -> list[Rule]:
    """A convolution (D, C, P, P) <-> [P * P * C, D], the order in which `to_patches` lays a patch out."""
    side, channels, width = config.patch_size, config.channels, config.width

    def split(kernel):
        return (np.moveaxis(kernel.reshape(side, side, channels, width), (2, 3), (1, 0)),)

    kernel = Rule(
        "patches/kernel", {f"{name}.weight": (width, channels, side, side)},
        lambda weight: np.transpose(weight, (2, 3, 1, 0)).reshape(-1, width), split,
    )  # fmt: skip
    return [kernel, Rule("patches/bias", {f"{name}.bias": (width,)})]


def _modulation(ours: str, name: str, width: int, parts: int) -> list[Rule]:
    """(parts * D, D) <-> [D, parts, D]; shift, scale, gate as they come."""
    kernel = Rule(
        f"{ours}/linear/kernel", {f"{name}.weight": (parts * width, width)},
        lambda weight: weight.T.reshape(width, parts, width), lambda array: (array.reshape(width, -1).T,),
    )  # fmt: skip
    bias = Rule(
        f"{ours}/linear/bias", {f"{name}.bias": (parts * width,)},
        lambda tensor: tensor.reshape(parts, width), lambda array: (array.reshape(-1),),
    )  # fmt: skip
    return [kernel, bias]
