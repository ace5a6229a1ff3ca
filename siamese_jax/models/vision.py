"""The image classifier: a ViT in DeiT's form under any residual scheme (arXiv 2010.11929, 2012.12877).

Legend: B batch, H height, W width, C channels, P side of a patch, L patches and extra tokens, D width, K classes.
"""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from siamese_jax.errors import InputError
from siamese_jax.layers.activations import constrain
from siamese_jax.layers.dense import Dense
from siamese_jax.layers.patches import to_patches
from siamese_jax.models.image import ImageConfig, check_image
from siamese_jax.models.stack import Context
from siamese_jax.models.transformer import TransformerModel

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class VisionConfig(ImageConfig):
    """Every option of the image classifier, with its default (DeiT-T); `model.*` of a configuration file."""

    width: int = 192
    num_heads: int = 3
    mlp_hidden: int = 768
    distilled: bool = False  # a second token with a head of its own; the answer is the mean of both
    drop_path: float = 0.0  # probability that the last layer's updates are left out; linear in depth
    init_std: float = 0.02

    depth_scaled = ()
    per_patch = ("patches",)  # matrices that multiply every patch

    @property
    def num_tokens(self) -> int:
        """Positions: the class token, by option the distillation token, and the patches."""
        return 1 + self.distilled + self.num_patches

    def initial_stds(self) -> dict[str, float]:
        """Path ending -> standard deviation of the initial parameters, those of timm's DeiT.

        They are of normal draws, cut at three deviations; biases start at 0. A patch kernel starts as wide as
        PyTorch's convolutions, whose draw, and that of their bias, is uniform with a variance of 1 / (3 fan_in).
        """
        names = (
            "tokens/class", "tokens/distillation", "positions/table", "attention/qkv/kernel",
            "attention/out/kernel", "mlp/up/kernel", "mlp/down/kernel", "classifier/kernel",
            "distillation_classifier/kernel",
        )  # fmt: skip
        return {"patches/kernel": (3 * self.patch_features) ** -0.5} | dict.fromkeys(names, self.init_std)


def check_vision(config: VisionConfig) -> None:
    """InputError with one line for the first thing that cannot work."""
    check_image(config)
    if not 0 <= config.drop_path < 1:
        raise InputError(f"model.drop_path is {config.drop_path}: a probability, set it from 0 to below 1")
    if not config.init_std > 0:
        raise InputError(f"model.init_std is {config.init_std}: it must be above 0")


class ExtraTokens(nn.Module):
    """Learned vectors in front of the patches: of the class and, by option, of the distillation."""

    width: int
    distilled: bool

    @nn.compact
    def __call__(self) -> Array:
        names = ("class", "distillation") if self.distilled else ("class",)
        draw = nn.initializers.normal(0.02)
        return jnp.stack([self.param(name, draw, (self.width,), jnp.float32) for name in names])


class Positions(nn.Module):
    """A learned vector for every position, [L, D]."""

    length: int
    width: int

    @nn.compact
    def __call__(self) -> Array:
        return self.param("table", nn.initializers.normal(0.02), (self.length, self.width), jnp.float32)


class Scores(NamedTuple):
    """Logits [B, K] in float32 or wider, of the class token and, where there is one, of the distillation token."""

    by_class: Array
    by_distillation: Array | None = None

    @property
    def answer(self) -> Array:
        """What the model says: the mean of the heads."""
        return self.by_class if self.by_distillation is None else (self.by_class + self.by_distillation) / 2


class VisionModel(TransformerModel):
    """Normalised images [B, H, W, C] -> logits [B, K]."""

    config: VisionConfig

    def setup(self):
        config = self.config
        self.patches = Dense(config.width, True, config.dtype)
        self.tokens = ExtraTokens(config.width, config.distilled)
        self.positions = Positions(config.num_tokens, config.width)
        # The logits are not rounded to bfloat16.
        wide = jnp.promote_types(jnp.float32, config.dtype).name
        self.classifier = Dense(config.num_classes, True, wide)
        if config.distilled:
            self.distillation_classifier = Dense(config.num_classes, True, wide)
        self.make_stack(config.stack(causal=False, drop_path=config.drop_path))

    def embed(self, images_BHWC) -> Array:
        """Extra tokens and patches with their positions, [B, L, D] in the type of the streams."""
        config = self.config
        patches_BLD = self.patches(to_patches(images_BHWC, config.patch_size)).astype(config.stream_type)
        extra = self.tokens().astype(config.stream_type)
        extra = jnp.broadcast_to(extra, (len(images_BHWC), *extra.shape))
        h_BLD = jnp.concatenate([extra, patches_BLD], axis=1)
        return constrain(h_BLD + self.positions().astype(h_BLD.dtype), "batch")

    def hidden(self, images_BHWC, *, keys_B2=None, watch=None):
        """(normed output [B, L, D] in the compute type, what `watch` saw of the streams leaving each layer).

        keys: a raw random key for every image, uint32 [B, 2], for drop path; None = nothing is dropped.
        """
        if keys_B2 is not None and keys_B2.shape != (len(images_BHWC), 2):
            raise InputError(f"keys of shape {keys_B2.shape} for {len(images_BHWC)} images: give one for each")
        return self.through_layers(self.embed(images_BHWC), Context(keys_B2=keys_B2), watch)

    def scores(self, images_BHWC, *, keys_B2=None) -> Scores:
        """The logits of every head."""
        hidden_BLD, _ = self.hidden(images_BHWC, keys_B2=keys_B2)
        by_class = self.classifier(hidden_BLD[:, 0])
        return Scores(by_class, self.distillation_classifier(hidden_BLD[:, 1]) if self.config.distilled else None)

    def features(self, images_BHWC) -> Array:
        """What the head reads of the class token, float32 [B, D]."""
        return self.hidden(images_BHWC)[0][:, 0].astype(jnp.float32)

    def __call__(self, images_BHWC, *, keys_B2=None):
        return self.scores(images_BHWC, keys_B2=keys_B2).answer
