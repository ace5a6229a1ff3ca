"""Batches of images: a function of (seed, step), each image once in evaluation, and what is refused."""

import numpy as np
import pytest

from siamese_jax.config import base_config, model_config
from siamese_jax.data.augment import Augmentation
from siamese_jax.data.image_loader import (
    ImageLoader,
    check_images,
    evaluation_batches,
    make_augmentation,
    open_image_data,
)
from siamese_jax.data.image_set import ArrayImages
from siamese_jax.errors import InputError

PLAIN = Augmentation(size=4, channels=1, mean=(0.0,), std=(1.0,))
LIVELY = Augmentation(size=4, channels=1, mean=(0.5,), std=(0.5,), crop="pad", padding=1, flip=True, erase=0.5)


def numbered(count=10):
    """Image i is full of i, its label i % 3."""
    images = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 4, 4, 1)).copy()
    return ArrayImages("numbered", images, np.arange(count, dtype=np.int32) % 3, ("a", "b", "c"))


def seen(batch):
    return np.round(batch["images"][:, 0, 0, 0] * 255).astype(int)


def test_every_epoch_has_every_image_once_in_a_new_order():
    loader = ImageLoader(numbered(), PLAIN, batch_size=4, seed=1)
    order = np.concatenate([seen(loader.batch(step)) for step in range(10)])
    epochs = order.reshape(4, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    labels = np.concatenate([loader.batch(step)["labels"] for step in range(10)])
    np.testing.assert_array_equal(labels, order % 3)
    other = ImageLoader(numbered(), PLAIN, batch_size=4, seed=2)
    assert np.any(seen(other.batch(0)) != seen(loader.batch(0)))


@pytest.mark.parametrize("workers", [0, 3])
def test_a_batch_is_a_function_of_seed_and_step_augmentation_included(workers):
    first = ImageLoader(numbered(), LIVELY, batch_size=8, seed=1)
    batches = [first.batch(step)["images"] for step in range(5)]
    again = ImageLoader(numbered(), LIVELY, batch_size=8, seed=1, workers=workers)
    np.random.seed(7)  # noqa: NPY002
    for step in (3, 0, 4):
        np.testing.assert_array_equal(again.batch(step)["images"], batches[step])
    rows = ImageLoader(numbered(), LIVELY, batch_size=8, seed=1, rows=np.array([1, 6]))
    np.testing.assert_array_equal(rows.batch(2)["images"], batches[2][[1, 6]])


def test_repeats_show_an_image_so_often_and_augmented_anew():
    loader = ImageLoader(numbered(), PLAIN, batch_size=6, seed=1, repeats=3)
    order = np.concatenate([seen(loader.batch(step)) for step in range(5)])
    np.testing.assert_array_equal(order, np.repeat(order[::3], 3))
    assert sorted(order[::3]) == list(range(10))
    lively = ImageLoader(numbered(), LIVELY, batch_size=6, seed=1, repeats=3).batch(0)["images"]
    assert np.any(lively[0] != lively[1]) or np.any(lively[1] != lively[2])


@pytest.mark.parametrize("batch_size", [1, 4, 10, 16])
def test_evaluation_sees_each_image_once_and_marks_what_fills_up(batch_size):
    batches = list(evaluation_batches(numbered(), PLAIN, batch_size, np.arange(batch_size), 10))
    assert all(len(batch["images"]) == batch_size for batch in batches)
    real = np.concatenate([batch["weights"] for batch in batches]) > 0
    index = np.concatenate([batch["index"] for batch in batches])
    np.testing.assert_array_equal(index[real], range(10))
    assert np.all(index[~real] == -1)
    np.testing.assert_array_equal(np.concatenate([seen(batch) for batch in batches])[real], range(10))
    halves = [
        list(evaluation_batches(numbered(), PLAIN, 4, rows, 10)) for rows in (np.array([0, 1]), np.array([2, 3]))
    ]
    both = [np.concatenate([a["index"], b["index"]]) for a, b in zip(*halves, strict=True)]
    np.testing.assert_array_equal(np.concatenate(both), [*range(10), -1, -1])


def config_of(family="vision", **changes):
    config = base_config(family)
    config.model.update({"image_size": 8, "patch_size": 4, "channels": 1, "num_classes": 3})
    for name, value in changes.items():
        group, _, key = name.partition("__")
        config[group][key] = value
    return config


def test_normalisations_and_what_does_not_fit_them():
    config = config_of(data__normalise="half")
    augmentation = make_augmentation(config.data, model_config(config))
    image = np.array([[[0], [51], [255]]], np.uint8)
    np.testing.assert_allclose(augmentation.normalised(image)[..., 0], [[-1, -0.6, 1]], atol=1e-6)
    colour = config_of(data__normalise="imagenet", model__channels=3)
    white = make_augmentation(colour.data, model_config(colour)).normalised(np.full((1, 1, 3), 255, np.uint8))
    np.testing.assert_allclose(
        white[0, 0],
        [(1 - m) / s for m, s in zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)],
        rtol=1e-5,
    )
    with pytest.raises(InputError, match=r"'imagenet' is for 3 channels, model\.channels is 1"):
        make_augmentation(config_of(data__normalise="imagenet").data, model_config(config))
    with pytest.raises(InputError, match=r"data.padding is 2 but data.crop is 'none'"):
        make_augmentation(config_of(data__padding=2).data, model_config(config))

    many = config_of(model__channels=4, data__rand_augment_layers=2)
    with pytest.raises(InputError, match=r"for grey and colour images, model\.channels is 4"):
        make_augmentation(many.data, model_config(many))


def write_npz(path, images, labels, **more):
    np.savez(path, **{"images" if images.dtype == np.uint8 else "latents": images}, labels=labels, **more)
    return str(path)


def test_a_run_opens_both_parts_and_refuses_what_the_model_cannot_take(tmp_path):
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (60, 8, 8, 1), dtype=np.uint8), np.arange(60) % 3
    source = write_npz(tmp_path / "a.npz", images, labels)
    config = config_of(data__source=source, data__validation_fraction=0.25)
    loader, train, validation, fingerprint = open_image_data(config, model_config(config), np.arange(4))
    assert len(train) + len(validation) == 60 and 5 < len(validation) < 25 and fingerprint == train.fingerprint
    assert loader.batch(0)["images"].shape == (4, 8, 8, 1)
    for changes, words in (
        ({"model__num_classes": 2}, r"3 classes, beyond model\.num_classes 2"),
        ({"model__channels": 3}, r"images of 1 channel.*model.channels 3.*grey_to_colour"),
    ):
        wrong = config_of(data__source=source, **changes)
        with pytest.raises(InputError, match=words) as caught:
            open_image_data(wrong, model_config(wrong), np.arange(4))
        assert "\n" not in str(caught.value)
    grey = config_of(data__source=source, model__channels=3, data__grey_to_colour=True)
    batch = open_image_data(grey, model_config(grey), np.arange(4))[0].batch(0)["images"]
    assert batch.shape == (4, 8, 8, 3) and np.all(batch[..., 0] == batch[..., 2])


def test_latents_are_only_scaled_and_flipped_and_must_have_the_models_shape(tmp_path):
    latents = np.random.default_rng(0).standard_normal((40, 8, 8, 4)).astype(np.float32)
    source = write_npz(tmp_path / "l.npz", latents, np.arange(40) % 3)
    config = config_of("diffusion", data__source=source, model__channels=4, data__latent_scale=0.18215)
    loader, train, _, _ = open_image_data(config, model_config(config), np.arange(5))
    _, _, places = loader.examples_of(0)
    expected = train.images[places] * np.float32(0.18215)
    np.testing.assert_allclose(loader.batch(0)["images"], expected, rtol=1e-6)
    assert not train.shows_pixels
    wrong = config_of("diffusion", data__source=source, model__channels=3)
    with pytest.raises(InputError, match=r"latents of shape \(8, 8, 4\) do not fit the model's \(8, 8, 3\)"):
        open_image_data(wrong, model_config(wrong), np.arange(5))


def test_what_latents_do_not_get_is_refused(tmp_path):
    latents = np.random.default_rng(0).standard_normal((40, 8, 8, 1)).astype(np.float32)
    source = write_npz(tmp_path / "l.npz", latents, np.arange(40) % 3)
    config = config_of(data__source=source, data__erase=0.5)
    with pytest.raises(InputError, match=r"holds latents, which are only flipped: set data\.crop to none"):
        open_image_data(config, model_config(config), np.arange(5))


def test_labels_beyond_the_classes_of_a_set_are_told():
    class Odd(ArrayImages):
        def read(self, index):
            return self.images[index], 7

    images = Odd("odd", np.zeros((2, 4, 4, 1), np.uint8), np.zeros(2, np.int32), ("a", "b"))
    with pytest.raises(InputError, match="odd has the label 7 but 2 classes"):
        ImageLoader(images, PLAIN, 2).batch(0)
    with pytest.raises(InputError, match="beyond its 2 classes"):
        ArrayImages("x", images.images, np.array([0, 2], np.int32), ("a", "b"))
    check_images(images, PLAIN, 2)
