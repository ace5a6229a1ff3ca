"""What is done to a batch of images on the devices, and the losses: by hand, and whatever the micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from siamese_jax.config import base_config, model_config
from siamese_jax.models.families import make_model
from siamese_jax.models.gaussian import Process, noised
from siamese_jax.models.initialize import initial_parameters
from siamese_jax.training import vision_task
from siamese_jax.training.diffusion_task import draw_noise, hide_labels, noise_losses
from siamese_jax.training.step import accumulated_gradient
from siamese_jax.training.task import row_keys
from siamese_jax.training.tasks import TASKS
from siamese_jax.training.vision_task import mixed, smoothed, soft_cross_entropy

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
RANDOM = np.random.default_rng(0)


def tiny(family, **changes):
    """(configuration, model, parameters) of a small model; changes as group__key=value."""
    config = base_config(family)
    model = {"num_layers": 2, "width": 16, "num_heads": 2, "mlp_hidden": 32, "image_size": 8, "patch_size": 4,
             "channels": 3, "num_classes": 5}  # fmt: skip
    config.model.update(model)
    config.training.batch_size = 8
    for name, value in changes.items():
        group, _, key = name.partition("__")
        config[group][key] = value
    own = model_config(config)
    params = jax.jit(lambda: initial_parameters(own, jax.random.key(0)), compiler_options=QUICK)()
    # Away from the start, where a diffusion model's branches are closed and most gradients are 0.
    draw = lambda leaf: leaf + 0.1 * RANDOM.standard_normal(leaf.shape).astype(np.float32)  # noqa: E731
    return config, make_model(own), jax.tree.map(draw, params)


def gradients(config, model, params, num_parts):
    task = TASKS[config.family]
    batch = task.prepare(config, task.random_batch(config, model.config), jax.random.key(1))
    loss = task.make_loss(model, config)
    run = jax.jit(accumulated_gradient, static_argnums=(0, 3), compiler_options=QUICK)
    return run(loss, params, batch, num_parts)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("vision", {"model__drop_path": 0.5, "training__mixup": 0.8, "training__cutmix": 1.0,
                    "training__label_smoothing": 0.1, "model__distilled": True}),
        ("diffusion", {"model__label_dropout": 0.5}),
    ],
)  # fmt: skip
def test_micro_batches_change_nothing(family, changes):
    setting = tiny(family, **changes)
    (losses, whole), (again, parts) = (gradients(*setting, num_parts) for num_parts in (1, 4))
    np.testing.assert_allclose(losses, again, rtol=1e-5)
    whole, parts = ravel_pytree(whole)[0], ravel_pytree(parts)[0]
    np.testing.assert_allclose(parts, whole, atol=1e-5 * np.abs(whole).max())


def test_every_loss_falls_along_its_gradient():
    for family in ("vision", "diffusion"):
        config, model, params = tiny(family)
        (objective, _), gradient = gradients(config, model, params, 1)
        size = sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(gradient))
        moved = jax.tree.map(lambda p, g, size=size: p - 1e-3 / size * g, params, gradient)
        (after, _), _ = gradients(config, model, moved, 1)
        np.testing.assert_allclose(objective - after, 1e-3, rtol=0.1)  # to first order


def test_smoothed_labels_and_their_cross_entropy_by_hand():
    targets = smoothed(jnp.array([2, 0]), 4, 0.1)
    np.testing.assert_allclose(targets, [[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025]], rtol=1e-6)
    logits = jnp.array([[0.0, 0, np.log(2), 0], [0, 0, 0, 0]])
    log_p = np.log([[0.2, 0.2, 0.4, 0.2], [0.25] * 4])
    np.testing.assert_allclose(soft_cross_entropy(logits, targets), -(targets * log_p).sum(-1), rtol=1e-6)


def batch_of(size=8, side=16):
    images = jnp.broadcast_to(jnp.arange(size, dtype=jnp.float32)[:, None, None, None], (size, side, side, 1))
    return images, jax.nn.one_hot(jnp.arange(size), size)


def test_mixup_blends_with_the_batch_in_reverse_and_so_do_labels():
    images, targets = batch_of()
    shares = []
    for seed in range(200):
        out, soft = mixed(images, targets, jax.random.key(seed), 0.8, 0.0)
        share = float(soft[0, 0])
        shares.append(share)
        np.testing.assert_allclose(out[0], 7 * (1 - share), atol=1e-5)
        np.testing.assert_allclose(out[5], 5 * share + 2 * (1 - share), atol=1e-5)
        np.testing.assert_allclose(soft[5], share * targets[5] + (1 - share) * targets[2], atol=1e-6)
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1)).
    assert abs(np.mean(shares) - 0.5) < 0.07 and abs(np.var(shares) - 1 / (4 * 2.6)) < 0.02


def test_cutmix_pastes_a_rectangle_whose_area_is_the_labels_share():
    images, targets = batch_of()
    areas = []
    for seed in range(100):
        out, soft = mixed(images, targets, jax.random.key(seed), 0.0, 1.0)
        pasted = np.asarray(out[1, ..., 0] == 6)
        assert pasted.sum() + np.sum(np.asarray(out[1]) == 1) == 256  # nothing is blended
        rows, columns = pasted.any(1), pasted.any(0)
        np.testing.assert_array_equal(pasted, rows[:, None] & columns[None])
        np.testing.assert_allclose(float(soft[1, 1]), 1 - pasted.mean(), atol=1e-6)
        areas.append(pasted.mean())
    assert 0.15 < np.mean(areas) < 0.45 and np.std(areas) > 0.1


def test_with_both_each_batch_takes_one_and_with_none_nothing_happens():
    images, targets = batch_of()
    blended = 0
    for seed in range(60):
        out, _ = mixed(images, targets, jax.random.key(seed), 1.0, 1.0)
        blended += len(np.unique(np.asarray(out[0]))) == 1 and float(out[0, 0, 0, 0]) not in (0.0, 7.0)
    assert 15 < blended < 45
    same, labels = mixed(images, targets, jax.random.key(0), 0.0, 0.0)
    assert same is images and labels is targets


def test_what_is_drawn_for_a_row_does_not_depend_on_the_batch():
    key = jax.random.key(3)
    np.testing.assert_array_equal(row_keys(key, 8)[:3], row_keys(key, 3))
    t, noise = draw_noise(row_keys(key, 512), (512, 4, 4, 2), 1000)
    few_t, few = draw_noise(row_keys(key, 2), (2, 4, 4, 2), 1000)
    np.testing.assert_array_equal(t[:2], few_t)
    np.testing.assert_array_equal(noise[:2], few)
    assert 0 <= int(t.min()) < 20 and 980 < int(t.max()) < 1000 and abs(float(t.mean()) - 499.5) < 45
    assert abs(float(noise.mean())) < 0.03 and abs(float(noise.std()) - 1) < 0.03


def test_the_asked_share_of_labels_is_hidden():
    config, _, _ = tiny("diffusion", model__label_dropout=0.25)
    own, labels = model_config(config), jnp.arange(4000) % 5
    hidden = np.asarray(hide_labels(row_keys(jax.random.key(0), 4000), labels, own))
    assert abs(np.mean(hidden == 5) - 0.25) < 0.03
    np.testing.assert_array_equal(hidden[hidden != 5], np.asarray(labels)[hidden != 5])
    config, _, _ = tiny("diffusion", model__label_dropout=0.0)
    assert hide_labels(None, labels, model_config(config)) is labels


def test_the_objective_of_diffusion_is_the_error_of_the_noise_and_the_bound():
    config, model, params = tiny("diffusion", model__label_dropout=0.0)
    task = TASKS["diffusion"]
    batch = task.prepare(config, task.random_batch(config, model.config), jax.random.key(1))
    objective, loss = task.make_loss(model, config)(params, batch, 8.0)
    t, noise = draw_noise(batch["keys"], batch["images"].shape, 1000)
    mse, vb = noise_losses(model, params, Process(1000), batch["images"], batch["labels"], t, noise)
    np.testing.assert_allclose([objective, loss], [np.mean(mse) + np.mean(vb), np.mean(mse)], rtol=1e-6)


@pytest.mark.parametrize("family", ["vision", "diffusion"])
def test_bfloat16_with_float32_streams_is_close_to_float32(family):
    config, model, params = tiny(family)
    (wide, _), gradient = gradients(config, model, params, 1)
    config.model.dtype, config.model.stream_dtype = "bfloat16", "float32"
    (narrow, _), rough = gradients(config, make_model(model_config(config)), params, 1)
    np.testing.assert_allclose(narrow, wide, rtol=0.02)
    one, other = ravel_pytree(gradient)[0], ravel_pytree(rough)[0]
    assert other.dtype == np.float32
    assert np.linalg.norm(one - other) < 0.05 * np.linalg.norm(one)


def test_distilled_models_learn_with_both_heads():
    config, model, params = tiny("vision", model__distilled=True)
    _, gradient = gradients(config, model, params, 1)
    for head in ("classifier", "distillation_classifier"):
        assert np.abs(gradient[head]["kernel"]).max() > 1e-3


def test_flops_of_an_image_by_hand():
    config, model, _ = tiny("vision")
    tokens, layer = 5, 4 * 16 * 16 + 2 * 16 * 32
    expected = 6 * (tokens * 2 * layer + 4 * 48 * 16 + 16 * 5) + 12 * 2 * 16 * tokens**2
    assert vision_task.VisionTask().flops_per_unit(config, model.config) == expected


def test_streams_are_watched_at_steps_that_training_knows():
    """Of a process of 30 steps, not of the usual 1000."""
    config, model, params = tiny("diffusion", training__diffusion_steps=30)
    task, batch = TASKS["diffusion"], TASKS["diffusion"].random_batch(config, model.config)
    seen = task.watch(config, model, params, batch, lambda streams: streams)
    keys = row_keys(jax.random.key(0), 8)
    t, noise = draw_noise(keys, batch["images"].shape, 30)
    assert int(t.max()) < 30
    x_t = noised(Process(30), batch["images"], t, noise)
    options = {"watch": lambda streams: streams, "method": "hidden"}
    expected = model.apply({"params": params}, x_t, t, batch["labels"], **options)[2]
    for stream, states in expected.items():
        np.testing.assert_array_equal(seen[stream], states)
