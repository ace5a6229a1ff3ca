"""The Fréchet distance between two sets of features, as in FID: of the Gaussians with their means and covariances.

Heusel et al. 2017 (arXiv 1706.08500). Legend: N examples, F features.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple

import numpy as np

from siamese_jax.errors import FaultError, InputError
from siamese_jax.npz import read_npz

NAMES = (("mu", "sigma"), ("mean", "covariance"))  # of the arrays in a file, the usual ones first


class Statistics(NamedTuple):
    """Mean [F] and unbiased covariance [F, F] of features, float64; count of examples, None where not known."""

    mean_F: np.ndarray
    covariance_FF: np.ndarray
    count: int | None = None


def statistics_of(features_iter: Iterable[np.ndarray]) -> Statistics:
    """Statistics of batches of features [N, F], of which one at a time is held.

    The sums are updated as by Chan et al. 1979: stable where the mean is large beside the spread. Raises InputError
    for batches that differ in F, features that are not finite, or fewer than 2 examples in all.
    """
    count, mean, scatter = 0, None, None
    for batch in features_iter:
        features = _checked(np.asarray(batch, np.float64), mean)
        if not len(features):
            continue
        if mean is None:
            mean, scatter = np.zeros(features.shape[1]), np.zeros((features.shape[1],) * 2)
        shift = features.mean(axis=0) - mean
        centred = features - features.mean(axis=0)
        total = count + len(features)
        scatter += centred.T @ centred + np.outer(shift, shift) * (count * len(features) / total)
        mean = mean + shift * (len(features) / total)
        count = total
    if count < 2:
        raise InputError(f"{count} examples have no covariance: give the features of 2 or more")
    return Statistics(mean, scatter / (count - 1), count)


def _checked(features: np.ndarray, mean: np.ndarray | None) -> np.ndarray:
    if features.ndim != 2:
        raise InputError(f"features have shape {list(features.shape)}: give them as [examples, features]")
    if mean is not None and features.shape[1] != len(mean):
        raise InputError(
            f"a batch has {features.shape[1]} features and those before it {len(mean)}: take all from one network"
        )
    if not np.isfinite(features).all():
        bad = int((~np.isfinite(features)).any(axis=1).sum())
        raise InputError(f"{bad} of {len(features)} examples have features that are not finite: leave them out")
    return features


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """|mean_a - mean_b|^2 + Tr(Sa + Sb - 2 (Sa Sb)^(1/2)), never negative; in squared units of the features.

    Raises InputError where F differs, a value is not finite, or a side comes from fewer than 2 examples.
    """
    for name, side in (("first", a), ("second", b)):
        _check_statistics(side, f"the {name} statistics")
    if len(a.mean_F) != len(b.mean_F):
        raise InputError(
            f"the first statistics are of {len(a.mean_F)} features and the second of {len(b.mean_F)}: "
            "take both from one network"
        )
    # The eigenvalues of Sa Sb are those of the symmetric Sa^(1/2) Sb Sa^(1/2), which are the squares of these
    # singular values: their rounding errors would be drawn to the square root there, and are not here.
    roots = np.linalg.svd(_square_root(b.covariance_FF) @ _square_root(a.covariance_FF), compute_uv=False)
    spread = np.trace(a.covariance_FF) + np.trace(b.covariance_FF) - 2 * roots.sum()
    return max(0.0, float(np.sum(np.square(a.mean_F - b.mean_F)) + spread))


def _square_root(covariance_FF: np.ndarray) -> np.ndarray:
    """The symmetric one."""
    values, vectors = np.linalg.eigh(covariance_FF)
    # Zero eigenvalues, of fewer examples than features, come out negative by rounding.
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def _check_statistics(statistics: Statistics, name: str) -> None:
    mean, covariance, count = statistics
    if np.ndim(mean) != 1 or np.shape(covariance) != (len(mean),) * 2:
        raise InputError(
            f"{name} have a mean of shape {list(np.shape(mean))} and a covariance of shape "
            f"{list(np.shape(covariance))}: they must be [F] and [F, F]"
        )
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise InputError(f"{name} of {len(mean)} features have values that are not finite: make them anew")
    if count is not None and count < 2:
        raise InputError(f"{name} come from {count} examples, which have no covariance: give 2 or more")


def read_statistics(path: str | os.PathLike) -> Statistics:
    """Statistics in a .npz file with arrays mu and sigma, or mean and covariance; with count where it has one.

    Raises InputError where the file is missing, is not .npz, or does not hold what it must.
    """
    arrays = read_npz(path, "file of statistics")
    for names in NAMES:
        if set(names) <= set(arrays):
            break
    else:
        raise InputError(
            f"{path} holds {', '.join(list(arrays)[:8]) or 'nothing'}: "
            "it needs mu and sigma, or mean and covariance"
        )
    try:
        mean, covariance = (np.asarray(arrays[name], np.float64) for name in names)
        statistics = Statistics(mean, covariance, int(arrays["count"]) if "count" in arrays else None)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} has {names[0]}, {names[1]} or count that are no real numbers") from error
    _check_statistics(statistics, f"the statistics in {path}")
    return statistics


def write_statistics(path: str | os.PathLike, stats: Statistics) -> None:
    """Writes a .npz file of mu, sigma and count (left out where not known), whole or not at all.

    Raises InputError as `frechet_distance` does, FaultError where the disk does not take the file.
    """
    _check_statistics(stats, "the statistics to be written")
    count = {} if stats.count is None else {"count": np.int64(stats.count)}
    with whole_file(path) as file:
        np.savez(file, mu=stats.mean_F, sigma=stats.covariance_FF, **count)


def check_output(name: str, path: str) -> None:
    """InputError where an option names a file that cannot be written: before what it is to hold is computed."""
    folder = pathlib.Path(path).absolute().parent
    if not folder.is_dir() or pathlib.Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{name} is {path}: it must name a file in a folder that exists and can be written to")


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """A file to write bytes to, which takes its place only when all is written; FaultError where it cannot."""
    path = pathlib.Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            yield file
        beside.replace(path)
    except OSError as error:
        raise FaultError(f"cannot write {path}: {error.strerror}: free space or choose another folder") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
