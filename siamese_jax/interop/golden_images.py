"""Golden files of image classifiers (DeiT) and diffusion models (DiT) against ours.

Theirs are images [B, C, H, W], ours [B, H, W, C]. Legend: B batch, K classes, F features of a time step.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from siamese_jax.errors import InputError
from siamese_jax.interop import images
from siamese_jax.interop.layout import Layout, join_all, split_all
from siamese_jax.interop.recorded import (
    Golden,
    Row,
    Settings,
    check_numbers,
    check_whole,
    difference,
    gradient_rows,
    inputs_of,
    opened_by,
    output_rows,
    stream_states,
)
from siamese_jax.interop.reference import shapes_of
from siamese_jax.layers.condition import FREQUENCIES, LONGEST, time_features, time_frequencies
from siamese_jax.models.diffusion import DiffusionConfig, DiffusionModel, guide
from siamese_jax.models.families import check_model
from siamese_jax.models.transformer import TransformerConfig
from siamese_jax.models.vision import VisionConfig, VisionModel

# Two of the 128 frequencies: PyTorch's float32 exp is one unit in the last place above the nearest number.
ROUNDED_UP = (12, 106)
LAST_STEP = 999
# How the losses of the two heads of a distilled model are added up.
HEAD_WEIGHTS = {"mean of the heads": (0.5, 0.5), "sum of the heads": (1.0, 1.0), "class head alone": (1.0, 0.0)}


def channels_last(images_BCHW) -> jax.Array:
    """[B, C, H, W] -> [B, H, W, C]."""
    return jnp.moveaxis(jnp.asarray(images_BCHW), 1, -1)


def channels_first(images_BHWC) -> jax.Array:
    """[B, H, W, C] -> [B, C, H, W]."""
    return jnp.moveaxis(images_BHWC, -1, 1)


def _model_of(config: TransformerConfig, layout_of, settings: Settings, golden: Golden):
    """(configuration, layout, parameters) as the settings want them."""
    config = dataclasses.replace(config, dtype=settings.dtype, scan=settings.scan)
    check_model(config)
    layout: Layout = layout_of(config)
    weights = golden.group("param")
    params = join_all(layout, config, weights)
    return config, layout, jax.tree.map(lambda leaf: jnp.asarray(leaf, settings.dtype), params)


def _gradient_rows(golden: Golden, layout: Layout, config, gradients, rtol: float) -> list[Row]:
    return gradient_rows(golden, split_all(layout, config, gradients), rtol) if golden.group("grad") else []


# ------------------------------------------------------------------------------ DeiT


def compare_vision(golden: Golden, settings: Settings) -> tuple[str, list[Row]]:
    """(what the model is, rows) of an image classifier's file."""
    found = images.vision_config(golden.config, shapes_of(golden.group("param")))
    config, layout, params = _model_of(found, images.vision_layout, settings, golden)
    inputs = inputs_of(golden, {"image", "labels"}, {"image", "labels", "labels_dist"})
    check_numbers(golden, "image", inputs["image"], (None, config.channels, config.image_size, config.image_size))
    batch = len(inputs["image"])
    labels = [inputs["labels"], inputs.get("labels_dist", inputs["labels"])]
    for name, numbers in zip(("labels", "labels_dist"), labels, strict=True):
        check_whole(golden, name, numbers, batch, config.num_classes - 1)
    heads, note = _head_weights(golden, config)
    pixels = channels_last(inputs["image"]).astype(settings.dtype)
    labels = jnp.asarray(np.stack(labels), jnp.int32)
    outputs, first, rest, gradients = _compute_vision(config, heads, params, pixels, labels)
    rows = output_rows(golden, outputs, stream_states(first, rest), settings.atol)
    rows = [dataclasses.replace(row, note=note) if row.name == "loss" else row for row in rows]
    rows += _gradient_rows(golden, layout, config, gradients, settings.rtol)
    return f"image classifier, {config.residual}{', distilled' if config.distilled else ''}", rows


def _head_weights(golden: Golden, config: VisionConfig) -> tuple[tuple[float, float], str]:
    """How a file of a distilled model weighs the losses of its heads: the usual way that fits its logits best.

    The loss itself is compared all the same.
    """
    recorded = golden.group("out")
    names = {"logits", "logits_dist", "loss"}
    if not config.distilled or not names <= set(recorded) or "labels_dist" not in golden.group("in"):
        return HEAD_WEIGHTS["mean of the heads" if config.distilled else "class head alone"], ""
    batch = len(golden.group("in")["labels"])
    for name in ("logits", "logits_dist"):
        check_numbers(golden, name, recorded[name], (batch, config.num_classes))
    rows = np.arange(batch)

    def loss(head: str, labels: str) -> float:
        logits = recorded[head].astype(np.float64)
        highest = logits.max(-1)
        partition = highest + np.log(np.exp(logits - highest[:, None]).sum(-1))
        return float(np.mean(partition - logits[rows, golden.group("in")[labels]]))

    losses = loss("logits", "labels"), loss("logits_dist", "labels_dist")
    off = {name: abs(np.dot(weights, losses) - recorded["loss"]) for name, weights in HEAD_WEIGHTS.items()}
    name = min(off, key=off.get)
    return HEAD_WEIGHTS[name], name


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compute_vision(config: VisionConfig, heads, params, images_BHWC, labels_2B):
    """({output: array}, streams entering layer 0, streams leaving the layers, gradients)."""
    model, variables = VisionModel(config), {"params": params}

    def mean_loss(params):
        scores = model.apply({"params": params}, images_BHWC, method="scores")
        loss = 0.0
        for weight, logits, labels in zip(heads, scores, labels_2B, strict=True):
            if logits is not None and weight:
                log_p = jax.nn.log_softmax(logits)
                loss += weight * -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], axis=-1))
        return loss, scores

    (loss, scores), gradients = jax.value_and_grad(mean_loss, has_aux=True)(params)
    outputs = {"logits": scores.by_class, "logits_eval": scores.answer, "loss": loss}
    if scores.by_distillation is not None:
        outputs["logits_dist"] = scores.by_distillation
    first = model.apply(variables, images_BHWC, method=opened_by(VisionModel.embed))
    _, rest = model.apply(variables, images_BHWC, watch=lambda streams: streams, method="hidden")
    return outputs, first, rest, gradients


# ------------------------------------------------------------------------------ DiT


def reference_features(t_B: np.ndarray) -> tuple[np.ndarray, bool]:
    """(features of time steps as the reference has them, float32 [B, F], whether to the last bit).

    PyTorch computes them where it is installed: its float32 cosines are not the nearest numbers, nor ours.
    """
    try:
        import torch
    except ImportError:
        frequencies = time_frequencies(FREQUENCIES)
        frequencies[list(ROUNDED_UP)] = np.nextafter(frequencies[list(ROUNDED_UP)], np.float32(1))
        return np.asarray(time_features(jnp.asarray(t_B), frequencies)), False
    half = FREQUENCIES // 2
    frequencies = torch.exp(-math.log(LONGEST) * torch.arange(half, dtype=torch.float32) / half)
    angles = torch.from_numpy(t_B)[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).numpy(), True


def compare_diffusion(golden: Golden, settings: Settings) -> tuple[str, list[Row]]:
    """(what the model is, rows) of a diffusion model's file."""
    found = images.diffusion_config(golden.config, shapes_of(golden.group("param")))
    config, layout, params = _model_of(found, images.diffusion_layout, settings, golden)
    inputs = _diffusion_inputs(golden, config)
    features, to_the_bit = reference_features(inputs["t"])
    rows, recorded = [], golden.group("out").get("t_freq")
    if recorded is not None:
        limit = float(np.max(inputs["t"]) + 2) * 2.0**-23  # of the largest angle and its frequency, in float32
        rows.append(difference("t_freq", time_features(jnp.asarray(inputs["t"])), recorded, "abs", limit))
        features, to_the_bit = recorded, True
    x, target = (channels_last(inputs[name]).astype(settings.dtype) for name in ("x", "target"))
    labels = jnp.asarray(inputs["y"], jnp.int32)
    outputs, first, rest, gradients = _compute_diffusion(
        config, params, x, jnp.asarray(features, settings.dtype), labels, target
    )
    outputs["t_freq"] = features
    states = stream_states(first, rest)
    if "cfg_x" in inputs:
        outputs["cfg_output"], led_to_the_bit = _guided_output(config, params, inputs, settings.dtype)
    found_rows = output_rows(golden, outputs, states, settings.atol)
    found_rows += _gradient_rows(golden, layout, config, gradients, settings.rtol)
    for row in found_rows:
        exact = led_to_the_bit if row.name == "cfg_output" else to_the_bit
        if row.name != "t_freq":
            rows.append(row if exact else _loosened(row))
    return f"diffusion model, {config.residual}", rows


def _diffusion_inputs(golden: Golden, config: DiffusionConfig) -> dict[str, np.ndarray]:
    """The recorded inputs, checked; a target of zeros where nothing is measured by it."""
    led = {"cfg_x", "cfg_t", "cfg_y", "cfg_scale"}
    has_led = "cfg_output" in golden.group("out")
    needed = {"x", "t", "y"} | ({"target"} if "loss" in golden.group("out") or golden.group("grad") else set())
    inputs = inputs_of(golden, needed | (led if has_led else set()), {"x", "t", "y", "target"} | led)
    size, labels = config.image_size, config.num_classes - (config.null_label is None)
    for x, t, y in (("x", "t", "y"), ("cfg_x", "cfg_t", "cfg_y"))[: 1 + has_led]:
        check_numbers(golden, x, inputs[x], (None, config.channels, size, size))
        check_whole(golden, t, inputs[t], len(inputs[x]), LAST_STEP)
        check_whole(golden, y, inputs[y], len(inputs[x]), labels)
    if has_led:
        if inputs["cfg_scale"].shape or len(inputs["cfg_x"]) % 2:
            shapes = f"cfg_scale has the shape {inputs['cfg_scale'].shape} and cfg_x {len(inputs['cfg_x'])} rows"
            raise InputError(f"{golden.path}: {shapes}: guidance has one scale and two equal halves")
    shape = len(inputs["x"]), config.out_channels, size, size
    inputs.setdefault("target", np.zeros(shape, np.float32))
    check_numbers(golden, "target", inputs["target"], shape)
    return {name: array for name, array in inputs.items() if has_led or name not in led}


def _guided_output(config: DiffusionConfig, params, inputs, dtype: str) -> tuple[jax.Array, bool]:
    """(guided output of both halves of a batch, whether its time features are the reference's to the last bit)."""
    features, to_the_bit = reference_features(inputs["cfg_t"])
    half = channels_last(inputs["cfg_x"]).astype(dtype)[: len(inputs["cfg_x"]) // 2]
    x = jnp.concatenate([half, half])  # the reference does not read the second half
    labels = jnp.asarray(inputs["cfg_y"], jnp.int32)
    both = _predict(config, params, x, jnp.asarray(features, dtype), labels)
    return channels_first(guide(both, float(inputs["cfg_scale"]), config.channels)), to_the_bit


def _loosened(row: Row) -> Row:
    """A row that rests on cosines which differ from PyTorch's in their last bit."""
    return dataclasses.replace(row, limit=max(row.limit, 1e-6), note="without PyTorch's own cosines")


@functools.partial(jax.jit, static_argnums=0)
def _predict(config: DiffusionConfig, params, x_BHWC, features_BF, labels_B):
    return DiffusionModel(config).apply({"params": params}, x_BHWC, None, labels_B, features_BF=features_BF)


@functools.partial(jax.jit, static_argnums=0)
def _compute_diffusion(config: DiffusionConfig, params, x_BHWC, features_BF, labels_B, target_BHWX):
    """({output: array}, streams entering layer 0, streams leaving the layers, gradients)."""
    model = DiffusionModel(config)

    def mean_loss(params):
        output = _predict(config, params, x_BHWC, features_BF, labels_B)
        return jnp.mean(jnp.square(output - target_BHWX)), output

    (loss, output), gradients = jax.value_and_grad(mean_loss, has_aux=True)(params)
    first = model.apply({"params": params}, x_BHWC, method=opened_by(DiffusionModel.embed))
    _, _, rest = model.apply(
        {"params": params}, x_BHWC, None, labels_B, features_BF=features_BF,
        watch=lambda streams: streams, method="hidden",
    )  # fmt: skip
    return {"output": channels_first(output), "loss": loss}, first, rest, gradients
