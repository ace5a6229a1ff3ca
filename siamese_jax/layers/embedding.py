"""Token embedding and the output head. Legend: B batch, L length, D width, V rows of the table."""

import flax.linen as nn
import jax.numpy as jnp

from siamese_jax.layers.activations import constrain


class Embedding(nn.Module):
    """Token ids [B, L] -> vectors [B, L, D] of the compute type, from `table` [V, D]."""

    num_rows: int
    width: int
    dtype: str = "float32"

    def setup(self):
        self.table = self.param(
            "table", nn.initializers.truncated_normal(0.02), (self.num_rows, self.width), jnp.float32
        )

    def __call__(self, tokens_BL):
        # Each device looks up its columns for all rows of its fsdp group, then columns are exchanged for rows: that
        # moves the vectors looked up, never the table.
        tokens_BL = constrain(tokens_BL, "gathered_batch")
        vectors_BLD = constrain(self.table[tokens_BL].astype(self.dtype), "gathered_batch", None, "width")
        return constrain(vectors_BLD, "batch")


class Head(nn.Module):
    """The untied output kernel [D, V]; the product itself is taken in slices by the loss."""

    num_rows: int
    width: int

    def setup(self):
        self.kernel = self.param(
            "kernel", nn.initializers.truncated_normal(0.02), (self.width, self.num_rows), jnp.float32
        )

    def __call__(self):
        return self.kernel
