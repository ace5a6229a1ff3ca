"""The pictures of an evaluation: what stands in them, where, and what is said of wrong input."""

import os

import numpy as np
import pytest
from matplotlib import image as image_files
from matplotlib.figure import Figure

from siamese_jax.errors import FaultError, InputError
from siamese_jax.evaluation import pictures
from siamese_jax.evaluation.pictures import GAP, confusion_matrix, sample_grid

random = np.random.default_rng(0)
COUNTS = np.array([[8, 2, 0], [1, 3, 0], [0, 0, 0]])
NAMES = ["cat", "dog $x$", "emu"]


def images(count, channels, side=28):
    return random.integers(0, 256, (count, side, side, channels), np.uint8)


def read(path):
    return np.rint(image_files.imread(path)[..., :3] * 255).astype(int)


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    seen, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (seen.append(self), save(self, *a, **k))[1])
    return seen


def places_of(image, picture):
    """Corners at which the image stands in the picture, pixel by pixel."""
    height, width = image.shape[:2]
    windows = np.lib.stride_tricks.sliding_window_view(picture[..., 0], (height, width))
    rough = np.argwhere(
        (windows[..., :: height // 4, :: width // 4] == image[:: height // 4, :: width // 4, 0]).all((2, 3))
    )
    return [(r, c) for r, c in rough.tolist() if np.array_equal(picture[r : r + height, c : c + width], image)]


@pytest.mark.parametrize("channels", [1, 3])
def test_grid_shows_every_pixel_in_its_row(tmp_path, channels):
    rows = {"cat": images(3, channels), "dog": images(2, channels)}
    sample_grid(tmp_path / "grid.png", rows, "samples")
    picture, corners = read(tmp_path / "grid.png"), []
    for name in rows:
        for image in rows[name]:
            shown = np.broadcast_to(image.repeat(3, axis=0).repeat(3, axis=1), (84, 84, 3))
            corners += places_of(shown, picture)
    top, left = corners[0]
    pitch = 84 + GAP
    assert corners == [(top + pitch * r, left + pitch * c) for r, c in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]]
    assert os.listdir(tmp_path) == ["grid.png"]


def test_grid_names_its_rows_without_ticks(tmp_path, figures):
    sample_grid(tmp_path / "grid.png", {"a$b$": images(2, 1, 64), "none": images(0, 1, 64)}, "200 steps")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a$b$", "none"]
    assert len(axes.get_xticks()) == 0 and axes.get_title(loc="left") == "200 steps"


WRONG_IMAGES = {
    "none": ({}, "0 classes with no image"),
    "empty": ({"cat": images(0, 1)}, "1 classes with no image"),
    "float": ({"cat": images(2, 1) / 255}, "'cat' are float64"),
    "channels": ({"cat": images(2, 2)}, r"\[2, 28, 28, 2\]: give uint8 \[N, H, W, 1 or 3\]"),
    "sizes": ({"cat": images(2, 1), "dog": images(2, 1, 32)}, r"'dog' are \[32, 32, 1\] and those of 'cat'"),
    "large": ({str(i): images(1, 1, 2) for i in range(600)}, "show fewer classes"),
}


@pytest.mark.parametrize("rows, words", WRONG_IMAGES.values(), ids=WRONG_IMAGES)
def test_wrong_images_are_told_in_one_line(tmp_path, rows, words):
    with pytest.raises(InputError, match=words) as error:
        sample_grid(tmp_path / "grid.png", rows, "samples")
    assert "\n" not in str(error.value) and not os.listdir(tmp_path)


def test_matrix_says_what_it_shows(tmp_path, figures):
    confusion_matrix(tmp_path / "matrix.png", COUNTS, NAMES, "DeiT-Ti")
    axes, bar = figures[0].axes
    assert axes.get_title() == "DeiT-Ti\naccuracy 78.57 % (11 of 14 examples)"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    assert bar.get_ylabel() == "share of the true class, %"
    assert [label.get_text() for label in axes.get_yticklabels()] == NAMES
    assert [label.get_text() for label in axes.get_xticklabels()] == NAMES
    shares = {text.get_position()[::-1]: text.get_text() for text in axes.texts}
    assert shares == {(0, 0): "80.0", (0, 1): "20.0", (1, 0): "25.0", (1, 1): "75.0"}
    shown = axes.images[0].get_array()
    np.testing.assert_allclose(shown[:2], [[80, 20, 0], [25, 75, 0]])
    assert np.ma.getmaskarray(shown)[2].all() and axes.images[0].get_clim() == (0, 100)
    assert os.listdir(tmp_path) == ["matrix.png"] and read(tmp_path / "matrix.png").min() < 100


@pytest.mark.parametrize("classes, cells, names", [(20, 20, 20), (21, 0, 21), (101, 0, None)])
def test_matrix_of_many_classes_says_less(tmp_path, figures, classes, cells, names):
    confusion_matrix(tmp_path / "matrix.png", np.eye(classes, dtype=int), [f"c{i}" for i in range(classes)], "many")
    axes = figures[0].axes[0]
    assert len(axes.texts) == cells
    if names:
        assert len(axes.get_xticklabels()) == names and axes.get_xlabel() == "predicted class"
    else:
        assert axes.get_xlabel() == "predicted class, number"


def overlaps(figure):
    """Pairs of texts whose boxes meet."""
    figure.draw_without_rendering()  # places the names of the axes
    renderer, axes = figure.canvas.get_renderer(), figure.axes[0]
    texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in [*texts, *axes.texts]]
    return [(a, b) for i, (a, one) in enumerate(boxes) for b, two in boxes[:i] if one.overlaps(two)]


@pytest.mark.parametrize("classes", [2, 20, 100])
def test_nothing_lies_over_anything(tmp_path, figures, classes):
    counts = random.integers(1, 9, (classes, classes))
    confusion_matrix(tmp_path / "matrix.png", counts, [f"a rather long name {i}" for i in range(classes)], "title")
    assert not overlaps(figures[0])


WRONG_COUNTS = {
    "square": (np.ones((2, 3), int), NAMES[:2], r"shape \[2, 3\]"),
    "names": (COUNTS, NAMES[:2], "2 class names for 3 classes"),
    "negative": (-COUNTS, NAMES, "from -8"),
    "shares": (COUNTS / 14, NAMES, "is float64"),
    "zero": (0 * COUNTS, NAMES, "0 examples"),
}


@pytest.mark.parametrize("counts, names, words", WRONG_COUNTS.values(), ids=WRONG_COUNTS)
def test_wrong_counts_are_told_in_one_line(tmp_path, counts, names, words):
    with pytest.raises(InputError, match=words) as error:
        confusion_matrix(tmp_path / "matrix.png", counts, names, "t")
    assert "\n" not in str(error.value) and not os.listdir(tmp_path)


def test_a_picture_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "matrix.png"
    confusion_matrix(path, COUNTS, NAMES, "before")
    before = path.read_bytes()

    def full(figure, file, **options):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(FaultError, match="No space left"):
        confusion_matrix(path, COUNTS, NAMES, "after")
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["matrix.png"]


def test_importing_the_module_does_not_import_matplotlib():
    assert not any(hasattr(pictures, name) for name in ("matplotlib", "pyplot", "Figure"))
