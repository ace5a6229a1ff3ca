"""Norms against values worked out by hand, and the type in which their statistics are taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.errors import InputError
from siamese_jax.layers.norms import NORMS, LayerNorm, RMSNorm, layer_norm, norm_factory, rms_norm


def test_rms_norm_by_hand():
    x = jnp.array([[1.0, -7.0], [3.0, 4.0]])  # mean squares 25 and 12.5
    expected = [[0.2, -1.4], [3 / 12.5**0.5, 4 / 12.5**0.5]]
    np.testing.assert_allclose(rms_norm(x, epsilon=0.0), expected, rtol=1e-6)
    np.testing.assert_allclose(rms_norm(x, jnp.array([2.0, 0.5]), 0.0)[0], [0.4, -0.7], rtol=1e-6)
    np.testing.assert_allclose(rms_norm(x, epsilon=11.0)[0], [1 / 6, -7 / 6], rtol=1e-6)


def test_layer_norm_by_hand():
    x = jnp.array([1.0, 3.0, 8.0])  # mean 4, variance (9 + 1 + 16) / 3
    deviation = (26 / 3) ** 0.5
    np.testing.assert_allclose(layer_norm(x, epsilon=0.0), np.array([-3, -1, 4]) / deviation, rtol=1e-6)
    scale, bias = jnp.array([1.0, 2.0, -1.0]), jnp.array([0.0, 10.0, 1.0])
    expected = np.array([-3, -2, -4]) / (26 / 3 + 0.5) ** 0.5 + [0, 10, 1]
    np.testing.assert_allclose(layer_norm(x, scale, bias, 0.5), expected, rtol=1e-6)


def test_epsilon_keeps_a_zero_vector_and_its_gradient_finite():
    for norm in (rms_norm, layer_norm):
        zero = jnp.zeros(4)
        assert not norm(zero).any()
        gradient = jax.grad(lambda h, norm=norm: norm(h).sum())(zero)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_statistics_of_bfloat16_are_taken_in_float32(norm):
    # In bfloat16 4,096 squares of 1 do not add up (256 + 1 = 256), and a large mean swallows the variance.
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(3, 4096)) + (norm is layer_norm) * 30, jnp.bfloat16)
    actual = norm(x)
    expected = norm(x.astype(jnp.float32)).astype(jnp.bfloat16)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32))
    squares = np.mean(np.square(actual.astype(np.float32)), axis=-1)
    np.testing.assert_allclose(squares, 1.0, rtol=1e-2)


def test_bfloat16_is_cast_back_before_the_gain():
    x = jnp.array([1.0, 2.0, 3.0, 5.0], jnp.bfloat16)
    gain = jnp.array([1.01, 0.99, 3.3, 0.7])
    expected = rms_norm(x) * gain.astype(jnp.bfloat16)
    np.testing.assert_array_equal(
        rms_norm(x, gain).astype(np.float32), expected.astype(np.float32)
    )  # fmt: skip


def test_float64_stays_float64():
    jax.config.update("jax_enable_x64", True)
    try:
        x = np.random.default_rng(1).normal(size=(2, 5))
        actual = rms_norm(jnp.asarray(x))
        assert actual.dtype == jnp.float64
        expected = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(actual, expected, rtol=1e-14)
        centred = x - x.mean(axis=-1, keepdims=True)
        expected = centred / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(layer_norm(jnp.asarray(x)), expected, rtol=1e-12)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_modules_start_as_the_plain_norm_with_their_epsilon():
    x = jnp.array([[1.0, 2.0, -4.0]])
    for module, plain, names in (
        (RMSNorm(epsilon=0.3), rms_norm, {"scale"}),
        (LayerNorm(epsilon=0.3), layer_norm, {"scale", "bias"}),
        (LayerNorm(epsilon=0.3, use_bias=False), layer_norm, {"scale"}),
    ):
        params = module.init(jax.random.key(0), x)["params"]
        assert params.keys() == names
        assert all(leaf.dtype == jnp.float32 and leaf.shape == (3,) for leaf in params.values())
        np.testing.assert_array_equal(module.apply({"params": params}, x), plain(x, epsilon=0.3))


def test_factory_knows_its_norms_and_lists_them():
    assert norm_factory("rms", 0.1)() == RMSNorm(epsilon=0.1)
    assert norm_factory("layer_no_bias", 0.1)() == LayerNorm(epsilon=0.1, use_bias=False)
    with pytest.raises(InputError) as caught:
        norm_factory("batch", 0.1)
    assert all(word in str(caught.value) for word in ("'batch'", *NORMS))
