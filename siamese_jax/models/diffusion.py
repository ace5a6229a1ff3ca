"""The diffusion model: a DiT (arXiv 2212.09748) under any residual scheme that lets branches have their own norms.

Legend: B batch, H height, W width, C channels, P side of a patch, L patches, D width.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from siamese_jax.errors import InputError
from siamese_jax.layers.activations import constrain
from siamese_jax.layers.condition import LabelEmbedding, TimeEmbedding, time_features
from siamese_jax.layers.dense import Dense
from siamese_jax.layers.modulation import Modulation
from siamese_jax.layers.patches import from_patches, sine_cosine_table, to_patches
from siamese_jax.models.image import ImageConfig, check_image
from siamese_jax.models.stack import Context
from siamese_jax.models.transformer import TransformerModel

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class DiffusionConfig(ImageConfig):
    """Every option of the diffusion model, with its default (DiT-S/2); `model.*` of a configuration file.

    `norm` is that of the residual scheme: the modulated norms that branches and head read through are LayerNorm.
    """

    width: int = 384
    num_heads: int = 6
    mlp_hidden: int = 1536
    activation: str = "gelu_tanh"
    image_size: int = 32  # of the latents, or the pixels, of a side
    patch_size: int = 2
    channels: int = 4
    label_dropout: float = 0.1  # share of examples whose label is hidden in training; guidance needs some
    learn_sigma: bool = True

    depth_scaled = ()
    per_patch = ("patches", "output")  # matrices that multiply every patch

    @property
    def out_channels(self) -> int:
        """Channels of the output: the noise and, by option, its variance."""
        return self.channels * (2 if self.learn_sigma else 1)

    @property
    def null_label(self) -> int | None:
        """The label that stands for none; None where labels are never hidden."""
        return self.num_classes if self.label_dropout > 0 else None

    def segments(self, norms_in_branches: bool = True):
        """The stack's residual schemes; the norms in front of branches are the modulated ones, always."""
        return super().segments(norms_in_branches)

    def initial_stds(self) -> dict[str, float]:
        """Path ending -> standard deviation of the initial parameters: Xavier's, or 0.02, or 0, as DiT's code.

        They are of normal draws, cut at three deviations; DiT's Xavier draws are uniform. Biases start at 0.
        """

        def xavier(fan_in: int, fan_out: int) -> float:
            return math.sqrt(2 / (fan_in + fan_out))

        width, hidden, heads = self.width, self.mlp_hidden, self.num_heads * self.key_dim
        return {
            "patches/kernel": xavier(self.patch_features, width), "time/up/kernel": 0.02, "time/down/kernel": 0.02,
            "labels/table": 0.02, "attention/qkv/kernel": xavier(width, heads + 2 * self.kv_heads * self.key_dim),
            "attention/out/kernel": xavier(heads, width), "mlp/up/kernel": xavier(width, hidden),
            "mlp/down/kernel": xavier(hidden, width), "modulation/linear/kernel": 0.0,
            "output_modulation/linear/kernel": 0.0, "output/kernel": 0.0,
        }  # fmt: skip


def check_diffusion(config: DiffusionConfig) -> None:
    """InputError with one line for the first thing that cannot work."""
    check_image(config)
    if config.width % 4:
        raise InputError(f"model.width is {config.width}: two-dimensional sine positions need a multiple of 4")
    if not 0 <= config.label_dropout < 1:
        raise InputError(f"model.label_dropout is {config.label_dropout}: a share, set it from 0 to below 1")


class DiffusionModel(TransformerModel):
    """(x_t [B, H, W, C], time steps [B], labels [B]) -> noise and, by option, variance [B, H, W, C or 2 C]."""

    config: DiffusionConfig

    def setup(self):
        config = self.config
        self.patches = Dense(config.width, True, config.dtype)
        self.time = TimeEmbedding(config.width, config.dtype)
        # The row of no label exists only where labels are hidden, as in the reference.
        self.labels = LabelEmbedding(config.num_classes + (config.label_dropout > 0), config.width, config.dtype)
        modulation = self._modulation
        self.make_stack(config.stack(causal=False, modulation=modulation))
        self.output_modulation = modulation(for_head=True)
        wide = jnp.promote_types(jnp.float32, config.dtype).name
        self.output = Dense(config.patch_size**2 * config.out_channels, True, wide)

    @property
    def _modulation(self) -> Callable[..., Modulation]:
        return _ModulationOf(self.config.norm_epsilon, self.config.dtype)

    def embed(self, x_BHWC) -> Array:
        """Patches with their positions, [B, L, D] in the type of the streams."""
        config = self.config
        h_BLD = self.patches(to_patches(x_BHWC, config.patch_size)).astype(config.stream_type)
        rows = config.image_size // config.patch_size
        # Through float32 whatever the type: the reference keeps its table so.
        table = sine_cosine_table(rows, config.width).astype("float32")
        return constrain(h_BLD + table.astype(h_BLD.dtype), "batch")

    def hidden(self, x_BHWC, t_B, labels_B, *, features_BF=None, watch=None):
        """(what the streams close to [B, L, D], condition [B, D], what `watch` saw of the streams).

        features: of the time steps, to use in place of computed ones.
        """
        features_BF = time_features(t_B) if features_BF is None else features_BF
        condition_BD = self.time(features_BF) + self.labels(labels_B)
        closed, watched = self.through_layers(self.embed(x_BHWC), Context(condition_BD=condition_BD), watch)
        return closed, condition_BD, watched

    def __call__(self, x_BHWC, t_B, labels_B, *, features_BF=None):
        closed_BLD, condition_BD, _ = self.hidden(x_BHWC, t_B, labels_B, features_BF=features_BF)
        read = self.output_modulation(condition_BD).read(closed_BLD, self.config.norm_epsilon)
        return from_patches(self.output(read), self.config.patch_size)


@dataclasses.dataclass(frozen=True)
class _ModulationOf:
    """Makes modulations; hashable, so that modules holding it can be compared and cached."""

    epsilon: float
    dtype: str

    def __call__(self, for_head: bool = False) -> Modulation:
        return Modulation(for_head, self.epsilon, self.dtype)


GUIDED_CHANNELS = 3


def guide(output_BHWX: Array, scale: float, channels: int) -> Array:
    """The output for a batch whose second half repeats the first with no label, led away from that.

    The first three channels of the noise become none + scale (asked - none), in both halves; the others, and the
    variance, stay what each half has: as in DiT's code, so that its published samples come out.
    """
    led_channels = min(GUIDED_CHANNELS, channels)
    asked, none = jnp.split(output_BHWX[..., :led_channels], 2)
    led = none + scale * (asked - none)
    return jnp.concatenate([jnp.concatenate([led, led]), output_BHWX[..., led_channels:]], axis=-1)


def guided(predict: Callable, labels_B: Array, null_label: int, scale: float, channels: int) -> Callable:
    """predict(x, t, labels) -> the function (x [B, H, W, C], t [B]) -> output with classifier-free guidance."""

    def with_guidance(x_BHWC, t_B):
        labels = jnp.concatenate([labels_B, jnp.full_like(labels_B, null_label)])
        output = predict(jnp.concatenate([x_BHWC, x_BHWC]), jnp.concatenate([t_B, t_B]), labels)
        return guide(output, scale, channels)[: len(x_BHWC)]

    return with_guidance
