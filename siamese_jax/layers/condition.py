"""What a diffusion model is told beside the image: the time step and the class, as vectors.

Legend: B batch, D width, F frequencies.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from siamese_jax.layers.dense import Dense

FREQUENCIES = 256
LONGEST = 10_000.0


def time_frequencies(num_features: int = FREQUENCIES) -> np.ndarray:
    """10000^(-i / (F / 2)) for i = 0 .. F / 2 - 1, float32 [F / 2].

    The exponents are rounded to float32 as the reference's are: a last bit is 1e-4 of an angle at t = 1000.
    """
    half = num_features // 2
    exponents = np.float32(-np.log(LONGEST)) * np.arange(half, dtype=np.float32) / np.float32(half)
    return np.exp(exponents.astype(np.float64)).astype(np.float32)


def time_features(t_B, frequencies: np.ndarray | None = None):
    """[B, F]: cosines, then sines, of step times frequency; float32 whatever the model's type (GLIDE, DiT)."""
    frequencies = time_frequencies() if frequencies is None else frequencies
    angles = t_B[:, None].astype(jnp.float32) * frequencies
    if jax.config.jax_enable_x64:  # rounded once, not by the cosine's own errors
        angles = angles.astype(jnp.float64)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1).astype(jnp.float32)


class TimeEmbedding(nn.Module):
    """Features of time steps [B, F] -> [B, D]: an MLP with SiLU."""

    width: int
    dtype: str = "float32"

    @nn.compact
    def __call__(self, features_BF):
        h_BD = Dense(self.width, True, self.dtype, name="up")(features_BF)
        return Dense(self.width, True, self.dtype, name="down")(jax.nn.silu(h_BD))


class LabelEmbedding(nn.Module):
    """Classes [B] -> [B, D]; the last row of the table stands for no class at all, where it can be left out."""

    num_rows: int
    width: int
    dtype: str = "float32"

    @nn.compact
    def __call__(self, labels_B):
        table = self.param("table", nn.initializers.normal(0.02), (self.num_rows, self.width), jnp.float32)
        return table[labels_B].astype(self.dtype)
