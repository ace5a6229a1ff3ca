"""The residual schemes as plain functions: arrays and callables in, arrays out, any framework.

Each function is ONE sub-block: `branch` is attention or an MLP, [..., D] -> [..., D], evaluated once;
norms are callables [..., D] -> [..., D]. A Transformer layer is two sub-blocks. Streams are named as in
the paper: `post` (its X, normalised) and `pre` (its Y, never normalised on its own path).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array
Map = Callable[[Array], Array]


def identity(x: Array) -> Array:
    """No norm."""
    return x


def nothing(x: Array) -> Array:
    """Reads nothing from a stream."""
    return jnp.zeros_like(x)


def add(stream: Array, update: Array) -> Array:
    """stream + update in the stream's type, whatever the branch computes in."""
    return (stream + update).astype(stream.dtype)


def pre(x: Array, branch: Map, norm: Map) -> Array:
    """Pre-Norm: x + F(LN x)."""
    return add(x, branch(norm(x)))


def post(x: Array, branch: Map, norm: Map, alpha: float = 1.0) -> Array:
    """Post-Norm: LN(alpha x + F(x)); alpha > 1 is DeepNorm (arXiv 2203.00555)."""
    return norm(add(alpha * x, branch(x)))


def normalised_residual(x: Array, branch: Map, norm: Map, residual_after_norm: bool = True) -> Array:
    """z = LN(x); z + F(z), or x + F(z) when the raw x stays the residual (HybridNorm's sub-blocks)."""
    read = norm(x)
    return add(read if residual_after_norm else x, branch(read))


def resi_dual(post: Array, pre: Array, branch: Map, norm: Map) -> tuple[Array, Array]:
    """ResiDual (arXiv 2304.14802): O = F(X); X = LN(X + O); Y = Y + O. The branch reads X only."""
    update = branch(post)
    return norm(add(post, update)), add(pre, update)


def siamese_eager(
    post: Array,
    pre: Array,
    branch: Map,
    *,
    post_norm: Map,
    pre_norm: Map,
    input_norm: Map = identity,
    scale: float | Array = 1.0,
) -> tuple[Array, Array]:
    """SiameseNorm as Algorithm 1 of arXiv 2602.08064 prints it: X is normalised when it is written.

    O = F(LN_in(X + LN_Y(Y)));  X = LN_X(X + s O);  Y = Y + O
    """
    update = branch(input_norm(post + pre_norm(pre)))
    return post_norm(add(post, scale * update)), add(pre, update)


def siamese(
    post: Array,
    pre: Array,
    branch: Map,
    *,
    post_norm: Map,
    pre_norm: Map,
    input_norm: Map = identity,
    scale: float | Array = 1.0,
    residual_after_norm: bool = True,
) -> tuple[Array, Array]:
    """SiameseNorm as its reference code realises it: X is normalised when it is read.

    X' = LN_X(X);  O = F(LN_in(X' + LN_Y(Y)));  X = X' + s O;  Y = Y + O

    `residual_after_norm=False` keeps the raw X as the residual base: X = X + s O.
    """
    read = post_norm(post)
    update = branch(input_norm(read + pre_norm(pre)))
    return add(read if residual_after_norm else post, scale * update), add(pre, update)


def merge(post: Array, pre: Array, *, post_norm: Map, pre_norm: Map, final_norm: Map = identity) -> Array:
    """The two streams become one for the head: LN_out(LN_X(X) + LN_Y(Y))."""
    return final_norm(post_norm(post) + pre_norm(pre))


DEPTH_SCALES = {
    "layer2": lambda layer, sub_block: (2 * (layer + 1)) ** -0.5,
    "layer": lambda layer, sub_block: (layer + 1) ** -0.5,
    "subblock": lambda layer, sub_block: (2 * layer + sub_block + 1) ** -0.5,
    "none": lambda layer, sub_block: 1.0,
}


def depth_scale(kind: str, layer: int | Array, sub_block: int) -> Array:
    """The factor s on the update of the post stream, float32 or wider.

    layer: 0-based, may be traced; sub_block: 0 attention, 1 MLP. 'layer2' is the reference code's
    1/sqrt(2(i+1)), 'layer' the paper's 1/sqrt(i+1), 'subblock' 1/sqrt(k+1) with k = 2i + sub_block.
    """
    # A Python number would take the type of the update: rounded to bfloat16 in a loop, but not in a scan.
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    layer = layer.astype(wide) if isinstance(layer, jax.Array) else layer
    return jnp.asarray(DEPTH_SCALES[kind](layer, sub_block), wide)
