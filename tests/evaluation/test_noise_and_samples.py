"""The error of the noise and samples of a diffusion model: computed one by one, and whatever the batch size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.data.augment import Augmentation
from siamese_jax.data.image_set import ArrayImages
from siamese_jax.evaluation.diffusion import GOLDEN, NOISE_SEED, SAMPLE_SEED, NoiseEvaluator, Sampler
from siamese_jax.models.diffusion import DiffusionConfig, DiffusionModel
from siamese_jax.models.families import parameter_shapes
from siamese_jax.models.gaussian import Process, hybrid_losses
from siamese_jax.parallel.mesh import make_mesh

CONFIG = DiffusionConfig(
    num_layers=1, width=16, num_heads=2, mlp_hidden=32, image_size=4, patch_size=2, channels=1, num_classes=3
)
MODEL = DiffusionModel(CONFIG)
PLAIN = Augmentation(size=4, channels=1, mean=(0.5,), std=(0.5,))
STEPS, COUNT = 50, 11
RANDOM = np.random.default_rng(0)
IMAGES = ArrayImages(
    "noise", RANDOM.integers(0, 256, (COUNT, 4, 4, 1), dtype=np.uint8), (np.arange(COUNT) % 3).astype(np.int32),
    ("a", "b", "c"),
)  # fmt: skip
PARAMS = jax.tree.map(
    lambda leaf: jnp.asarray(0.2 * RANDOM.standard_normal(leaf.shape), jnp.float32), parameter_shapes(CONFIG)
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 1, "fsdp": 1, "tensor": 1})


def test_the_error_of_the_noise_is_the_mean_over_images_one_by_one(mesh):
    """By the closed form x_t = sqrt(abar) x + sqrt(1 - abar) e, image by image."""
    process = Process(STEPS)
    kept = np.cumprod(1 - np.linspace(1e-4 * 1000 / STEPS, 0.02 * 1000 / STEPS, STEPS))
    apply = jax.jit(lambda x, t, label: MODEL.apply({"params": PARAMS}, x, t, label))
    mse, vb = [], []
    for i in range(COUNT):
        x = IMAGES.images[i : i + 1] / np.float32(127.5) - 1
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(NOISE_SEED), i), (1, 4, 4, 1))
        t = np.array([int((i + 0.5) * GOLDEN % 1 * STEPS)])
        x_t = np.sqrt(kept[t]) * x + np.sqrt(1 - kept[t]) * noise
        output = apply(x_t, t, IMAGES.labels[i : i + 1])
        mse.append(np.mean(np.square(output[..., :1] - noise)))
        vb.append(hybrid_losses(process, output, jnp.asarray(x), x_t, jnp.asarray(t), noise)[1][0])
    for batch_size in (1, 4, 64):
        found = NoiseEvaluator(MODEL, IMAGES, PLAIN, mesh, batch_size, STEPS)(PARAMS)
        assert found["images"] == COUNT
        assert found["loss"] == pytest.approx(np.mean(mse), rel=1e-5)
        assert found["vb"] == pytest.approx(np.mean(vb), rel=1e-5)


def test_samples_depend_on_their_number_and_label_and_the_seed_alone(mesh):
    labels = [0, 1, 2, 0, 1, 2, 0]

    def samples(batch_size, seed=3, labels=labels, **options):
        options = {"sampling_steps": 5, "method": "ddim", "guidance": 2.0} | options
        sampler = Sampler(MODEL, mesh, num_steps=STEPS, batch_size=batch_size, **options)
        return sampler(PARAMS, labels, seed)

    whole = samples(7)
    assert whole.shape == (7, 4, 4, 1) and np.isfinite(whole).all()
    for batch_size in (2, 64):
        np.testing.assert_allclose(samples(batch_size), whole, atol=1e-4)
    other = samples(7, labels=[0, 1, 2, 1, 1, 2, 0])
    np.testing.assert_allclose(np.delete(other, 3, 0), np.delete(whole, 3, 0), atol=1e-4)
    assert np.abs(other[3] - whole[3]).max() > 1e-3 and np.abs(samples(7, seed=4) - whole).max() > 0.1
    assert np.abs(samples(7, guidance=1.0) - whole).max() > 1e-3
    assert np.abs(samples(7, method="ddpm") - whole).max() > 1e-2


def test_one_step_of_ddim_by_hand(mesh):
    """Two steps: from the last to step 0, and from there to the image, x0 = (x - sqrt(1 - abar) e) / sqrt(abar)."""
    sampler = Sampler(MODEL, mesh, num_steps=STEPS, sampling_steps=2, method="ddim", guidance=1.0, batch_size=1)
    found = sampler(PARAMS, [1], 9)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(9), SAMPLE_SEED), 0)
    x = np.asarray(jax.random.normal(key, (1, 4, 4, 1)), np.float64)
    kept = np.cumprod(1 - np.linspace(1e-4 * 1000 / STEPS, 0.02 * 1000 / STEPS, STEPS))
    steps = Process(STEPS).spaced(2, "ddim").steps[::-1]
    for t, kept_next in zip(steps, [kept[steps[1]], 1.0], strict=True):
        noise = np.asarray(MODEL.apply({"params": PARAMS}, x, jnp.array([t]), jnp.array([1]))[..., :1], np.float64)
        image = (x - np.sqrt(1 - kept[t]) * noise) / np.sqrt(kept[t])
        x = np.sqrt(kept_next) * image + np.sqrt(1 - kept_next) * noise
    np.testing.assert_allclose(found, x, atol=1e-4)
