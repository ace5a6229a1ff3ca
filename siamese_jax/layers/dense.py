"""The matrix product every layer uses, and the one place that works around XLA:CPU's backward fusion."""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from siamese_jax.layers.platform import target_platform

Array = jax.Array


@jax.custom_vjp
def _fenced(y: Array) -> Array:
    return y


_fenced.defvjp(lambda y: (y, None), lambda _, cotangent: (jax.lax.optimization_barrier(cotangent),))


def fence_cotangent(y: Array) -> Array:
    """Identity; on a CPU its cotangent is computed before the two backward products that read it.

    XLA:CPU otherwise fuses the elementwise producer of the cotangent into a transposing copy of it,
    which makes the backward pass of a dense layer about a fifth slower. A barrier would only cost on
    an accelerator, so there it is the plain identity.
    """
    return _fenced(y) if target_platform() == "cpu" else y


class Dense(nn.Module):
    """y = x W + b with x [..., D], W [D, *features]; y has the compute type.

    Several features keep their own axes, so that a partition rule can name one of them.
    """

    features: int | Sequence[int]
    use_bias: bool = False
    dtype: str = "float32"
    kernel_init: Callable = nn.initializers.truncated_normal(0.02)

    @nn.compact
    def __call__(self, x):
        features = (self.features,) if isinstance(self.features, int) else tuple(self.features)
        width = x.shape[-1]
        kernel = self.param("kernel", self.kernel_init, (width, *features), jnp.float32)
        y = fence_cotangent(jnp.tensordot(x.astype(self.dtype), kernel.astype(self.dtype), 1))
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, features, jnp.float32)
            y = y + bias.astype(self.dtype)
        return y
