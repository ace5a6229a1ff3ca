"""PNG pictures of an evaluation: samples of every class, and the confusion matrix of a classifier.

Legend: N images, H height, W width, C channels, and in the matrix C classes.
"""

import os
from collections.abc import Sequence

import numpy as np

from siamese_jax.errors import InputError
from siamese_jax.evaluation.frechet import whole_file

MIN_IMAGE = 64  # pixels of a side in the picture: smaller images are shown enlarged by a whole factor
GAP = 4  # white pixels between images
MAX_SIDE = 32_000  # pixels of a picture; the renderer ends at 65,536
DOTS_PER_INCH = 100
MATRIX_DOTS_PER_INCH = 150  # the names of many classes are small
MAX_CLASSES_WITH_SHARES = 20
MAX_CLASSES_WITH_NAMES = 100


def sample_grid(path: str | os.PathLike, images_by_class: dict[str, np.ndarray], title: str) -> None:
    """Writes a picture with a row of images for each class, named at its left; whole or not at all.

    images_by_class: uint8 [N, H, W, C] each, C = 1 (grey) or 3 (red, green, blue), in the order of the rows.
    Raises InputError for other arrays, images of several sizes or more than a picture holds; FaultError where the
    disk does not take the picture.
    """
    _check_images(images_by_class)
    mosaic, centres = _mosaic(list(images_by_class.values()))
    height, width = mosaic.shape[:2]
    figure = _figure(width / DOTS_PER_INCH, height / DOTS_PER_INCH, DOTS_PER_INCH)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(mosaic, interpolation="none", aspect="auto")
    axes.set_xticks([])
    axes.set_yticks(centres, images_by_class, fontsize=10, parse_math=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(title, fontsize=11, loc="left", parse_math=False)
    _save(figure, path)


def _check_images(images_by_class: dict[str, np.ndarray]) -> None:
    if not images_by_class or not any(len(images) for images in images_by_class.values()):
        raise InputError(f"{len(images_by_class)} classes with no image: give at least one to make a picture of")
    first, shape = next((name, images.shape[1:]) for name, images in images_by_class.items())
    for name, images in images_by_class.items():
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
            raise InputError(
                f"images of {name!r} are {images.dtype} {list(images.shape)}: give uint8 [N, H, W, 1 or 3]"
            )
        if images.shape[1:] != shape:
            raise InputError(
                f"images of {name!r} are {list(images.shape[1:])} and those of {first!r} {list(shape)}: "
                "make them one size"
            )


def check_grid(rows: int, columns: int, side: int) -> None:
    """InputError where a picture of so many square images, `side` pixels each, would be too large."""
    _layout(rows, columns, side, side)


def _layout(rows: int, columns: int, height: int, width: int) -> tuple[int, tuple[int, int]]:
    """(factor by which images are enlarged, height and width of the picture)."""
    factor = max(1, -(-MIN_IMAGE // max(height, width)))
    size = rows * (height * factor + GAP) - GAP, columns * (width * factor + GAP) - GAP
    if max(size) > MAX_SIDE:
        raise InputError(
            f"a picture of {size[0]} by {size[1]} pixels is over {MAX_SIDE} a side: show fewer classes or images"
        )
    return factor, size


def _mosaic(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(the picture uint8 [H, W, 3], the middle of every row in pixels)."""
    _, height, width, _ = rows[0].shape
    factor, size = _layout(len(rows), max(map(len, rows)), height, width)
    down, right = height * factor + GAP, width * factor + GAP
    mosaic = np.full((*size, 3), 255, np.uint8)
    for row, images in enumerate(rows):
        for column, image in enumerate(images):
            enlarged = image.repeat(factor, axis=0).repeat(factor, axis=1)
            mosaic[row * down :, column * right :][: height * factor, : width * factor] = enlarged
    return mosaic, np.arange(len(rows)) * down + (down - GAP - 1) / 2


def confusion_matrix(
    path: str | os.PathLike, counts_CC: np.ndarray, class_names: Sequence[str], title: str
) -> None:
    """Writes a picture of the shares in which each true class (row) was predicted as each (column).

    counts_CC: examples, whole numbers of 0 or more. A class without examples is a grey row; up to 20 classes have
    the share in per cent in every cell that is not empty; over 100 classes are numbered, not named. The file is
    written whole or not at all. Raises InputError for other counts or a wrong number of names, FaultError where
    the disk does not take the picture.
    """
    counts = np.asarray(counts_CC)
    _check_counts(counts, class_names)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(100.0 * counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
    side = float(np.clip(0.42 * len(counts), 2.6, 15))  # inches
    figure = _figure(side, side, MATRIX_DOTS_PER_INCH)
    axes = figure.add_axes((0, 0, 1, 1))
    colours = axes.imshow(shares, cmap=_colours(), vmin=0, vmax=100, interpolation="none")
    _label_classes(axes, class_names)
    if len(counts) <= MAX_CLASSES_WITH_SHARES:
        _write_shares(axes, shares)
    correct, total = int(np.trace(counts)), int(counts.sum())
    accuracy = f"accuracy {100 * correct / total:.2f} % ({correct:,} of {total:,} examples)"
    axes.set_title(f"{title}\n{accuracy}", fontsize=11, parse_math=False)
    bar = figure.colorbar(colours, cax=figure.add_axes((1 + 0.15 / side, 0, 0.15 / side, 1)))
    bar.set_label("share of the true class, %")
    _save(figure, path)


def _check_counts(counts: np.ndarray, class_names: Sequence[str]) -> None:
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
        raise InputError(f"the confusion matrix has shape {list(counts.shape)}: give it as [classes, classes]")
    if len(class_names) != len(counts):
        raise InputError(f"{len(class_names)} class names for {len(counts)} classes: give one for each")
    if not np.issubdtype(counts.dtype, np.integer) or counts.min(initial=0) < 0:
        raise InputError(
            f"the confusion matrix is {counts.dtype} from {counts.min(initial=0)}: give whole numbers of 0 or more"
        )
    if not counts.sum():
        raise InputError("the confusion matrix counts 0 examples: evaluate at least 1")


def _colours():
    import matplotlib

    return matplotlib.colormaps["Blues"].with_extremes(bad="0.85")


def _label_classes(axes, class_names: Sequence[str]) -> None:
    numbered = ", number" if len(class_names) > MAX_CLASSES_WITH_NAMES else ""
    axes.set_xlabel(f"predicted class{numbered}")
    axes.set_ylabel(f"true class{numbered}")
    if numbered:
        return
    size = float(np.clip(260 / len(class_names), 5, 9))
    places = range(len(class_names))
    axes.set_yticks(places, class_names, fontsize=size, parse_math=False)
    axes.set_xticks(places, class_names, fontsize=size, rotation=90, parse_math=False)


def _write_shares(axes, shares_CC: np.ndarray) -> None:
    for (row, column), share in np.ndenumerate(shares_CC):
        if share > 0:  # neither an empty cell nor a class without examples
            colour = "white" if share > 50 else "black"
            axes.text(column, row, f"{share:.1f}", ha="center", va="center", fontsize=7, color=colour)


def _figure(width: float, height: float, dots_per_inch: int):
    """A figure, in inches, that is drawn without a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=dots_per_inch, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _save(figure, path: str | os.PathLike) -> None:
    """Writes the PNG, with room for what stands outside the axes."""
    with whole_file(path) as file:
        figure.savefig(file, format="png", bbox_inches="tight", pad_inches=0.1)
