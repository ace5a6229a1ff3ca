"""Attention against a slow transcription in numpy, form against form, and the choice between forms."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.layers import activations, attention
from siamese_jax.layers.attention import Attention, attention_mask, choose_implementation
from siamese_jax.layers.rotary import rotary_tables

BATCH, LENGTH, WIDTH, HEAD_DIM = 2, 6, 10, 4
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]], np.int32)
random = np.random.default_rng(0)
X = random.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)


def rms(h, gain):
    return gain * h / np.sqrt(np.mean(h * h, axis=-1, keepdims=True) + 1e-5)


def turned(h, position):
    """One head vector at one position, rotate-half."""
    half = len(h) // 2
    angle = position * 10_000.0 ** (-np.arange(half) / half)
    first, second = h[:half], h[half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
    )


def normed(x, place, gain):
    """x [L, heads, K] normalised per head, over all heads, or not."""
    if place == "none":
        return x
    return rms(x, gain) if place == "head" else rms(x.reshape(len(x), -1), gain).reshape(x.shape)


def slow_attention(params, x, num_heads, num_kv_heads, places, causal, segments):
    """Every query of every head by itself."""
    groups = num_heads // num_kv_heads
    out = []
    for row, x_LD in enumerate(x.astype(np.float64)):
        qkv = np.einsum("ld,djgk->ljgk", x_LD, params["qkv"]["kernel"])
        q, k, v = qkv[:, :, :groups], qkv[:, :, groups], qkv[:, :, groups + 1]
        q = q.reshape(LENGTH, num_heads, HEAD_DIM)
        gains = {name: params.get(f"{name}_norm", {}).get("scale") for name in places}
        q, k, v = (normed(a, places[n], gains[n]) for a, n in ((q, "query"), (k, "key"), (v, "value")))
        context = np.zeros((LENGTH, num_heads, HEAD_DIM))
        for head, t in itertools.product(range(num_heads), range(LENGTH)):
            own = head // groups
            readable = [
                s
                for s in range(LENGTH)
                if (s <= t or not causal) and (segments is None or segments[row, s] == segments[row, t])
            ]
            query = turned(q[t, head], t)
            scores = np.array([query @ turned(k[s, own], s) for s in readable]) / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            context[t, head] = weights / weights.sum() @ v[readable, own]
        context = normed(context, places["context"], gains["context"])
        out.append(context.reshape(LENGTH, -1) @ params["out"]["kernel"])
    return np.stack(out)


def randomised(module):
    local = np.random.default_rng(1)
    shapes = jax.eval_shape(module.init, jax.random.key(0), X)["params"]
    return jax.tree.map(lambda leaf: local.uniform(0.3, 1.3, leaf.shape).astype(np.float32), shapes)


NONE = {"query": "none", "key": "none", "value": "none", "context": "none"}
PLACES = [NONE, *({**NONE, name: place} for name in NONE for place in ("head", "full"))]
PLACES += [{name: place for name in NONE} for place in ("head", "full")]


@pytest.mark.parametrize(
    ("num_kv_heads", "causal", "segments"),
    [
        (4, True, None),
        (2, True, None),
        (2, False, None),
        (2, True, SEGMENTS),
        (2, False, SEGMENTS),
        (1, True, SEGMENTS),
    ],
)
def test_attention_is_the_slow_one(num_kv_heads, causal, segments):
    check(4, num_kv_heads, {**NONE, "query": "head", "key": "head"}, causal, segments)


@pytest.mark.parametrize("places", PLACES, ids=lambda p: "-".join(p.values()))
def test_norm_places(places):
    check(4, 2, places, True, None)


def check(num_heads, num_kv_heads, places, causal, segments):
    norms = {f"{name}_norm": place for name, place in places.items()}
    module = Attention(num_heads, num_kv_heads, HEAD_DIM, causal=causal, **norms)
    params = randomised(module)
    expected_norms = {name for name, place in norms.items() if place != "none"}
    assert params.keys() == {"qkv", "out"} | expected_norms
    rotary = rotary_tables(jnp.arange(LENGTH), HEAD_DIM, 10_000.0)
    actual = jax.jit(module.apply)({"params": params}, X, rotary, segments)
    expected = slow_attention(params, X, num_heads, num_kv_heads, places, causal, segments)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_is_grouped_in_values_and_gradients(masked, dtype):
    shapes = [(2, 6, 2, 3, 4), (2, 6, 2, 4), (2, 6, 2, 4)]
    inputs = tuple(jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)
    mask = attention_mask(6, True, jnp.asarray(SEGMENTS)) if masked else None
    weight = random.normal(size=shapes[0]).astype(np.float32)

    def run(form):
        def loss(*inputs):
            out = form(*inputs, mask)
            return jnp.sum(out.astype(jnp.float32) * weight), out

        step = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        (_, out), gradients = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})(*inputs)
        assert {leaf.dtype for leaf in (out, *gradients)} == {jnp.dtype(dtype)}
        return [np.asarray(leaf, np.float32) for leaf in (out, *gradients)]

    tolerance = 2e-6 if dtype == "float32" else 2e-2
    for a, b in zip(run(attention._merged), run(attention._grouped), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_mask():
    np.testing.assert_array_equal(attention_mask(3, True, None)[0], np.tril(np.ones((3, 3), bool)))
    assert attention_mask(3, False, None) is None
    mask = attention_mask(6, True, jnp.asarray(SEGMENTS))
    for row, t, s in itertools.product(range(2), range(6), range(6)):
        assert mask[row, t, s] == (s <= t and SEGMENTS[row, s] == SEGMENTS[row, t])


def test_large_scores_neither_overflow_nor_leak():
    q = jnp.full((1, 3, 1, 1, 4), 1e4)
    k = jnp.full((1, 3, 1, 4), 1e4).at[:, 2].set(-1e4)
    v = jnp.arange(3.0)[None, :, None, None] * jnp.ones(4)
    for form in (attention._merged, attention._grouped):
        out = form(q, k, v, attention_mask(3, True, None))[0, :, 0, 0, 0]
        np.testing.assert_allclose(out, [0.0, 0.5, 0.5])


@pytest.mark.parametrize(
    ("wanted", "platform", "dtype", "head_dim", "masked", "choice"),
    [
        ("auto", "cpu", "float32", 64, False, "merged"),
        ("auto", "cpu", "bfloat16", 64, False, "merged"),
        ("auto", "tpu", "bfloat16", 128, False, "splash"),
        ("auto", "tpu", "bfloat16", 64, True, "splash"),
        ("auto", "tpu", "bfloat16", 32, False, "grouped"),
        ("auto", "tpu", "float32", 128, False, "grouped"),
        ("splash", "tpu", "float32", 32, False, "splash"),
        ("plain", "tpu", "bfloat16", 128, False, "grouped"),
        ("auto", "gpu", "float32", 64, False, "grouped"),
        ("auto", "gpu", "float64", 64, False, "grouped"),
        ("auto", "gpu", "bfloat16", 64, False, "cudnn"),
        ("auto", "gpu", "float16", 128, False, "cudnn"),
        ("auto", "gpu", "bfloat16", 128, True, "grouped"),
        ("auto", "gpu", "bfloat16", 136, False, "grouped"),
        ("auto", "gpu", "bfloat16", 68, False, "grouped"),
        ("plain", "gpu", "bfloat16", 64, False, "grouped"),
        ("plain", "cpu", "float32", 64, True, "merged"),
        ("cudnn", "gpu", "bfloat16", 64, True, "cudnn"),
    ],
)
def test_choice_of_implementation(wanted, platform, dtype, head_dim, masked, choice):
    assert choose_implementation(wanted, platform, dtype, 256, head_dim, masked) == choice
    if choice == "splash":  # whose blocks do not fit other lengths
        assert choose_implementation(wanted, platform, dtype, 200, head_dim, masked) == "grouped"


def test_no_kernel_for_the_mesh_of_another_program(monkeypatch):
    """Whose axes say nothing of batch and heads: every device would compute the whole."""
    for axes, choice in (({"data": 4, "tensor": 2}, "splash"), ({"replica": 8}, "grouped"), ({"x": 1}, "splash")):
        monkeypatch.setattr(activations, "_sizes", lambda axes=axes: axes)
        assert choose_implementation("auto", "tpu", "bfloat16", 256, 128, False) == choice


def test_the_choice_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(attention, "_logged", set())
    with caplog.at_level("DEBUG", logger="siamese_jax"):
        for _ in range(3):
            choose_implementation("plain", "tpu", "bfloat16", 256, 128, False)
    (record,) = caplog.records
    assert "grouped" in record.message and "tpu" in record.message and "128" in record.message
