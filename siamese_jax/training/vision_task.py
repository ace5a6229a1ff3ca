"""Training image classifiers: mixed images, soft labels, and their cross-entropy as in DeiT's recipe (timm).

Legend: B images, H height, W width, C channels, K classes.
"""

import jax
import jax.numpy as jnp
import numpy as np

from siamese_jax.data.image_loader import open_image_data
from siamese_jax.errors import InputError
from siamese_jax.models.families import parameter_shapes
from siamese_jax.training.metrics import flops_per_image, format_count
from siamese_jax.training.task import Data, Task, row_keys

Array = jax.Array


class VisionTask(Task):
    """The image classifier."""

    unit = "image"

    def positions(self, config, model):
        return model.num_tokens

    def batch_shapes(self, config, model):
        batch = config.training.batch_size
        shape = batch, model.image_size, model.image_size, model.channels
        return {"images": (shape, jnp.float32), "labels": ((batch,), jnp.int32)}

    def prepare(self, config, batch, key):
        training = config.training
        mix_key, rows_key = jax.random.split(key)
        smooth = smoothed(batch["labels"], config.model.num_classes, training.label_smoothing)
        images, targets = mixed(batch["images"], smooth, mix_key, training.mixup, training.cutmix)
        size = len(images)
        weights = jnp.ones(size, jnp.float32)
        return {"images": images, "targets": targets, "weights": weights, "keys": row_keys(rows_key, size)}

    def make_loss(self, model, config):
        def loss(params, batch, total_weight):
            keys = batch["keys"] if model.config.drop_path else None
            scores = model.apply({"params": params}, batch["images"], keys_B2=keys, method="scores")
            heads = [logits for logits in scores if logits is not None]
            losses_B = sum(soft_cross_entropy(logits, batch["targets"]) for logits in heads) / len(heads)
            mean = jnp.sum(losses_B * batch["weights"]) / total_weight
            return mean, mean

        return loss

    def watch(self, config, model, params, batch, look):
        return model.apply({"params": params}, batch["images"], watch=look, method="hidden")[1]

    def flops_per_unit(self, config, model):
        return flops_per_image(model, parameter_shapes(model), model.num_tokens)

    def open_data(self, config, model, rows):
        data = Data(*open_image_data(config, model, rows))
        if len(data.class_names) < 2:
            raise InputError(
                f"{data.train.name} has one class, {data.class_names[0]!r}, and nothing to tell it from: "
                "correct data.source"
            )
        return data

    def describe(self, config, data):
        return describe_images(config, data)

    def random_batch(self, config, model):
        return random_images(config, model)


def describe_images(config, data: Data) -> str:
    """A line about the images of a run."""
    total = config.training.steps * config.training.batch_size
    return (
        f"data: {data.train.name}, {len(data.train):,} training and {len(data.validation):,} validation images of "
        f"{data.train.num_classes} classes; the run sees {format_count(total)} "
        f"({total / len(data.train):.2f} epochs)"
    )


def random_images(config, model) -> dict[str, np.ndarray]:
    """Images of noise with labels."""
    random, batch = np.random.default_rng(config.seed), config.training.batch_size
    images = random.standard_normal((batch, model.image_size, model.image_size, model.channels), np.float32)
    return {"images": images, "labels": random.integers(model.num_classes, size=batch).astype(np.int32)}


def smoothed(labels_B: Array, num_classes: int, smoothing: float) -> Array:
    """Probabilities [B, K]: 1 - smoothing for the label, and smoothing spread over all classes."""
    return jax.nn.one_hot(labels_B, num_classes) * (1 - smoothing) + smoothing / num_classes


def soft_cross_entropy(logits_BK: Array, targets_BK: Array) -> Array:
    """Cross-entropy with probabilities, in nats, [B]."""
    return -jnp.sum(targets_BK * jax.nn.log_softmax(logits_BK), axis=-1)


def mixed(images_BHWC: Array, targets_BK: Array, key: Array, mixup: float, cutmix: float) -> tuple[Array, Array]:
    """A batch mixed with itself in reverse order: blended (mixup, arXiv 1710.09412), or with a rectangle from the
    other image (CutMix, arXiv 1905.04899). mixup, cutmix: alpha of the Beta distribution of the share, 0 = off.

    One share and one rectangle for the whole batch, and with both each batch takes either, as timm's Mixup does.
    """
    if not mixup and not cutmix:
        return images_BHWC, targets_BK
    choice, draw, place = jax.random.split(key, 3)
    kinds = []
    if mixup:
        share = jax.random.beta(draw, mixup, mixup)
        kinds.append((jnp.full(images_BHWC.shape[1:3], share), share))
    if cutmix:
        kinds.append(_rectangle(jax.random.beta(draw, cutmix, cutmix), place, images_BHWC.shape[1:3]))
    own_HW, share = kinds[-1]
    if len(kinds) == 2:
        first = jax.random.bernoulli(choice)
        own_HW, share = (jnp.where(first, one, two) for one, two in zip(*kinds, strict=True))
    own_HW1 = own_HW[..., None].astype(images_BHWC.dtype)
    images = images_BHWC * own_HW1 + images_BHWC[::-1] * (1 - own_HW1)
    return images, targets_BK * share + targets_BK[::-1] * (1 - share)


def _rectangle(share: Array, key: Array, size: tuple[int, int]) -> tuple[Array, Array]:
    """(1 where the own image stays [H, W], the share of it): a rectangle of 1 - share, cut off at the edges."""
    inside = jnp.ones(size, bool)
    for axis, (length, one) in enumerate(zip(size, jax.random.split(key), strict=True)):
        side = jnp.floor(length * jnp.sqrt(1 - share)).astype(jnp.int32)
        centre = jax.random.randint(one, (), 0, length)
        place = jnp.arange(length)
        within = (place >= centre - side // 2) & (place < centre + side // 2)
        inside = inside & jnp.expand_dims(within, 1 - axis)
    own = 1.0 - inside
    return own, jnp.mean(own)
