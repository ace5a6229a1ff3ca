"""The diffusion model: every scheme that fits it, its conditions, guidance, and what starts at zero."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_vision import QUICK, randomised

from siamese_jax.errors import InputError
from siamese_jax.layers.condition import time_features
from siamese_jax.layers.patches import sine_cosine_table
from siamese_jax.models.diffusion import DiffusionConfig, guide, guided
from siamese_jax.models.families import check_model, make_model, parameter_shapes
from siamese_jax.models.initialize import initial_parameters
from siamese_jax.models.stack import unstack_layers
from siamese_jax.residual.scheme import known_schemes

TINY = DiffusionConfig(
    num_layers=2, width=16, num_heads=2, mlp_hidden=32, image_size=8, patch_size=4, channels=3, num_classes=5
)
X = np.random.default_rng(0).standard_normal((3, 8, 8, 3)).astype(np.float32)
T, LABELS = np.array([0, 17, 999]), np.array([0, 3, 5])
UNFIT = ("scaled", "peri", "reordered")


def output(config, params, x=X, t=T, labels=LABELS):
    model = make_model(config)
    return jax.jit(lambda p: model.apply({"params": p}, x, t, labels), compiler_options=QUICK)(params)


@pytest.mark.parametrize("residual", [name for name in known_schemes() if name not in UNFIT])
def test_every_scheme_that_fits_scanned_and_unrolled_agrees(residual):
    config = dataclasses.replace(TINY, residual=residual, num_layers=4)
    params = randomised(config)
    expected = output(config, params)
    assert expected.shape == (3, 8, 8, 6) and np.isfinite(expected).all()
    loop = dataclasses.replace(config, scan=False)
    np.testing.assert_allclose(
        output(loop, unstack_layers(params, config.segments())), expected, rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("residual", UNFIT)
def test_a_scheme_that_would_undo_the_modulation_is_refused(residual):
    with pytest.raises(InputError, match=f"'{residual}' does not fit.* choose another") as caught:
        check_model(dataclasses.replace(TINY, residual=residual))
    assert "\n" not in str(caught.value)


def layer_norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


def silu(x):
    return x / (1 + np.exp(-x))


def test_pre_norm_is_the_published_dit():
    """Against DiT's own equations, in numpy: x = x + gate F(LN(x) (1 + scale) + shift)."""
    config = dataclasses.replace(TINY, residual="pre", scan=False)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), randomised(config))

    def linear(x, w):
        return np.tensordot(x, w["kernel"], 1) + w["bias"]

    patches = X.reshape(3, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(3, 4, 48)
    x = linear(patches, p["patches"]) + sine_cosine_table(2, 16)
    features = np.asarray(time_features(jnp.asarray(T)), np.float64)
    c = linear(silu(linear(features, p["time"]["up"])), p["time"]["down"]) + p["labels"]["table"][LABELS]
    for i in range(2):
        layer = p[f"layer_{i}"]
        made = linear(silu(c), layer["modulation"]["linear"])[:, :, None]  # [B, 6, 1, D]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = made.transpose(1, 0, 2, 3)
        qkv = linear(layer_norm(x) * (1 + scale) + shift, layer["attention"]["qkv"])  # [B, L, H, 3, K]
        q, k, v = (qkv[..., n, :] for n in range(3))
        scores = np.einsum("blhk,bshk->bhls", q, k) / math.sqrt(8)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        context = np.einsum("bhls,bshk->blhk", weights / weights.sum(-1, keepdims=True), v).reshape(3, 4, 16)
        x = x + gate * linear(context, layer["attention"]["out"])
        h = linear(layer_norm(x) * (1 + mlp_scale) + mlp_shift, layer["mlp"]["up"])
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + mlp_gate * linear(h, layer["mlp"]["down"])
    shift, scale = linear(silu(c), p["output_modulation"]["linear"])[:, :, None].transpose(1, 0, 2, 3)
    out = linear(layer_norm(x) * (1 + scale) + shift, p["output"])
    expected = out.reshape(3, 2, 2, 4, 4, 6).transpose(0, 1, 3, 2, 4, 5).reshape(3, 8, 8, 6)
    found = output(config, jax.tree.map(np.float32, p))
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "residual",
    [
        "siamese",
        pytest.param("pre", marks=pytest.mark.slow),
        pytest.param("siamese_hybrid", marks=pytest.mark.slow),
    ],
)
def test_every_branch_starts_closed_and_the_output_at_zero(residual):
    config = dataclasses.replace(TINY, residual=residual)
    params = jax.jit(lambda key: initial_parameters(config, key))(jax.random.key(0))
    assert not np.any(output(config, params))
    model = make_model(config)
    _, _, seen = model.apply({"params": params}, X, T, LABELS, watch=lambda s: s, method="hidden")
    first = model.apply({"params": params}, X, method="embed")
    stream = seen["pre"] if "pre" in seen else seen["stream"]
    np.testing.assert_array_equal(stream[-1], first)  # nothing was added to the stream that is never normalised


def test_time_features_and_positions_by_hand():
    features = np.asarray(time_features(jnp.array([0, 10])))
    np.testing.assert_array_equal(features[0], [1] * 128 + [0] * 128)
    for i in (0, 64):
        angle = 10 * 10_000 ** (-i / 128)
        np.testing.assert_allclose(features[1, [i, 128 + i]], [math.cos(angle), math.sin(angle)], atol=1e-6)
    table = sine_cosine_table(3, 8)
    row, column = 2, 1
    halves = [
        [math.sin(place), math.sin(place / 100), math.cos(place), math.cos(place / 100)] for place in (column, row)
    ]
    np.testing.assert_allclose(table[3 * row + column], np.concatenate(halves), atol=1e-12)


def test_guidance_leads_the_first_three_channels_of_the_noise():
    made = np.random.default_rng(1).standard_normal((4, 2, 2, 8)).astype(np.float32)
    led = np.asarray(guide(jnp.asarray(made), 4.0, 4))
    expected = made[2:, ..., :3] + 4 * (made[:2, ..., :3] - made[2:, ..., :3])
    np.testing.assert_allclose(led[:2, ..., :3], expected, rtol=1e-6)
    np.testing.assert_allclose(led[2:, ..., :3], expected, rtol=1e-6)
    np.testing.assert_array_equal(led[..., 3:], made[..., 3:])
    grey = np.asarray(guide(jnp.asarray(made[..., :2]), 4.0, 1))  # the variance of a grey image is not led
    np.testing.assert_array_equal(grey[..., 1:], made[..., 1:2])


def test_guidance_of_one_is_the_asked_class_and_of_zero_no_class():
    params, model = randomised(TINY), make_model(TINY)

    def predict(x, t, labels):
        return model.apply({"params": params}, x, t, labels)

    labels = jnp.array([1, 2, 3])
    for scale, expected in ((1.0, labels), (0.0, jnp.full(3, TINY.null_label))):
        found = guided(predict, labels, TINY.null_label, scale, TINY.channels)(X, T)
        np.testing.assert_allclose(found[..., :3], predict(X, T, expected)[..., :3], atol=1e-5)


def test_without_label_dropout_there_is_no_label_for_none():
    config = dataclasses.replace(TINY, label_dropout=0.0)
    assert config.null_label is None and parameter_shapes(config)["labels"]["table"].shape == (5, 16)
    assert parameter_shapes(TINY)["labels"]["table"].shape == (6, 16) and TINY.null_label == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 3}, ("patch_size 3", "image_size 8")),
        ({"width": 18, "num_heads": 2}, ("width is 18", "multiple of 4")),
        ({"label_dropout": 1.0}, ("label_dropout is 1.0",)),
        ({"channels": 0}, ("channels is 0",)),
        ({"residual_options": (("input_norm", False),)}, ("input_norm", "'siamese'", "leave the option on")),
        ({"residual_options": (("final_norm", False),)}, ("final_norm",)),
        ({"residual_overrides": "{1: {'input_norm': False}}"}, ("input_norm",)),
    ],
)
def test_wrong_options_end_in_one_line(changes, words):
    with pytest.raises(InputError) as caught:
        check_model(dataclasses.replace(TINY, **changes))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
