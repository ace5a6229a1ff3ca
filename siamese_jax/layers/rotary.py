"""Rotary position embedding, rotate-half over the full head. Angles and rotation in float32 or wider.

Legend: B batch, L length, K head dim, ... any axes.
"""

import jax
import jax.numpy as jnp

from siamese_jax.layers.norms import statistics_type

Array = jax.Array


def rotary_tables(positions: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """(sin, cos), each [..., L, K], for integer positions [..., L]; the table is cat(freqs, freqs)."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = 1.0 / (theta**exponents)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.sin(angles), jnp.cos(angles)


def rotate(x: Array, sin: Array, cos: Array) -> Array:
    """x [B, L, ..., K] rotated by tables [L, K] or [B, L, K]; the output has x's type."""
    wide = statistics_type(x.dtype)
    length, head_dim = sin.shape[-2:]
    shape = (sin.shape[0] if sin.ndim == 3 else 1, length, *(1,) * (x.ndim - 3), head_dim)
    sin, cos = sin.reshape(shape).astype(wide), cos.reshape(shape).astype(wide)
    x_wide = x.astype(wide)
    first, second = jnp.split(x_wide, 2, axis=-1)
    half_turn = jnp.concatenate([-second, first], axis=-1)
    return (x_wide * cos + half_turn * sin).astype(x.dtype)
