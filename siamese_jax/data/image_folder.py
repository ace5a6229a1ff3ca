"""A folder of images: DIR/train/CLASS/* with DIR/validation (or val, test), or DIR/CLASS/* with a part held out.

Shapes: H height, W width, C channels.
"""

import hashlib
from pathlib import Path

import numpy as np

from siamese_jax.data.image_set import Broken, ImageSet
from siamese_jax.errors import InputError

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
VALIDATION_FOLDERS = ("validation", "val", "test")


class FolderImages(ImageSet):
    """Image files in the order of their paths; grey ones are [H, W, 1], all others become RGB."""

    def __init__(
        self, name: str, files: list[tuple[Path, int]], class_names: tuple[str, ...], root: Path, on_broken: str
    ):
        super().__init__()
        self.name, self.files, self.class_names, self.on_broken = name, files, class_names, on_broken
        digest = hashlib.blake2b(digest_size=16)
        for path, label in files:
            digest.update(f"{path.relative_to(root).as_posix()}\0{label}\0{path.stat().st_size}\0".encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index):
        path, label = self.files[index]
        return read_image(path), label


def read_image(path: Path) -> np.ndarray:
    """uint8 [H, W, 1 or 3]; Broken where Pillow cannot read it whole."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode.startswith("I"):  # 16 bits, which Pillow would cut at 255
                pixels = np.clip(np.round(np.asarray(image) / 257), 0, 255).astype(np.uint8)
            else:
                pixels = np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise Broken(str(path), " ".join(str(error).split())[:80]) from error
    return pixels[..., None] if pixels.ndim == 2 else pixels


def has_parts(folder: Path) -> bool:
    """Whether training and validation images lie apart."""
    return (folder / "train").is_dir() and _own_part(folder) is not None


def _own_part(folder: Path) -> Path | None:
    return next((folder / name for name in VALIDATION_FOLDERS if (folder / name).is_dir()), None)


def open_folder(folder: Path, fraction: float, on_broken: str, split: str) -> ImageSet:
    """The images of a split; InputError where the folder does not hold classes of images."""
    train = folder / "train"
    root = train if train.is_dir() else folder
    class_names = _classes(root)
    part = next((name for name in class_names if name in VALIDATION_FOLDERS), None)
    if part and root is folder:
        raise InputError(f"{folder} has {part} but no train: name {folder / part}, or put the classes into train")
    if has_parts(folder):
        files = _files(_own_part(folder) if split == "validation" else root, class_names)
    else:
        files = _files(root, class_names)
        if split != "all":
            files = [file for file in files if _is_out(file[0], root, fraction) == (split == "validation")]
    if not files:
        raise InputError(
            f"{folder} has no image for {split}: it needs CLASS/*.png (or {', '.join(ENDINGS[1:])}), more of "
            "them, or another data.validation_fraction"
        )
    return FolderImages(f"{folder} {split}", files, class_names, folder, on_broken)


def _classes(root: Path) -> tuple[str, ...]:
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise InputError(f"{root} has no folders of classes: images lie in {root}/CLASS/*.png")
    return tuple(names)


def _files(root: Path, class_names: tuple[str, ...]) -> list[tuple[Path, int]]:
    """(path, label) of every image, by path; InputError for a class that the training images do not have."""
    unknown = sorted(set(_classes(root)) - set(class_names))
    if unknown:
        raise InputError(f"{root} has the class {unknown[0]!r}, which the training images do not have")
    return [
        (path, label)
        for label, name in enumerate(class_names)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in ENDINGS and path.is_file() and not path.name.startswith(".")
    ]


def _is_out(path: Path, root: Path, fraction: float) -> bool:
    name = path.relative_to(root).as_posix()
    digest = hashlib.blake2b(f"hold out {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64
