"""Batches of images: in training a pure function of (seed, step), augmentation included; in evaluation each once.

Shapes: B rows that are read, H height, W width, C channels.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from siamese_jax.data.augment import Augmentation, example_rng
from siamese_jax.data.images import ImageSet, open_images
from siamese_jax.data.order import permute
from siamese_jax.errors import InputError

# Mean and standard deviation of a channel whose values lie from 0 to 1.
NORMALISATIONS = {
    "half": ((0.5,), (0.5,)),
    "none": ((0.0,), (1.0,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def make_augmentation(data: Any, model: Any) -> Augmentation:
    """What a configuration's data group says is done to every image; a family without a key does not do it."""
    mean, std = NORMALISATIONS[data.normalise]
    if len(mean) not in (1, model.channels):
        raise InputError(
            f"data.normalise {data.normalise!r} is for {len(mean)} channels, model.channels is {model.channels}: "
            "set it to half"
        )
    if data.get("padding", 0) and data.crop != "pad":
        raise InputError(
            f"data.padding is {data.padding} but data.crop is {data.crop!r}: set crop to pad or padding to 0"
        )
    if model.channels not in (1, 3) and (data.get("rand_augment_layers", 0) or data.get("color_jitter", 0)):
        raise InputError(
            f"data.rand_augment_layers and data.color_jitter are for grey and colour images, model.channels is "
            f"{model.channels}: set both to 0"
        )
    repeat = model.channels // len(mean)
    wanted = ("crop", "padding", "flip", "rand_augment_layers", "rand_augment_magnitude", "rand_augment_std",
              "color_jitter", "erase", "eval_crop", "grey_to_colour", "latent_scale")  # fmt: skip
    options = {name: data[name] for name in wanted if name in data}
    return Augmentation(
        size=model.image_size, channels=model.channels, mean=mean * repeat, std=std * repeat, **options
    )


class ImageLoader:
    """Training batches, in an order that is new in every epoch and fixed by the seed.

    Example n = step * batch_size + row is image permute(m % N) of epoch m // N, m = n // repeats; what is drawn to
    augment it depends on (seed, m // N, n) alone.
    rows: those of the batch that are read, int64 [B], all unless given. workers: threads that decode and augment.
    """

    def __init__(
        self,
        images: ImageSet,
        augmentation: Augmentation,
        batch_size: int,
        seed: int = 0,
        rows: np.ndarray | None = None,
        repeats: int = 1,
        workers: int = 0,
    ):
        if len(images) < 1:
            raise InputError(f"{images.name} has no image to train on")
        self.rows = np.arange(batch_size, dtype=np.int64) if rows is None else rows
        self.images, self.augmentation, self.batch_size = images, augmentation, batch_size
        self.seed, self.repeats = seed, repeats
        self._threads = concurrent.futures.ThreadPoolExecutor(workers) if workers else None

    def examples_of(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(example number, epoch, image) of the rows that are read of a batch, each int64 [B]."""
        examples = step * self.batch_size + self.rows
        epochs, places = np.divmod(examples // self.repeats, len(self.images))
        for epoch in np.unique(epochs):
            here = epochs == epoch
            places[here] = permute(places[here], len(self.images), (self.seed, epoch))
        return examples, epochs, places

    def _one(self, example: int, epoch: int, place: int) -> tuple[np.ndarray, int]:
        image, label = self.images.example(place)
        return self.augmentation.augment(image, example_rng(self.seed, epoch, example)), label

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """images float32 [B, H, W, C], normalised, and labels int32 [B]."""
        columns = [column.tolist() for column in self.examples_of(step)]
        apply = self._threads.map if self._threads else map
        return _batch(self.images, apply(self._one, *columns))


def _batch(images: ImageSet, examples: Iterable[tuple[np.ndarray, int]]) -> dict[str, np.ndarray]:
    pixels, labels = zip(*examples, strict=True)
    labels = np.array(labels, np.int32)
    wrong = labels[(labels < 0) | (labels >= images.num_classes)]
    if len(wrong):
        raise InputError(
            f"{images.name} has the label {wrong[0]} but {images.num_classes} classes: correct its labels"
        )
    return {"images": np.stack(pixels), "labels": labels}


def evaluation_batches(
    images: ImageSet,
    augmentation: Augmentation,
    batch_size: int,
    rows: np.ndarray,
    num_images: int,
    workers: int = 0,
) -> Iterator[dict[str, np.ndarray]]:
    """`num_images` images, evenly spaced over the set, each exactly once, in order: images, labels, index int64 [B]
    (its number among these; -1 where a row only fills up the last batch) and weights float32 [B] (0 there).

    rows: those of every batch that are read. workers: threads that decode. Of a folder the first images would all
    be of its first classes.
    """

    def one(place: int) -> tuple[np.ndarray, int]:
        image, label = images.example(place)
        return augmentation.plain(image), label

    with _mapper(workers) as apply:
        for first in range(0, num_images, batch_size):
            index = first + rows
            real = index < num_images
            places = np.where(real, index, 0) * len(images) // num_images
            batch = _batch(images, apply(one, places.tolist()))
            yield batch | {"index": np.where(real, index, -1), "weights": real.astype(np.float32)}


@contextlib.contextmanager
def _mapper(workers: int) -> Iterator[Callable]:
    """map, by so many threads; 0 = none."""
    if not workers:
        yield map
        return
    with concurrent.futures.ThreadPoolExecutor(workers) as threads:
        yield threads.map


def check_images(images: ImageSet, augmentation: Augmentation, num_classes: int) -> None:
    """InputError where a model of these options cannot take the images or their labels."""
    if images.num_classes > num_classes:
        raise InputError(
            f"{images.name} has {images.num_classes} classes, beyond model.num_classes {num_classes}: set that to "
            f"at least {images.num_classes}"
        )
    image, _ = images.example(0)
    augmentation.plain(image)
    if image.dtype != np.uint8 and augmentation.is_for_pixels:
        raise InputError(
            f"{images.name} holds latents, which are only flipped: set data.crop to none, and data.erase, "
            "data.rand_augment_layers and data.color_jitter to 0"
        )


def open_image_set(data: Any, split: str, source: str = "") -> ImageSet:
    """The images of a split of a configuration's data, or of another source."""
    return open_images(
        source or data.source, split, data_dir=data.data_dir, validation_fraction=data.validation_fraction,
        on_broken=data.on_broken,
    )  # fmt: skip


def open_image_data(config: Any, model: Any, rows: np.ndarray) -> tuple[ImageLoader, ImageSet, ImageSet, str]:
    """(loader, training images, validation images, fingerprint of the training images) of a configuration."""
    data, augmentation = config.data, make_augmentation(config.data, model)
    train, validation = (open_image_set(data, split) for split in ("train", "validation"))
    for images in (train, validation):
        check_images(images, augmentation, model.num_classes)
    loader = ImageLoader(
        train, augmentation, config.training.batch_size, config.seed, rows, data.get("repeats", 1), data.workers
    )
    return loader, train, validation, train.fingerprint
