"""The functions under the schemes on plain arrays and callables, without Flax, under jit, grad and vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.residual import functional

KINDS = {
    "layer2": lambda i, k: 1 / np.sqrt(2 * (i + 1)),
    "layer": lambda i, k: 1 / np.sqrt(i + 1),
    "subblock": lambda i, k: 1 / np.sqrt(2 * i + k + 1),
    "none": lambda i, k: 1.0,
}
random = np.random.default_rng(0)
X, Y = (random.normal(size=(4, 6)).astype(np.float32) for _ in range(2))
WEIGHT = (random.normal(size=(6, 6)) / 3).astype(np.float32)


def rms(h):
    return h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-5)


def branch(h):
    return jnp.tanh(h @ WEIGHT)


STEPS = {
    "pre": lambda x, y: functional.pre(x, branch, rms),
    "post": lambda x, y: functional.post(x, branch, rms, 1.5),
    "normalised_residual": lambda x, y: functional.normalised_residual(x, branch, rms),
    "resi_dual": lambda x, y: functional.resi_dual(x, y, branch, rms),
    "siamese_eager": lambda x, y: functional.siamese_eager(x, y, branch, post_norm=rms, pre_norm=rms),
    "siamese": lambda x, y: functional.siamese(
        x, y, branch, post_norm=rms, pre_norm=rms, input_norm=rms, scale=0.5
    ),
    "merge": lambda x, y: functional.merge(x, y, post_norm=rms, pre_norm=rms, final_norm=rms),
}


def total(step):
    return lambda x, y: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(step(x, y)))


def assert_close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), actual, expected)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_is_the_same_under_jit_and_vmap_and_has_a_gradient(step):
    eager = step(X, Y)
    assert_close(jax.jit(step)(X, Y), eager)
    assert_close(jax.vmap(step)(X, Y), eager)
    gradient = jax.grad(total(step))(X, Y)
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0
    assert_close(jax.jit(jax.vmap(jax.grad(total(step))))(X, Y), gradient)


def test_a_branch_is_evaluated_once():
    calls = []

    def counted(h):
        calls.append(h.shape)
        return branch(h)

    functional.siamese(X, Y, counted, post_norm=rms, pre_norm=rms)
    functional.siamese_eager(X, Y, counted, post_norm=rms, pre_norm=rms)
    functional.resi_dual(X, Y, counted, rms)
    assert len(calls) == 3


def test_streams_keep_their_type_whatever_the_branch_computes_in():
    def half(h):
        return branch(h).astype(jnp.bfloat16)

    for post_type, pre_type in ((jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)):
        post, pre = jnp.asarray(X, post_type), jnp.asarray(Y, pre_type)
        for step in (functional.siamese, functional.siamese_eager):
            new_post, new_pre = step(post, pre, half, post_norm=rms, pre_norm=rms, scale=jnp.float32(0.5))
            assert (new_post.dtype, new_pre.dtype) == (post_type, pre_type)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sub_block", [0, 1])
def test_depth_scale_is_its_formula_for_python_and_traced_depths(kind, sub_block):
    depths = np.arange(5)
    expected = np.array([KINDS[kind](i, sub_block) for i in depths])
    python = np.array([functional.depth_scale(kind, int(i), sub_block) for i in depths])
    traced = jax.jit(jax.vmap(lambda i: functional.depth_scale(kind, i, sub_block)))(depths)
    assert traced.dtype == python.dtype == np.float32
    np.testing.assert_allclose(python, expected, rtol=1e-7)
    np.testing.assert_allclose(traced, expected, rtol=2e-7)


def test_a_scale_is_not_rounded_to_the_type_of_the_update():
    scale = functional.depth_scale("layer2", 2, 0)
    assert (scale * jnp.ones((), jnp.bfloat16)).dtype == jnp.float32


def test_nothing_and_identity():
    assert functional.identity(X) is X
    np.testing.assert_array_equal(functional.nothing(X), np.zeros_like(X))
