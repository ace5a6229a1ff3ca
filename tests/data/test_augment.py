"""What is done to one image: by hand where it is simple, against Pillow where it is Pillow's."""

import dataclasses

import numpy as np
import pytest

from siamese_jax.data.augment import Augmentation, example_rng
from siamese_jax.data.rand_augment import OPERATIONS, jitter_colours, rand_augment
from siamese_jax.errors import InputError

image_of = pytest.importorskip("PIL.Image").fromarray
RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (6, 6, 1), dtype=np.uint8)
COLOUR = RANDOM.integers(0, 256, (40, 30, 3), dtype=np.uint8)
BASE = Augmentation(size=6, channels=1, mean=(0.0,), std=(1.0,))


def bytes_of(image):
    return np.round(image * 255).astype(int)


def test_the_numbers_of_an_example_depend_on_seed_epoch_and_example_alone():
    draws = {key: example_rng(*key).random() for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]}
    assert len(set(draws.values())) == 5
    np.random.seed(3)  # noqa: NPY002
    assert example_rng(0, 1, 1).random() == draws[0, 1, 1]


def test_plain_images_of_the_models_size_are_only_normalised():
    found = dataclasses.replace(BASE, mean=(0.5,), std=(0.25,)).plain(GREY)
    np.testing.assert_allclose(found, (GREY / 255 - 0.5) / 0.25, atol=1e-6)
    assert found.dtype == np.float32


def test_pixels_are_the_inverse_cut_off_and_without_nan():
    augmentation = dataclasses.replace(BASE, mean=(0.5,), std=(0.5,))
    np.testing.assert_array_equal(augmentation.pixels(augmentation.plain(GREY)), GREY)
    np.testing.assert_array_equal(augmentation.pixels([-3.0, 0.0, 3.0, np.nan]), [0, 128, 255, 0])


def test_flips_half_of_the_images():
    augmentation = dataclasses.replace(BASE, flip=True)
    kinds = {GREY.tobytes(): 0, GREY[:, ::-1].tobytes(): 0}
    for i in range(200):
        kinds[bytes_of(augmentation.augment(GREY, example_rng(0, 0, i))).astype(np.uint8).tobytes()] += 1
    assert sum(kinds.values()) == 200 and min(kinds.values()) > 70


def test_padded_crops_take_every_place():
    augmentation = dataclasses.replace(BASE, crop="pad", padding=2)
    around = np.pad(GREY, ((2, 2), (2, 2), (0, 0)))
    places = {around[i : i + 6, j : j + 6].tobytes() for i in range(5) for j in range(5)}
    found = {
        bytes_of(augmentation.augment(GREY, example_rng(0, 0, i))).astype(np.uint8).tobytes() for i in range(500)
    }
    assert found == places and len(places) == 25


def test_larger_images_are_resized_and_cut_around_the_centre():
    augmentation = Augmentation(size=12, channels=3, mean=(0.0,) * 3, std=(1.0,) * 3, eval_crop=0.8)
    picture = image_of(COLOUR).resize((15, 20), 3)  # the shorter side 12 / 0.8, bicubic
    np.testing.assert_array_equal(bytes_of(augmentation.plain(COLOUR)), np.asarray(picture)[4:16, 2:14])
    whole = dataclasses.replace(augmentation, eval_crop=1.0)
    np.testing.assert_array_equal(
        bytes_of(whole.plain(COLOUR[:30])), np.asarray(image_of(COLOUR[:30]).resize((12, 12), 3))
    )


def test_random_resized_crops_have_the_asked_areas_and_aspects():
    ramp = np.stack(np.meshgrid(np.arange(200), np.arange(160), indexing="xy"), -1)
    image = np.concatenate([ramp, ramp[..., :1]], -1).astype(np.uint8)  # x, y, x
    augmentation = Augmentation(size=8, channels=3, mean=(0.0,) * 3, std=(1.0,) * 3, crop="random_resized")
    areas, aspects = [], []
    for i in range(300):
        found = augmentation.augment(image, example_rng(0, 0, i)) * 255
        assert found.shape == (8, 8, 3)
        width = (found[:, -1, 0] - found[:, 0, 0]).mean() * 8 / 7
        height = (found[-1, :, 1] - found[0, :, 1]).mean() * 8 / 7
        areas.append(width * height / (200 * 160))
        aspects.append(width / height)
    assert 0.06 < min(areas) < 0.15 and 0.85 < max(areas) < 1.1 and 0.65 < min(aspects) < 0.8
    assert 1.2 < max(aspects) < 1.5


def test_erasing_fills_a_rectangle_with_noise_after_normalisation():
    augmentation = Augmentation(size=32, channels=1, mean=(0.5,), std=(0.5,), erase=1.0)
    image, areas, values = np.full((32, 32, 1), 255, np.uint8), [], []
    for i in range(200):
        found = augmentation.augment(image, example_rng(0, 0, i))[..., 0]
        erased = found != 1
        rows, columns = erased.any(1), erased.any(0)
        np.testing.assert_array_equal(erased, rows[:, None] & columns[None])
        areas.append(erased.mean())
        values.append(found[erased])
    values = np.concatenate(values)
    assert 0.015 < min(areas) < 0.06 and 0.25 < max(areas) < 0.37
    assert abs(values.mean()) < 0.05 and abs(values.std() - 1) < 0.05
    untouched = dataclasses.replace(augmentation, erase=0.25)
    share = np.mean([np.any(untouched.augment(image, example_rng(1, 0, i)) != 1) for i in range(400)])
    assert 0.17 < share < 0.33


def operation(name, image, level, sign=1.0, fill=(10, 20, 30)):
    chosen = dict(OPERATIONS)[name]
    fill = fill if image.shape[-1] == 3 else fill[0]
    return np.asarray(chosen(image_of(image if image.shape[-1] == 3 else image[..., 0]), level, sign, fill))


def test_the_operations_are_pillows_at_the_published_strengths():
    from PIL import Image, ImageEnhance, ImageOps

    picture, fill = image_of(COLOUR), (10, 20, 30)
    expected = {
        ("auto_contrast", 0.9): ImageOps.autocontrast(picture),
        ("equalize", 0.9): ImageOps.equalize(picture),
        ("invert", 0.9): ImageOps.invert(picture),
        ("rotate", 0.9): picture.rotate(27, Image.Resampling.BICUBIC, fillcolor=fill),
        ("posterize", 0.5): ImageOps.posterize(picture, 2),
        ("solarize", 0.25): ImageOps.solarize(picture, 192),
        ("color", 0.5): ImageEnhance.Color(picture).enhance(1.45),
        ("contrast", 1.0): ImageEnhance.Contrast(picture).enhance(1.9),
        ("brightness", 0.5): ImageEnhance.Brightness(picture).enhance(1.45),
        ("sharpness", 0.5): ImageEnhance.Sharpness(picture).enhance(1.45),
    }
    for (name, level), wanted in expected.items():
        np.testing.assert_array_equal(operation(name, COLOUR, level), np.asarray(wanted), err_msg=name)
    weaker = ImageEnhance.Brightness(picture).enhance(0.1)
    np.testing.assert_array_equal(operation("brightness", COLOUR, 1.0, -1.0), np.asarray(weaker))


def test_shifts_shears_and_added_light_by_hand():
    row = np.zeros((20, 20, 1), np.uint8)
    row[10, 10] = 200
    moved = operation("translate_x", row, 1.0, fill=(0,))
    assert moved[10, 1] == 200 and moved.sum() == 200  # 0.45 x 20 = 9 to the left
    assert operation("translate_y", row, 1.0, -1.0, fill=(0,))[19, 10] == 200
    stripe = np.zeros((20, 20, 1), np.uint8)
    stripe[:, 10] = 200
    sheared = operation("shear_x", stripe, 1.0, fill=(0,)).argmax(1)
    assert sheared[0] == 10 and 4 <= sheared[-1] <= 5  # 0.3 a row
    values = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    lighter = operation("solarize_add", values, 0.5).ravel()
    np.testing.assert_array_equal(lighter[:128], np.arange(128) + 55)
    np.testing.assert_array_equal(lighter[128:], np.arange(128, 256))


@pytest.mark.parametrize("image", [COLOUR, np.repeat(GREY, 7, axis=0)[:30]], ids=["colour", "grey"])
def test_rand_augment_changes_most_images_the_same_way_for_the_same_numbers(image):
    fill = (124, 116, 104)[: image.shape[-1]]
    changed = 0
    for i in range(60):
        found = rand_augment(image, example_rng(0, 0, i), 2, 9.0, 0.5, fill)
        assert found.shape == image.shape and found.dtype == np.uint8
        np.testing.assert_array_equal(found, rand_augment(image, example_rng(0, 0, i), 2, 9.0, 0.5, fill))
        changed += np.any(found != image)
        jittered = jitter_colours(image, example_rng(0, 0, i), 0.4)
        assert jittered.shape == image.shape
    assert 30 < changed < 60  # each of two is applied half of the time: a quarter stay


@pytest.mark.parametrize(
    ("changes", "image", "words"),
    [
        (
            {"channels": 3, "mean": (0.0,) * 3, "std": (1.0,) * 3},
            GREY,
            ("1 channel", "channels 3", "grey_to_colour"),
        ),
        ({}, COLOUR, ("3 channel", "model.channels 1")),
        ({}, np.zeros((6, 6, 2), np.float32), ("(6, 6, 2)", "(6, 6, 1)", "model.channels")),
        ({}, np.zeros((5, 6, 1), np.float32), ("(5, 6, 1)", "model.image_size")),
    ],
)
def test_what_does_not_fit_the_model_is_told_in_one_line(changes, image, words):
    augmentation = dataclasses.replace(BASE, **changes)
    for look in (augmentation.plain, lambda image: augmentation.augment(image, example_rng(0, 0, 0))):
        with pytest.raises(InputError) as caught:
            look(image)
        assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_channels_beyond_colour_are_resized_one_by_one():
    """Pillow would take the last of two and four for transparency."""
    pixels = RANDOM.integers(0, 256, (12, 10, 5), dtype=np.uint8)
    for channels in (2, 4, 5):
        augmentation = Augmentation(size=6, channels=channels, mean=(0.0,) * channels, std=(1.0,) * channels)
        found = augmentation.plain(pixels[..., :channels])
        for c in range(channels):
            one = dataclasses.replace(BASE, channels=1).plain(pixels[..., c : c + 1])
            np.testing.assert_array_equal(found[..., c : c + 1], one)


def test_latents_leave_as_they_were_stored():
    augmentation = Augmentation(size=2, channels=4, mean=(0.0,) * 4, std=(1.0,) * 4, latent_scale=0.18215)
    latents = RANDOM.standard_normal((2, 2, 4)).astype(np.float32)
    np.testing.assert_allclose(augmentation.plain(latents), 0.18215 * latents, rtol=1e-6)
    np.testing.assert_allclose(augmentation.stored_latents(augmentation.plain(latents)), latents, rtol=1e-6)
