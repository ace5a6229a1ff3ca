"""What every model here is made of: the options of its Transformer, their checks, and the stack they describe.

A model adds what comes before and after the stack.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn

from siamese_jax.errors import InputError
from siamese_jax.layers.attention import IMPLEMENTATIONS, NORM_PLACES, Attention
from siamese_jax.layers.drop_path import DropPath
from siamese_jax.layers.mlp import ACTIVATIONS, MLP
from siamese_jax.layers.norms import norm_factory
from siamese_jax.models.stack import Branches, Stack, check_remat
from siamese_jax.residual.scheme import Segments, make_segments

DTYPES = ("float32", "bfloat16", "float64")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The options that all models have, with their defaults; `model.*` of a configuration file."""

    residual: str = "siamese_hybrid"
    residual_options: tuple[tuple[str, Any], ...] = ()
    residual_overrides: str = ""  # of single layers: "{0: {'attn_norm': True}, (2, 3): {...}}"
    num_layers: int = 4
    width: int = 256
    num_heads: int = 4
    num_kv_heads: int = 0  # 0 = num_heads
    head_dim: int = 0  # 0 = width / num_heads
    mlp_hidden: int = 1024
    activation: str = "swiglu"
    norm: str = "rms"
    norm_epsilon: float = 1e-5
    query_norm: str = "head"
    key_norm: str = "head"
    value_norm: str = "none"
    context_norm: str = "none"
    use_bias: bool = False
    scan: bool = True
    remat: str = "none"
    offload_streams: bool = False  # to the host, until the backward pass computes their layer again
    attention: str = "auto"  # plain, cudnn (GPU), splash (TPU), or auto: the best that fits
    dtype: str = "float32"
    stream_dtype: str = "compute"  # 'compute' or a type: the type of the residual streams

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def key_dim(self) -> int:
        """Width of one head."""
        return self.head_dim or self.width // self.num_heads

    @property
    def stream_type(self) -> str:
        """The type of the residual streams."""
        return self.dtype if self.stream_dtype == "compute" else self.stream_dtype

    def segments(self, norms_in_branches: bool = False) -> Segments:
        """The stack's residual schemes with their numbers of layers."""
        norm = norm_factory(self.norm, self.norm_epsilon)
        return make_segments(
            self.residual, self.num_layers, norm, dict(self.residual_options), self.residual_overrides,
            norms_in_branches,
        )  # fmt: skip

    def stack(self, *, causal: bool, modulation=None, drop_path: float = 0.0) -> Stack:
        """The stack of these options; modulation: makes that of a layer, whose branches then have own norms."""
        attention = functools.partial(
            Attention,
            self.num_heads, self.kv_heads, self.key_dim, causal=causal,
            query_norm=self.query_norm, key_norm=self.key_norm,
            value_norm=self.value_norm, context_norm=self.context_norm,
            norm=norm_factory(self.norm, self.norm_epsilon),
            use_bias=self.use_bias, dtype=self.dtype, implementation=self.attention,
        )  # fmt: skip
        mlp = functools.partial(MLP, self.mlp_hidden, self.activation, self.use_bias, self.dtype)
        drop = DropPath(drop_path, self.num_layers) if drop_path else None
        return Stack(
            self.segments(modulation is not None), Branches(attention, mlp, modulation, drop),
            scan=self.scan, remat=self.remat, offload_streams=self.offload_streams,
        )  # fmt: skip


class TransformerModel(nn.Module):
    """What all models share: streams are opened, led through the stack and closed."""

    config: TransformerConfig

    def make_stack(self, stack: Stack) -> None:
        """To be called in `setup`."""
        segments = stack.segments
        self.residual = segments[-1][0]()
        self.residual_open = self.residual if len(segments) == 1 else segments[0][0]()
        self.stack = stack
        nn.share_scope(self, self.stack)  # parameters stand under `layers`, not `stack/layers`

    def through_layers(self, embedded_BLD, context, watch=None):
        """(what the streams close to, in the compute type, what `watch` saw of those leaving each layer)."""
        streams = self.residual_open.open(embedded_BLD)
        streams, watched = self.stack(streams, context, watch=watch)
        return self.residual.close(streams).astype(self.config.dtype), watched


def check_one_of(config: TransformerConfig, field: str, choices) -> None:
    """InputError unless the field is one of the choices."""
    value = getattr(config, field)
    if value not in choices:
        raise InputError(f"model.{field} is {value!r}: it must be one of {', '.join(choices)}")


def check_positive(config: TransformerConfig, *fields: str) -> None:
    """InputError unless the fields are 1 or more."""
    for field in fields:
        if getattr(config, field) < 1:
            raise InputError(f"model.{field} is {getattr(config, field)}: it must be at least 1")


def check_transformer(config: TransformerConfig) -> None:
    """InputError with one line for the first of the common options that cannot work."""
    check_positive(config, "num_layers", "width", "num_heads", "mlp_hidden")
    for field in ("num_kv_heads", "head_dim"):
        if getattr(config, field) < 0:
            raise InputError(f"model.{field} is {getattr(config, field)}: it must not be negative")
    if not config.norm_epsilon > 0:
        raise InputError(f"model.norm_epsilon is {config.norm_epsilon}: it must be above 0")
    if not config.head_dim and config.width % config.num_heads:
        raise InputError(
            f"model.num_heads {config.num_heads} does not divide model.width {config.width}: "
            "change one of them or set model.head_dim"
        )
    if config.num_heads % config.kv_heads:
        raise InputError(f"model.num_kv_heads {config.kv_heads} does not divide model.num_heads {config.num_heads}")
    for field in ("query_norm", "key_norm", "value_norm", "context_norm"):
        check_one_of(config, field, NORM_PLACES)
    check_one_of(config, "activation", ACTIVATIONS)
    check_one_of(config, "attention", IMPLEMENTATIONS)
    check_one_of(config, "dtype", DTYPES)
    check_one_of(config, "stream_dtype", ("compute", *DTYPES))
    check_remat(config.remat, config.offload_streams)
    config.segments()
