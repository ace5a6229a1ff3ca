"""RMSNorm and LayerNorm, as functions and as Linen modules.

Statistics are taken in float32 or wider whatever the input type, the output has the input's type.
Legend: ... any leading axes, D the normalised axis.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from siamese_jax.errors import InputError

Array = jax.Array


def statistics_type(dtype) -> jnp.dtype:
    """The type in which statistics are taken: float32, or float64 for float64 input."""
    return jnp.promote_types(jnp.float32, dtype)


def rms_norm(x: Array, scale: Array | None = None, epsilon: float = 1e-5) -> Array:
    """scale * x * rsqrt(mean(x^2) + epsilon) over the last axis.

    The normalised value is cast back before the gain, as the reference code does.
    """
    wide = x.astype(statistics_type(x.dtype))
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    normalised = (wide * inverse).astype(x.dtype)
    return normalised if scale is None else normalised * scale.astype(x.dtype)


def layer_norm(x: Array, scale: Array | None = None, bias: Array | None = None, epsilon: float = 1e-6) -> Array:
    """scale * (x - mean(x)) * rsqrt(var(x) + epsilon) + bias over the last axis."""
    wide = x.astype(statistics_type(x.dtype))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + epsilon)
    normalised = (centred * inverse).astype(x.dtype)
    if scale is not None:
        normalised = normalised * scale.astype(x.dtype)
    return normalised if bias is None else normalised + bias.astype(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm with a learned gain `scale` [D], initialised at 1."""

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], jnp.float32)
        return rms_norm(x, scale, self.epsilon)


class LayerNorm(nn.Module):
    """LayerNorm, by option with a learned gain `scale` [D] and a learned `bias` [D]."""

    epsilon: float = 1e-6
    use_scale: bool = True
    use_bias: bool = True

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], jnp.float32) if self.use_scale else None
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32) if self.use_bias else None
        return layer_norm(x, scale, bias, self.epsilon)


NORMS = {
    "rms": RMSNorm,
    "layer": LayerNorm,
    "layer_no_bias": functools.partial(LayerNorm, use_bias=False),
    "layer_plain": functools.partial(LayerNorm, use_scale=False, use_bias=False),
}


def norm_factory(kind: str, epsilon: float) -> Callable[..., nn.Module]:
    """A callable that makes one norm module of the kind; InputError lists the known kinds."""
    if kind not in NORMS:
        raise InputError(f"unknown norm {kind!r}: model.norm must be one of {', '.join(NORMS)}")
    return functools.partial(NORMS[kind], epsilon=epsilon)
