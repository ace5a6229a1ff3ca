"""Drop path: whole branches left out at random, row by row (stochastic depth, arXiv 1603.09382).

Legend: B batch, L length, D width.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class DropPath:
    """Row b's update becomes 0 with a probability that grows linearly from 0 in the first layer to `rate` in the
    last (DeiT, timm); what is kept is divided by the probability of keeping it.
    """

    rate: float
    num_layers: int

    def keep_probability(self, depth: int | Array) -> float | Array:
        """Of a branch of layer `depth`, 0-based, may be traced."""
        return 1.0 - self.rate * depth / max(self.num_layers - 1, 1)

    def factors(self, keys_B2: Array, depth: int | Array, sub_block: int) -> Array:
        """What every row's update is multiplied by, float32 [B]; sub_block: 0 attention, 1 MLP.

        keys: a raw random key for every row, uint32 [B, 2], so that a row's fate depends on nothing beside it.
        """
        keep = self.keep_probability(depth)

        def kept(key_2):
            key = jax.random.fold_in(jax.random.wrap_key_data(key_2), 2 * depth + sub_block)
            return jax.random.bernoulli(key, keep)

        return jax.vmap(kept)(keys_B2) / jnp.asarray(keep, jnp.float32)

    def wrap(self, branch: Callable[[Array], Array], keys_B2: Array, depth, sub_block: int) -> Callable:
        """The branch, its updates dropped row by row."""

        def dropped(h_BLD):
            update = branch(h_BLD)
            return update * self.factors(keys_B2, depth, sub_block)[:, None, None].astype(update.dtype)

        return dropped
