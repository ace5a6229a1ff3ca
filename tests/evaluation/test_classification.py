"""Top-1, top-5 and the confusion matrix against numpy, whatever the batch size; ties, NaN, ragged batches."""

import jax
import numpy as np
import pytest

from siamese_jax.data.augment import Augmentation
from siamese_jax.data.image_set import ArrayImages
from siamese_jax.evaluation.classification import ClassificationEvaluator, classify, names_of
from siamese_jax.models.families import make_model
from siamese_jax.models.initialize import initial_parameters
from siamese_jax.models.vision import VisionConfig
from siamese_jax.parallel.mesh import make_mesh

CONFIG = VisionConfig(
    num_layers=1, width=8, num_heads=1, mlp_hidden=8, image_size=4, patch_size=2, channels=1, num_classes=9
)
MODEL = make_model(CONFIG)
PLAIN = Augmentation(size=4, channels=1, mean=(0.5,), std=(0.5,))


@pytest.fixture(scope="module")
def params():
    params = initial_parameters(CONFIG, jax.random.key(0))
    return jax.tree.map(
        lambda leaf: leaf + 0.3 * np.random.default_rng(leaf.size).standard_normal(leaf.shape), params
    )


@pytest.fixture(scope="module")
def images():
    random = np.random.default_rng(1)
    pixels = random.integers(0, 256, (23, 4, 4, 1), dtype=np.uint8)
    return ArrayImages("noise", pixels, random.integers(0, 9, 23).astype(np.int32), tuple("abcdefghi"))


@pytest.mark.parametrize("batch_size", [1, 5, 23, 64])
def test_every_image_counts_once(batch_size, params, images):
    logits = np.asarray(MODEL.apply({"params": params}, images.images / np.float32(127.5) - 1), np.float64)
    guess, order = logits.argmax(-1), np.argsort(-logits, axis=-1)
    evaluator = ClassificationEvaluator(
        MODEL, images, PLAIN, make_mesh({"data": 1, "fsdp": 1, "tensor": 1}), batch_size
    )
    seen = []
    found = evaluator(params, seen.append)
    total = found["total"]
    assert total["images"] == 23 and seen[-1] == 23
    assert total["top1"] == pytest.approx(np.mean(guess == images.labels))
    assert total["top5"] == pytest.approx(
        np.mean([label in row[:5] for label, row in zip(images.labels, order, strict=True)])
    )
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert total["loss"] == pytest.approx(-log_p[np.arange(23), images.labels].mean(), rel=1e-5)
    confusion = np.zeros((9, 9), int)
    np.add.at(confusion, (images.labels, guess), 1)
    np.testing.assert_array_equal(found["confusion"], confusion)
    threads = ClassificationEvaluator(MODEL, images, PLAIN, evaluator.mesh, batch_size, workers=3)
    assert threads(params)["total"] == total
    few = evaluator(params, num_images=7)["total"]
    spread = np.array([0, 3, 6, 9, 13, 16, 19])  # of 23: the first ones may all be of one class
    assert few["images"] == 7 and few["top1"] == pytest.approx(np.mean((guess == images.labels)[spread]))


def test_a_model_that_gives_nan_has_no_hit(params, images):
    mesh = make_mesh({"data": 1, "fsdp": 1, "tensor": 1})
    broken = jax.tree.map(lambda leaf: leaf * np.nan, params)
    total = ClassificationEvaluator(MODEL, images, PLAIN, mesh, 8)(broken)["total"]
    assert total["top1"] == total["top5"] == 0 and np.isnan(total["loss"])


class Fixed:
    """A model that answers with given logits."""

    def __init__(self, logits):
        self.logits = np.asarray(logits, np.float32)

    def apply(self, variables, images):
        return jax.numpy.asarray(self.logits)


def test_of_equal_logits_the_smaller_class_comes_first_and_nan_is_wrong():
    logits = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [np.nan] * 4, [2, np.nan, 0, 0]]
    batch = {"images": np.zeros((5, 1)), "labels": np.array([0, 1, 3, 0, 0])}
    found = classify(Fixed(logits), {}, batch)
    np.testing.assert_array_equal(found["rank"], [0, 1, 3, 4, 4])
    np.testing.assert_array_equal(found["guess"][:3], [0, 0, 0])
    assert np.isnan(found["nats"][3])


def test_classes_that_the_images_do_not_have_are_named_by_number(images):
    assert names_of(images, 11) == [*"abcdefghi", "9", "10"]
