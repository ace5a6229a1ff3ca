"""The image classifier: every scheme, scanned and unrolled, drop path, distillation, wrong options."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.errors import InputError
from siamese_jax.layers.drop_path import DropPath
from siamese_jax.layers.patches import from_patches, to_patches
from siamese_jax.models.families import check_model, make_model, parameter_shapes
from siamese_jax.models.initialize import initial_parameters
from siamese_jax.models.stack import unstack_layers
from siamese_jax.models.vision import VisionConfig
from siamese_jax.residual import functional
from siamese_jax.residual.scheme import known_schemes

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TINY = VisionConfig(
    num_layers=2, width=16, num_heads=2, mlp_hidden=32, image_size=8, patch_size=4, channels=3, num_classes=5
)
IMAGES = np.random.default_rng(0).standard_normal((3, 8, 8, 3)).astype(np.float32)
KEYS = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(5), 3)))


def randomised(config, seed=0):
    """Parameters that all differ from where training starts."""
    random = np.random.default_rng(seed)

    def draw(path, leaf):
        mean = 1.0 if path[-1].key in ("scale", "gain") else 0.0
        return (mean + 0.3 * random.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, parameter_shapes(config))


def logits(config, params, **options):
    model = make_model(config)
    return jax.jit(lambda p: model.apply({"params": p}, IMAGES, **options), compiler_options=QUICK)(params)


@pytest.mark.parametrize("residual", known_schemes())
def test_every_scheme_scanned_unrolled_and_recomputed_agrees(residual):
    config = dataclasses.replace(TINY, residual=residual, num_layers=4, drop_path=0.4)
    params = randomised(config)
    expected = logits(config, params, keys_B2=KEYS)
    assert expected.shape == (3, 5) and np.isfinite(expected).all()
    loop = dataclasses.replace(config, scan=False)
    np.testing.assert_allclose(
        logits(loop, unstack_layers(params, config.segments()), keys_B2=KEYS), expected, rtol=2e-5, atol=2e-5
    )
    again = dataclasses.replace(config, remat="full")
    np.testing.assert_allclose(logits(again, params, keys_B2=KEYS), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(logits(config, params) - expected).max() > 1e-3  # something was dropped


def test_patches_go_back_and_lie_row_by_row():
    images = np.arange(2 * 8 * 8 * 3).reshape(2, 8, 8, 3)
    patches = to_patches(images, 4)
    np.testing.assert_array_equal(patches[1, 1].reshape(4, 4, 3), images[1, :4, 4:])  # the second of the first row
    np.testing.assert_array_equal(from_patches(patches, 4), images)


def test_a_row_is_dropped_by_its_own_key_alone():
    drop = DropPath(0.5, 3)
    many = jax.random.key_data(jax.random.split(jax.random.key(0), 4000))
    np.testing.assert_array_equal(drop.factors(many, 0, 0), 1)  # nothing in the first layer
    middle, last = (np.asarray(drop.factors(many, depth, 1)) for depth in (1, 2))
    assert set(np.unique(middle)) == {0, np.float32(1 / 0.75)} and set(np.unique(last)) == {0, 2}
    assert abs(middle.mean() - 1) < 0.03 and abs(last.mean() - 1) < 0.05
    np.testing.assert_array_equal(drop.factors(many[7:9], 2, 1), last[7:9])
    assert np.any(np.asarray(drop.factors(many, 2, 0)) != last)


@pytest.mark.parametrize("residual", ["siamese", "pre"])
def test_both_streams_lose_the_same_updates(residual, monkeypatch):
    """One layer whose branches count `factor` times, against the equations."""
    factor = np.array([0.0, 1.0, 2.5], np.float32)
    monkeypatch.setattr(DropPath, "factors", lambda self, keys, depth, sub_block: jnp.asarray(factor + sub_block))
    config = dataclasses.replace(TINY, residual=residual, num_layers=1, drop_path=0.5, scan=False)
    params, model = randomised(config), make_model(config)
    bound = model.bind({"params": params})
    seen = model.apply({"params": params}, IMAGES, keys_B2=KEYS, watch=lambda s: s, method="hidden")[1]
    h = bound.embed(IMAGES)
    layer = params["layer_0"]

    def norm(name):
        scale, bias = layer["residual"][name]["scale"], layer["residual"][name]["bias"]

        def apply(x):
            centred = x - x.mean(-1, keepdims=True)
            return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale + bias

        return apply

    def branch(kind, sub_block):
        make = config.stack(causal=False).make
        module = make.attention() if kind == "attention" else make.mlp()
        times = (factor + sub_block)[:, None, None]
        return lambda x: times * module.apply({"params": layer[kind]}, x)

    if residual == "pre":
        x = functional.pre(h, branch("attention", 0), norm("attention_norm"))
        x = functional.pre(x, branch("mlp", 1), norm("mlp_norm"))
        np.testing.assert_allclose(seen["stream"][0], x, atol=2e-5)
        return
    streams = h, h
    for sub_block, kind in enumerate(("attention", "mlp")):
        streams = functional.siamese(
            *streams, branch(kind, sub_block), post_norm=norm(f"{kind}_post"), pre_norm=norm(f"{kind}_pre"),
            input_norm=norm(f"{kind}_input"), scale=2**-0.5,
        )  # fmt: skip
    np.testing.assert_allclose(seen["post"][0], streams[0], atol=2e-5)
    np.testing.assert_allclose(seen["pre"][0], streams[1], atol=2e-5)


def test_the_answer_of_a_distilled_model_is_the_mean_of_its_heads():
    config = dataclasses.replace(TINY, distilled=True)
    params = randomised(config)
    scores = make_model(config).apply({"params": params}, IMAGES, method="scores")
    np.testing.assert_allclose(scores.answer, (scores.by_class + scores.by_distillation) / 2, rtol=1e-6)
    np.testing.assert_array_equal(logits(config, params).shape, (3, 5))
    assert np.abs(scores.by_class - scores.by_distillation).max() > 0.01
    assert params["positions"]["table"].shape == (1 + 1 + 4, 16)


def test_initial_parameters_follow_the_table():
    config = dataclasses.replace(TINY, width=64, num_heads=4, mlp_hidden=256, distilled=True)
    params = jax.jit(lambda key: initial_parameters(config, key))(jax.random.key(0))
    assert abs(np.std(params["layers"]["mlp"]["up"]["kernel"]) / 0.02 - 0.987) < 0.01  # cut at three deviations
    assert abs(np.std(params["patches"]["kernel"]) * np.sqrt(3 * 48) - 0.987) < 0.05
    for name in ("class", "distillation"):
        assert 0.01 < np.std(params["tokens"][name]) < 0.03
    assert not np.any(params["classifier"]["bias"]) and np.any(params["classifier"]["kernel"])


def test_drop_path_wants_a_key_for_every_image():
    """One key for all would broadcast: every image would lose the same layers."""
    with pytest.raises(InputError, match=r"keys of shape \(1, 2\) for \d+ images"):
        logits(TINY, randomised(TINY), keys_B2=KEYS[:1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 3}, ("patch_size 3", "image_size 8")),
        ({"num_classes": 0}, ("num_classes is 0",)),
        ({"drop_path": 1.0}, ("drop_path is 1.0",)),
        ({"num_heads": 3}, ("num_heads 3", "width 16")),
        ({"norm": "batch"}, ("'batch'", "rms")),
        ({"residual": "siames"}, ("'siames'", "siamese")),
        ({"init_std": 0.0}, ("init_std is 0.0",)),
        ({"activation": "relu"}, ("'relu'", "gelu")),
    ],
)
def test_wrong_options_end_in_one_line(changes, words):
    with pytest.raises(InputError) as caught:
        check_model(dataclasses.replace(TINY, **changes))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
