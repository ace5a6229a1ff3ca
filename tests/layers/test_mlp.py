"""The MLP branch against numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.layers.mlp import MLP

erf = np.vectorize(math.erf)
NUMPY = {
    "gelu": lambda h: h * 0.5 * (1 + erf(h / math.sqrt(2))),
    "gelu_tanh": lambda h: h * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))),
}
X = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)


def randomised(module, x):
    """Parameters with every entry random, biases too."""
    random = np.random.default_rng(1)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    return jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), shapes)


@pytest.mark.parametrize("use_bias", [False, True])
def test_swiglu(use_bias):
    module = MLP(hidden=7, activation="swiglu", use_bias=use_bias)
    params = randomised(module, X)
    up = np.einsum("bld,dcf->blcf", X, params["up"]["kernel"]) + params["up"].get("bias", 0.0)
    value, gate = up[:, :, 0], up[:, :, 1]
    expected = (gate / (1 + np.exp(-gate)) * value) @ params["down"]["kernel"] + params["down"].get("bias", 0.0)
    np.testing.assert_allclose(module.apply({"params": params}, X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", NUMPY)
def test_gelu(activation):
    module = MLP(hidden=7, activation=activation)
    params = randomised(module, X)
    assert params["up"]["kernel"].shape == (5, 7)
    hidden = NUMPY[activation](X @ params["up"]["kernel"])
    actual = module.apply({"params": params}, X)
    np.testing.assert_allclose(actual, hidden @ params["down"]["kernel"], rtol=1e-4, atol=1e-5)


def test_the_two_gelus_differ_by_more_than_the_tolerance():
    h = np.linspace(-3, 3, 61)
    assert np.abs(NUMPY["gelu"](h) - NUMPY["gelu_tanh"](h)).max() > 2e-4
    for name, approximate in (("gelu", False), ("gelu_tanh", True)):
        np.testing.assert_allclose(jax.nn.gelu(jnp.asarray(h), approximate), NUMPY[name](h), atol=1e-6)
