"""Splash attention, interpreted, against plain attention: values and gradients, on one device and on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.layers.attention import dot_product_attention
from siamese_jax.layers.splash import splash_attention


def example(batch=2, length=256, kv_heads=2, groups=2, head_dim=64, dtype="float32"):
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (batch, length, kv_heads, groups, head_dim), dtype)
    k, v = (jax.random.normal(key, (batch, length, kv_heads, head_dim), dtype) for key in keys[1:3])
    return q, k, v, jax.random.normal(keys[3], q.shape, dtype)


def segments(batch, length, ends):
    return jnp.broadcast_to(jnp.searchsorted(jnp.asarray(ends), jnp.arange(length), side="right"), (batch, length))


def values_and_gradients(attend, q, k, v, weights):
    def loss(q, k, v):
        out = attend(q, k, v)
        return jnp.sum(out.astype(jnp.float32) * weights.astype(jnp.float32)), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return [out, *gradients]


def both(q, k, v, weights, causal=True, segments_BL=None):
    options = {"causal": causal, "segments_BL": segments_BL}
    kernel = functools.partial(splash_attention, name="context", interpret=True, **options)
    plain = functools.partial(dot_product_attention, implementation="plain", **options)
    return [values_and_gradients(attend, q, k, v, weights) for attend in (kernel, plain)]


def agree(ours, plain, tolerance):
    for mine, its in zip(ours, plain, strict=True):
        scale = np.abs(np.asarray(its, np.float32)).max()
        np.testing.assert_allclose(
            np.asarray(mine, np.float32) / scale, np.asarray(its, np.float32) / scale, atol=tolerance, rtol=0
        )


@pytest.mark.parametrize(
    ("causal", "ends", "shape"),
    [
        (True, None, {}),
        pytest.param(True, (100, 130), {}, marks=pytest.mark.slow),
        (False, None, {"groups": 1, "length": 128}),
        (False, (60,), {"kv_heads": 1, "length": 384, "batch": 1}),
        pytest.param(
            True, None, {"head_dim": 128, "length": 640, "batch": 1, "kv_heads": 1}, marks=pytest.mark.slow
        ),
    ],
)
def test_splash_is_plain_attention(causal, ends, shape):
    q, k, v, weights = example(**shape)
    documents = None if ends is None else segments(q.shape[0], q.shape[1], ends)
    agree(*both(q, k, v, weights, causal, documents), 2e-6)


def test_queries_keep_their_scale_in_bfloat16():
    """1 / sqrt(128) has no exact bfloat16; the error stays that of one rounding."""
    arrays = example(head_dim=128, dtype="bfloat16", batch=1)
    ours, plain = both(*arrays)
    _, exact = both(*(x.astype(jnp.float32) for x in arrays))
    agree(plain, exact, 2e-2)
    agree(ours, exact, 2e-2)
