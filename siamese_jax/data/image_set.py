"""What every set of images can do, and sets that lie in memory.

Shapes: N images, H height, W width, C channels.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from siamese_jax.errors import InputError


class ImageSet:
    """Images with labels, by index.

    name: for the reader. class_names: one for each class. fingerprint: of what the set consists of. split: train,
    validation or all.
    on_broken: what happens where an image cannot be read. 'stop' raises InputError with its name; with 'skip' the
    next sound one takes its place, always the same one, and `broken` lists its name.
    """

    name: str
    class_names: tuple[str, ...]
    fingerprint: str
    split: str
    on_broken = "stop"
    shows_pixels = True  # whether a picture can be made of what a model makes of them

    def __init__(self):
        self.broken: list[str] = []

    @property
    def num_classes(self) -> int:
        """Classes, of which some may have no image here."""
        return len(self.class_names)

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> tuple[np.ndarray, int]:
        """(image, label) of a place; Broken where the image cannot be read."""
        raise NotImplementedError

    def example(self, index: int) -> tuple[np.ndarray, int]:
        """(uint8 [H, W, C], or float32 of latents; label); of the next sound one in place of a broken one."""
        for tried in range(len(self)):
            place = (index + tried) % len(self)
            try:
                return self.read(place)
            except Broken as error:
                if self.on_broken != "skip":
                    raise InputError(f"{error}: mend or remove it, or set data.on_broken=skip") from error
                if error.name not in self.broken:
                    self.broken.append(error.name)
        raise InputError(f"{self.name}: none of its {len(self)} images can be read")


class Broken(Exception):
    """An image that cannot be read; `name` is its file."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name} cannot be read as an image ({reason})")
        self.name = name


class ArrayImages(ImageSet):
    """Images in memory: [N, H, W, C], uint8 or float32, and labels int32 [N]."""

    def __init__(self, name: str, images: np.ndarray, labels: np.ndarray, class_names: tuple[str, ...]):
        super().__init__()
        self.name, self.class_names = name, class_names
        self.images, self.labels = images, labels
        self.shows_pixels = images.dtype == np.uint8
        digest = hashlib.blake2b(repr((images.shape, str(images.dtype), class_names)).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(images).data)
        digest.update(np.ascontiguousarray(labels).data)
        self.fingerprint = digest.hexdigest()
        if len(labels) and labels.max() >= len(class_names):
            raise InputError(f"{name} has the label {labels.max()}, beyond its {len(class_names)} classes")

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index):
        return self.images[index], int(self.labels[index])


class RenamedImages(ImageSet):
    """Images of another set with the class numbers of a model: those with the same names."""

    def __init__(self, images: ImageSet, class_names: tuple[str, ...]):
        super().__init__()
        unknown = [name for name in images.class_names if name not in class_names]
        if unknown:
            few = ", ".join(class_names[:5]) + (", ..." if len(class_names) > 5 else "")
            raise InputError(
                f"{images.name} has the class {unknown[0]!r}, the model was trained on {few}: rename the classes "
                "of the images to those"
            )
        self._images, self._label = images, [class_names.index(name) for name in images.class_names]
        self.name, self.class_names, self.split = images.name, class_names, images.split
        self.fingerprint, self.shows_pixels, self.broken = images.fingerprint, images.shows_pixels, images.broken

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index):
        return self.example(index)

    def example(self, index):
        image, label = self._images.example(index)
        return image, self._label[label]


def has_names(class_names: Sequence[str]) -> bool:
    """Whether classes are named, and not only numbered in order."""
    return list(class_names) != [str(i) for i in range(len(class_names))]


def with_classes_of(images: ImageSet, class_names: Sequence[str] | None) -> ImageSet:
    """The images with the class numbers of a model that was trained on these names; by number without names."""
    if not class_names or not has_names(class_names) or not has_names(images.class_names):
        return images
    return RenamedImages(images, tuple(class_names))


def part_of(index: np.ndarray, split: str, fraction: float) -> np.ndarray:
    """The numbered examples of a split of a set that has no parts of its own; 'all': every one."""
    if split == "all":
        return index
    out = held_out(index, fraction)
    return index[out if split == "validation" else ~out]


def held_out(index: np.ndarray, fraction: float) -> np.ndarray:
    """Which of the numbered examples are held out: by a hash of their number, so not by what else there is.

    The first is always kept and the second always held out, so that neither part is empty.
    """
    digests = (hashlib.blake2b(b"hold out %d" % i, digest_size=8).digest() for i in index.tolist())
    out = np.array([int.from_bytes(digest, "little") < fraction * 2**64 for digest in digests], bool)
    return (out & (index != 0)) | (index == 1)
