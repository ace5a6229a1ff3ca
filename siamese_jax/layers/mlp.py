"""The MLP branch: SwiGLU or GELU. Legend: B batch, L length, D width, F hidden width after gating."""

import functools

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from siamese_jax.layers.activations import constrain
from siamese_jax.layers.dense import Dense

ACTIVATIONS = {
    "swiglu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
GATED = ("swiglu",)


class MLP(nn.Module):
    """[B, L, D] -> [B, L, D]: down(silu(gate) * value), or down(gelu(up)).

    A gated MLP has one kernel `up` [D, 2, F], value first and gate second.
    """

    hidden: int
    activation: str = "swiglu"
    use_bias: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x_BLD):
        gated = self.activation in GATED
        features = (2, self.hidden) if gated else self.hidden
        up = Dense(features, self.use_bias, self.dtype, name="up")(x_BLD)
        up = checkpoint_name(constrain(up, "batch", *[None] * (up.ndim - 2), "hidden"), "mlp_up")
        activate = ACTIVATIONS[self.activation]
        hidden_BLF = activate(up[..., 1, :]) * up[..., 0, :] if gated else activate(up)
        out = Dense(x_BLD.shape[-1], self.use_bias, self.dtype, name="down")(hidden_BLF)
        return checkpoint_name(constrain(out, "batch"), "mlp_out")
