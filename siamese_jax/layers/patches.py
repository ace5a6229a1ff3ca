"""Images cut into patches and put together again, and the sine-cosine table of their positions.

Legend: B batch, H height, W width, C channels, P side of a patch, L = H/P * W/P patches in rows, D width.
"""

import jax.numpy as jnp
import numpy as np


def to_patches(images_BHWC, side: int):
    """[B, L, P * P * C]: every patch row by row, the channels of a pixel together."""
    batch, height, width, channels = images_BHWC.shape
    cut = images_BHWC.reshape(batch, height // side, side, width // side, side, channels)
    return jnp.einsum("bhpwqc->bhwpqc", cut).reshape(batch, -1, side * side * channels)


def from_patches(patches_BLX, side: int):
    """The images [B, H, W, C] of square ones' patches; the inverse of `to_patches`."""
    batch, length, features = patches_BLX.shape
    rows, channels = round(length**0.5), features // side**2
    cut = patches_BLX.reshape(batch, rows, rows, side, side, channels)
    return jnp.einsum("bhwpqc->bhpwqc", cut).reshape(batch, rows * side, rows * side, channels)


def sine_cosine_table(rows: int, width: int) -> np.ndarray:
    """Positions of rows x rows patches, float64 [L, D] (MAE, DiT): the first half of D tells the column, the second
    the row, each half sines then cosines of position / 10000^(2i / (D / 2)).
    """
    quarter = width // 4
    frequencies = 10_000.0 ** -(np.arange(quarter) / quarter)
    angles = np.arange(rows)[:, None] * frequencies
    one = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)  # [rows, D / 2]
    column = np.broadcast_to(one[None, :], (rows, rows, width // 2))
    row = np.broadcast_to(one[:, None], (rows, rows, width // 2))
    return np.concatenate([column, row], axis=-1).reshape(rows * rows, width)
