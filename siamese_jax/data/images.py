"""Labelled images, or stored latents, with random access: where they come from and which part is held out.

Shapes: N images, H height, W width, C channels.
"""

import gzip
import importlib.util
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np

from siamese_jax.data.image_set import ArrayImages, ImageSet, held_out
from siamese_jax.errors import InputError

SPLITS = ("train", "validation")
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package
FASHION_CLASSES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
_IDX_FILES = {"train": "train", "validation": "t10k"}
_DIGITS_EACH = 5  # every fifth digit is held out
SOURCES = "quickstart, fashion_mnist, digits, tfds:NAME, a folder of images or a .npz file"


def open_images(
    source: str, split: str, *, data_dir: str = "", validation_fraction: float = 0.1, on_broken: str = "stop"
) -> ImageSet:
    """The images of a split, 'train' or 'validation' (the test part where a set has one).

    source: 'fashion_mnist' (Debian's package, or its four files in data_dir), 'digits' (scikit-learn),
    'quickstart' (the first of the two that is there), 'tfds:NAME' or a prepared TFDS folder, a folder of images by
    class, or a .npz file ('A.npz,B.npz': training, validation). on_broken: 'stop' or 'skip', see `ImageSet`.
    Raises InputError for what cannot be found or read.
    """
    if split not in SPLITS:
        raise InputError(f"unknown split {split!r}: use one of {', '.join(SPLITS)}")
    if source == "quickstart":
        folder = Path(data_dir or FASHION_MNIST)
        source = "fashion_mnist" if (folder / _idx_name("train", "images", 3)).exists() else "digits"
    if source == "fashion_mnist":
        return _fashion_mnist(Path(data_dir or FASHION_MNIST), split)
    if source == "digits":
        return _digits(split)
    if source.startswith("tfds:") or (Path(source) / "dataset_info.json").exists():
        from siamese_jax.data.tfds_images import open_tfds

        return open_tfds(source, split, data_dir, validation_fraction)
    if source.endswith(".npz"):
        return _npz(source, split, validation_fraction)
    if Path(source).is_dir():
        from siamese_jax.data.image_folder import open_folder

        return open_folder(Path(source), split, validation_fraction, on_broken)
    raise InputError(f"data.source {source!r} is not there (looked in {Path.cwd()}): name {SOURCES}")


def _idx_name(part: str, kind: str, dimensions: int) -> str:
    return f"{part}-{kind}-idx{dimensions}-ubyte.gz"


def _fashion_mnist(folder: Path, split: str) -> ImageSet:
    part = _IDX_FILES[split]
    paths = [folder / _idx_name(part, "images", 3), folder / _idx_name(part, "labels", 1)]
    for path in paths:
        if not path.exists():
            raise InputError(
                f"fashion_mnist is not in {folder} ({path.name} is missing): apt-get install "
                "dataset-fashion-mnist, set data.data_dir to a folder with its files, or take data.source=digits"
            )
    images, labels = (read_idx(path) for path in paths)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise InputError(
            f"{paths[0]} has shape {images.shape}, {paths[1].name} {labels.shape}: they do not belong together"
        )
    return ArrayImages(f"fashion_mnist {split}", images[..., None], labels.astype(np.int32), FASHION_CLASSES)


def read_idx(path: Path) -> np.ndarray:
    """The bytes of an IDX file (MNIST's format, gzipped) as an array; InputError where it is broken."""
    try:
        raw = gzip.open(path).read()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is broken ({error}): install it again") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise InputError(f"{path} is no IDX file of bytes (it starts with {raw[:4].hex()}, not 000008..)")
    count = raw[3]
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(count)]
    if len(raw) != 4 + 4 * count + int(np.prod(shape)):
        raise InputError(f"{path} has {len(raw)} bytes, its header says {shape}: it was cut off, install it again")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * count).reshape(shape)


def _digits(split: str) -> ImageSet:
    if importlib.util.find_spec("sklearn") is None:
        raise InputError("the source digits needs scikit-learn: pip install scikit-learn")
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    out = np.arange(len(images)) % _DIGITS_EACH == _DIGITS_EACH - 1
    chosen = out if split == "validation" else ~out
    names = tuple(str(digit) for digit in range(10))
    return ArrayImages(f"digits {split}", images[chosen], digits.target[chosen].astype(np.int32), names)


def _npz(source: str, split: str, fraction: float) -> ImageSet:
    paths = [Path(part.strip()) for part in source.split(",")]
    if len(paths) > 2:
        raise InputError(
            f"data.source names {len(paths)} .npz files: one, or one for training and one for validation"
        )
    path = paths[SPLITS.index(split)] if len(paths) == 2 else paths[0]
    images, labels, names = _read_npz(path)
    if len(paths) == 1:
        out = held_out(np.arange(len(images)), fraction)
        chosen = out if split == "validation" else ~out
        images, labels = images[chosen], labels[chosen]
        if not len(images):
            raise InputError(
                f"{path} leaves no image for {split} with data.validation_fraction {fraction}: use more images or "
                "another fraction"
            )
    num_classes = max(len(names), 1 + max(int(_read_npz(p)[1].max()) for p in paths))
    names = names or tuple(str(i) for i in range(num_classes))
    return ArrayImages(f"{path} {split}", images, labels, names)


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """(images or latents [N, H, W, C], labels int32 [N], names of the classes)."""
    if not path.exists():
        raise InputError(f"data.source {path} is not there (looked in {os.getcwd()}): correct the path")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read as .npz: {' '.join(str(error).split())[:100]}") from error
    images = arrays.get("latents", arrays.get("images"))
    labels = arrays.get("labels")
    if images is None or labels is None:
        raise InputError(f"{path} has {', '.join(arrays) or 'nothing'}: it needs images or latents, and labels")
    if images.ndim != 4 or not (images.dtype == np.uint8 or np.issubdtype(images.dtype, np.floating)):
        raise InputError(
            f"{path}: the images are {images.dtype} of shape {images.shape}, not uint8 or floating (N, H, W, C)"
        )
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer) or labels.min(initial=0) < 0:
        raise InputError(
            f"{path}: the labels are {labels.dtype} of shape {labels.shape}, not {len(images)} whole numbers from 0"
        )
    if not len(images):
        raise InputError(f"{path} has no image")
    images = images if images.dtype == np.uint8 else images.astype(np.float32)
    return images, labels.astype(np.int32), tuple(map(str, arrays.get("class_names", ())))
