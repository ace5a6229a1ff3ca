"""adaLN-Zero: what a branch reads is normalised, scaled and shifted by a condition, its update gated (DiT).

Peebles and Xie, arXiv 2212.09748. Legend: B batch, L length, D width, P parts.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax

from siamese_jax.layers.dense import Dense
from siamese_jax.layers.norms import layer_norm

Array = jax.Array


class Adjustment(NamedTuple):
    """What the condition makes of one branch: each [B, 1, D]. gate: None for the head, which adds to nothing."""

    shift: Array
    scale: Array
    gate: Array | None = None

    def read(self, h_BLD: Array, epsilon: float) -> Array:
        """LN(h) (1 + scale) + shift, with a norm that has no parameters."""
        normalised = layer_norm(h_BLD, epsilon=epsilon)
        return normalised * (1 + self.scale).astype(h_BLD.dtype) + self.shift.astype(h_BLD.dtype)


def modulated(branch: Callable[[Array], Array], by: Adjustment, epsilon: float) -> Callable[[Array], Array]:
    """gate * F(LN(h) (1 + scale) + shift)."""

    def read_and_gate(h_BLD):
        update = branch(by.read(h_BLD, epsilon))
        return by.gate.astype(update.dtype) * update

    return read_and_gate


class Modulation(nn.Module):
    """Condition [B, D] -> the adjustments of a layer's two branches, or of the head: one product after SiLU.

    Its kernel [D, P, D] and bias [P, D] start at 0, so every branch starts closed. The order of the parts is the
    reference's: shift, scale, gate of attention, then of the MLP; shift, scale of the head.
    """

    for_head: bool = False
    epsilon: float = 1e-6
    dtype: str = "float32"

    @nn.compact
    def __call__(self, condition_BD):
        parts = 2 if self.for_head else 6
        width = condition_BD.shape[-1]
        linear = Dense((parts, width), True, self.dtype, nn.initializers.zeros, name="linear")
        made = [part[:, None] for part in jax.numpy.moveaxis(linear(jax.nn.silu(condition_BD)), 1, 0)]
        return Adjustment(*made) if self.for_head else (Adjustment(*made[:3]), Adjustment(*made[3:]))
