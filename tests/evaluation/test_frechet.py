"""The Fréchet distance against closed forms, its streamed statistics, and its files."""

import os

import numpy as np
import pytest

from siamese_jax.errors import FaultError, InputError
from siamese_jax.evaluation.frechet import (
    Statistics,
    frechet_distance,
    read_statistics,
    statistics_of,
    write_statistics,
)

random = np.random.default_rng(0)
FEATURES = random.normal(size=(40, 6)) @ random.normal(size=(6, 6)) + 3


def of(mean, covariance, count=10):
    return Statistics(np.array(mean, float), np.array(covariance, float), count)


@pytest.mark.parametrize("sizes", [(40,), (1, 39), (7, 0, 13, 20), (1,) * 40])
def test_streamed_is_whole(sizes):
    parts = np.split(FEATURES, np.cumsum(sizes)[:-1])
    statistics = statistics_of(iter(parts))
    np.testing.assert_allclose(statistics.mean_F, FEATURES.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(statistics.covariance_FF, np.cov(FEATURES, rowvar=False, ddof=1), rtol=1e-12)
    assert statistics.count == 40


def test_statistics_stay_exact_far_from_zero_and_from_float32():
    far = statistics_of([FEATURES[:11] + 1e7, FEATURES[11:] + 1e7])
    np.testing.assert_allclose(far.covariance_FF, np.cov(FEATURES, rowvar=False), rtol=1e-6)
    narrow = statistics_of([FEATURES.astype(np.float32)])
    assert narrow.mean_F.dtype == narrow.covariance_FF.dtype == np.float64


def test_statistics_by_hand():
    statistics = statistics_of([np.array([[1, 0]]), np.array([[3, 4]])])
    np.testing.assert_array_equal(statistics.mean_F, [2, 2])
    np.testing.assert_array_equal(statistics.covariance_FF, [[2, 4], [4, 8]])


def test_distance_of_diagonal_covariances():
    a, b = of([1, 2, 3], np.diag([4, 1, 9])), of([1, 0, 4], np.diag([1, 25, 9]))
    # |mean|^2 = 4 + 1, and (sqrt a - sqrt b)^2 = 1 + 16 + 0.
    np.testing.assert_allclose(frechet_distance(a, b), 22, rtol=1e-13)


def test_distance_of_one_feature():
    np.testing.assert_allclose(frechet_distance(of([0], [[4]]), of([3], [[1]])), 9 + 1, rtol=1e-13)


def test_distance_of_covariances_that_do_not_commute():
    a, b = np.array([[2.0, 1], [1, 3]]), np.array([[5.0, -2], [-2, 1]])
    # Of 2 by 2 matrices, Tr (A B)^(1/2) = sqrt(Tr A B + 2 sqrt(det A det B)).
    root = np.sqrt(np.trace(a @ b) + 2 * np.sqrt(np.linalg.det(a) * np.linalg.det(b)))
    expected = np.trace(a) + np.trace(b) - 2 * root
    np.testing.assert_allclose(frechet_distance(of([0, 0], a), of([0, 0], b)), expected, rtol=1e-12)


def test_distance_of_covariances_without_full_rank():
    along = np.diag([9.0, 0, 0])
    np.testing.assert_allclose(
        frechet_distance(of([0] * 3, along), of([0] * 3, np.diag([0, 4.0, 0]))), 13, rtol=1e-7
    )
    # Rank one each: Tr (u u' v v')^(1/2) = |u' v|.
    u, v = np.array([1.0, 2, 2]), np.array([3.0, 0, 4])
    distance = frechet_distance(of([0] * 3, np.outer(u, u)), of([0] * 3, np.outer(v, v)))
    np.testing.assert_allclose(distance, 9 + 25 - 2 * 11, rtol=1e-6)
    few = statistics_of([random.normal(size=(5, 64))])
    assert 0 <= frechet_distance(few, few) < 1e-10


def test_distance_is_zero_for_equals_symmetric_and_blind_to_rotation():
    a, b = statistics_of([FEATURES]), statistics_of([FEATURES[:20] * 1.5 + 1])
    assert 0 <= frechet_distance(a, a) < 1e-10
    np.testing.assert_allclose(frechet_distance(a, b), frechet_distance(b, a), rtol=1e-12)
    turn = np.linalg.qr(random.normal(size=(6, 6)))[0]
    turned = [Statistics(turn @ s.mean_F, turn @ s.covariance_FF @ turn.T, s.count) for s in (a, b)]
    np.testing.assert_allclose(frechet_distance(*turned), frechet_distance(a, b), rtol=1e-11)


def test_file_keeps_the_statistics(tmp_path):
    statistics = statistics_of([FEATURES])
    write_statistics(tmp_path / "a.npz", statistics)
    read = read_statistics(tmp_path / "a.npz")
    for kept, given in zip(read, statistics, strict=True):
        np.testing.assert_array_equal(kept, given)
    assert os.listdir(tmp_path) == ["a.npz"]
    with np.load(tmp_path / "a.npz") as file:
        assert sorted(file.files) == ["count", "mu", "sigma"]


@pytest.mark.parametrize("names", [("mu", "sigma"), ("mean", "covariance")])
def test_files_of_others_are_read(tmp_path, names):
    arrays = dict(zip(names, (np.zeros(3, np.float32), np.eye(3, dtype=np.float32)), strict=True))
    np.savez(tmp_path / "b.npz", **arrays)
    read = read_statistics(str(tmp_path / "b.npz"))
    assert read.count is None and read.covariance_FF.dtype == np.float64
    assert frechet_distance(read, of([0] * 3, np.eye(3))) < 1e-12


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    write_statistics(path, statistics_of([FEATURES]))
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(FaultError, match="No space left"):
        write_statistics(path, statistics_of([FEATURES + 1]))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.npz"]


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FaultError, match="choose another folder"):
        write_statistics(tmp_path / "none" / "a.npz", statistics_of([FEATURES]))


def saved(path, **arrays):
    np.savez(path, **arrays)
    return path


WRONG_FILES = {
    "missing": (lambda path: path, "is not there"),
    "text": (lambda path: path.write_text("mu") and path, "cannot be read as a file of statistics"),
    "cut": (lambda path: path.write_bytes(b"PK\x03\x04 cut") and path, "not a zip file"),
    "array": (lambda path: np.save(path.open("wb"), np.eye(2)) or path, "one array"),
    "names": (lambda path: saved(path, mu=np.zeros(2), s=np.eye(2)), "holds mu, s: it needs mu and sigma"),
    "shapes": (lambda path: saved(path, mu=np.zeros(2), sigma=np.eye(3)), r"shape \[2\].*\[3, 3\]"),
    "nan": (lambda path: saved(path, mu=np.zeros(2), sigma=np.full((2, 2), np.nan)), "not finite"),
    "words": (lambda path: saved(path, mu=np.array(["a"]), sigma=np.eye(1)), "no real numbers"),
    "few": (lambda path: saved(path, mu=np.zeros(2), sigma=np.eye(2), count=1), "1 examples"),
}


@pytest.mark.parametrize("make, words", WRONG_FILES.values(), ids=WRONG_FILES)
def test_wrong_files_are_told_in_one_line(tmp_path, make, words):
    with pytest.raises(InputError, match=words) as error:
        read_statistics(make(tmp_path / "c.npz"))
    assert "\n" not in str(error.value)


WRONG_FEATURES = {
    "none": ([], "0 examples"),
    "one": ([FEATURES[:1]], "1 examples"),
    "flat": ([FEATURES[0]], r"shape \[6\]"),
    "widths": ([FEATURES, FEATURES[:, :4]], "4 features and those before it 6"),
    "nan": ([np.where(np.arange(40)[:, None] < 2, np.nan, FEATURES)], "2 of 40 examples"),
}


@pytest.mark.parametrize("batches, words", WRONG_FEATURES.values(), ids=WRONG_FEATURES)
def test_wrong_features_are_told_in_one_line(batches, words):
    with pytest.raises(InputError, match=words):
        statistics_of(batches)


def test_sides_that_differ_are_told():
    with pytest.raises(InputError, match="of 2 features and the second of 3"):
        frechet_distance(of([0] * 2, np.eye(2)), of([0] * 3, np.eye(3)))
    with pytest.raises(InputError, match="the second statistics come from 1 examples"):
        frechet_distance(of([0] * 2, np.eye(2)), of([0] * 2, np.eye(2), count=1))
    with pytest.raises(InputError, match="the first statistics of 2 features have values that are not finite"):
        frechet_distance(of([0, np.inf], np.eye(2)), of([0] * 2, np.eye(2)))
