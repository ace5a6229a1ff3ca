"""Labelled images, or stored latents, with random access: where they come from and which part is held out.

Shapes: N images, H height, W width, C channels.
"""

import functools
import gzip
import importlib.util
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from siamese_jax.data.image_set import ArrayImages, ImageSet, part_of
from siamese_jax.errors import InputError
from siamese_jax.npz import read_npz

SPLITS = ("train", "validation")
ALL = "all"  # of a source without parts of its own
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package
FASHION_CLASSES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
_IDX_FILES = {"train": "train", "validation": "t10k"}
_MOST_CLASSES = 1_000_000  # a larger label is none, and would be given as many names
_DIGITS_EACH = 5  # every fifth digit is held out
SOURCES = "quickstart, fashion_mnist, digits, tfds:NAME, a folder of images or a .npz file"


def open_images(
    source: str, split: str, *, data_dir: str = "", validation_fraction: float = 0.1, on_broken: str = "stop"
) -> ImageSet:
    """The images of a split: 'train', 'validation' (the test part where a set has one), or 'all' of a source that
    has no parts of its own; '' = its own validation part, or else all.

    source: 'fashion_mnist' (Debian's package, or its four files in data_dir), 'digits' (scikit-learn),
    'quickstart' (the first of the two that is there), 'tfds:NAME' or a prepared TFDS folder, a folder of images by
    class, or a .npz file ('A.npz,B.npz': training, validation). on_broken: 'stop' or 'skip', see `ImageSet`.
    Raises InputError for what cannot be found or read.
    """
    if split not in (*SPLITS, ALL, ""):
        raise InputError(f"unknown split {split!r}: use one of {', '.join(SPLITS)}, {ALL}")
    if not source:
        raise InputError(f"data.source is empty: name {SOURCES}")
    if source == "quickstart":
        folder = Path(data_dir or FASHION_MNIST)
        source = "fashion_mnist" if (folder / _idx_name("train", "images", 3)).exists() else "digits"
    has_parts, open_part = _opener(source, data_dir, validation_fraction, on_broken)
    if split == ALL and has_parts:
        raise InputError(f"{source} has parts of its own: say train or validation, not {ALL}")
    split = split or ("validation" if has_parts else ALL)
    images = open_part(split)
    images.split = split
    return images


def _opener(source: str, data_dir: str, fraction: float, on_broken: str) -> tuple[bool, Callable[[str], ImageSet]]:
    """(whether the source has parts of its own, split -> its images)."""
    if source == "fashion_mnist":
        return True, functools.partial(_fashion_mnist, Path(data_dir or FASHION_MNIST))
    if source == "digits":
        return True, _digits
    if source.startswith("tfds:") or (Path(source) / "dataset_info.json").exists():
        from siamese_jax.data.tfds_images import find_tfds

        return find_tfds(source, data_dir, fraction, on_broken)
    if source.endswith(".npz"):
        return "," in source, functools.partial(_npz, source, fraction)
    if Path(source).is_dir():
        from siamese_jax.data.image_folder import has_parts, open_folder

        folder = Path(source)
        return has_parts(folder), functools.partial(open_folder, folder, fraction, on_broken)
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


def _npz(source: str, fraction: float, split: str) -> ImageSet:
    paths = [Path(part.strip()) for part in source.split(",")]
    if len(paths) > 2:
        raise InputError(
            f"data.source names {len(paths)} .npz files: one, or one for training and one for validation"
        )
    own = SPLITS.index(split) if len(paths) == 2 else 0
    images, labels, names = _read_npz(paths[own])
    highest = int(labels.max())
    if len(paths) == 2:
        other = read_npz(paths[1 - own], "data.source", only={"labels", "class_names"})
        highest = max(highest, int(_labels_of(other, paths[1 - own]).max(initial=0)))
        theirs = _names_of(other, paths[1 - own])
        if names and theirs and names != theirs:
            raise InputError(
                f"{paths[0]} and {paths[1]} have different class_names: name the same in the same order"
            )
        names = names or theirs
    else:
        chosen = part_of(np.arange(len(images)), split, fraction)
        images, labels = images[chosen], labels[chosen]
        if not len(images):
            raise InputError(
                f"{paths[0]} leaves no image for {split} with data.validation_fraction {fraction}: use more images "
                "or another fraction"
            )
    if names and highest >= len(names):
        raise InputError(f"{source} has the label {highest}, beyond its {len(names)} class_names")
    return ArrayImages(f"{paths[own]} {split}", images, labels, names or tuple(map(str, range(highest + 1))))


def _labels_of(arrays: dict[str, np.ndarray], path: Path) -> np.ndarray:
    labels = arrays.get("labels")
    if labels is None:
        raise InputError(f"{path} has {', '.join(arrays) or 'nothing'}: it needs images or latents, and labels")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or labels.min(initial=0) < 0:
        raise InputError(f"{path}: the labels are {labels.dtype} of shape {labels.shape}, not whole numbers from 0")
    if labels.max(initial=0) >= _MOST_CLASSES:
        raise InputError(
            f"{path} has the label {labels.max()}: labels are numbers of classes, below {_MOST_CLASSES}"
        )
    return labels.astype(np.int32)


def _names_of(arrays: dict[str, np.ndarray], path: Path) -> tuple[str, ...]:
    names = arrays.get("class_names", np.array([], str))
    if names.ndim != 1 or len(set(names.tolist())) < len(names):
        raise InputError(f"{path}: class_names of shape {names.shape} are not a different name for each class")
    return tuple(map(str, names))


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """(images or latents [N, H, W, C], labels int32 [N], names of the classes)."""
    arrays = read_npz(path, "data.source")
    kind = "latents" if "latents" in arrays else "images"
    images = arrays.get(kind)
    if images is None:
        raise InputError(f"{path} has {', '.join(arrays) or 'nothing'}: it needs images or latents, and labels")
    labels = _labels_of(arrays, path)
    fits = np.issubdtype(images.dtype, np.floating) if kind == "latents" else images.dtype == np.uint8
    if images.ndim != 4 or not fits:
        wanted = "floating" if kind == "latents" else "uint8 from 0 to 255 (floating ones are named latents)"
        raise InputError(f"{path}: {kind} are {images.dtype} of shape {images.shape}, not (N, H, W, C) {wanted}")
    if labels.shape != images.shape[:1]:
        raise InputError(f"{path}: there are {len(labels)} labels for {len(images)} {kind}")
    if not len(images):
        raise InputError(f"{path} has no image")
    images = images if kind == "images" else images.astype(np.float32, copy=False)
    return images, labels, _names_of(arrays, path)
