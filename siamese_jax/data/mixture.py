"""Several sources by weight: which source an example comes from is computed from its number, as its window is.

In every cycle of examples each source has exactly its share, spread as evenly as whole numbers allow, so that any
stretch of training holds the sources in proportion. Shapes: B rows that are read, S sources.
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from siamese_jax.data.loader import WindowLoader
from siamese_jax.data.store import TokenStore
from siamese_jax.errors import InputError

LONGEST_CYCLE = 100_000  # weights that need a longer one are rounded to it


def parse_weights(text: str, names: Sequence[str]) -> tuple[Fraction, ...]:
    """The shares of the sources, of which the sum is 1; InputError for what is no list of weights for these."""
    words = [word.strip() for word in text.split(",")]
    if len(words) != len(names):
        raise InputError(
            f"data.weights {text!r} are {len(words)}, but data.source names {len(names)} ({', '.join(names)}): "
            "give one weight for each"
        )
    try:
        weights = [Fraction(word) for word in words]
    except (ValueError, ZeroDivisionError) as error:
        raise InputError(f"data.weights is {text!r}: it must be numbers by commas, such as 0.7,0.3") from error
    if min(weights) < 0 or not any(weights):
        raise InputError(f"data.weights is {text!r}: weights must not be negative, nor all of them 0")
    return tuple(weight / sum(weights) for weight in weights)


class Cycle:
    """Which source each example comes from, and which of that source's examples it is."""

    def __init__(self, weights: Sequence[Fraction]):
        length = math.lcm(*(weight.denominator for weight in weights))
        shares = [int(weight * length) for weight in weights]
        if length > LONGEST_CYCLE:
            length, shares = LONGEST_CYCLE, _rounded(weights, LONGEST_CYCLE)
        self.length, self.shares = length, np.array(shares, np.int64)
        # The j-th of m examples of a source falls due at (j + 1/2) / m of the cycle.
        due = np.concatenate([(np.arange(share) + 0.5) / share for share in shares if share])
        order = np.argsort(due, kind="stable")
        self.sources = np.repeat(np.arange(len(shares)), shares)[order]
        self.ranks = np.concatenate([np.arange(share) for share in shares])[order]

    def of(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, number within the source) of examples by number: int64, shape of examples."""
        cycles, places = np.divmod(examples, self.length)
        sources = self.sources[places]
        return sources, cycles * self.shares[sources] + self.ranks[places]

    def counts(self, num_examples: int) -> np.ndarray:
        """Examples of each source among the first so many: int64 [S]."""
        cycles, rest = divmod(num_examples, self.length)
        return cycles * self.shares + np.bincount(self.sources[:rest], minlength=len(self.shares))


def _rounded(weights: Sequence[Fraction], length: int) -> list[int]:
    """Shares of a cycle that come nearest to the weights; no weight above 0 is left without one."""
    shares = [max(1, math.floor(weight * length)) if weight else 0 for weight in weights]
    lacks = sorted(range(len(weights)), key=lambda i: shares[i] - weights[i] * length)
    for i in lacks[: max(0, length - sum(shares))]:
        shares[i] += 1
    while sum(shares) > length:
        shares[max(range(len(shares)), key=shares.__getitem__)] -= 1
    return shares


class MixtureLoader:
    """Training batches of several stores; the interface and the promises of `WindowLoader`.

    stores: name -> store. Every source goes through its own windows, in an order of its own in each of its epochs.
    """

    def __init__(
        self,
        stores: Mapping[str, TokenStore],
        weights: Sequence[Fraction],
        length: int,
        batch_size: int,
        *,
        seed: int = 0,
        cross_documents: bool = True,
        rows: np.ndarray | None = None,
    ):
        make = functools.partial(
            WindowLoader,
            length=length,
            batch_size=batch_size,
            seed=seed,
            cross_documents=cross_documents,
            rows=rows,
        )
        self.loaders = [make(store, stream=(number,)) for number, store in enumerate(stores.values(), start=1)]
        self.rows, self.batch_size, self.length = self.loaders[0].rows, batch_size, length
        self.names, self.cycle = list(stores), Cycle(weights)

    @property
    def fingerprint(self) -> str:
        """Of the stores and their shares."""
        digest = hashlib.sha256()
        for loader, share in zip(self.loaders, self.cycle.shares.tolist(), strict=True):
            digest.update(f"{share} {loader.store.fingerprint}\n".encode())
        return digest.hexdigest()

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """As `WindowLoader.batch`."""
        sources, numbers = self.cycle.of(step * self.batch_size + self.rows)
        batch = {}
        for source in np.unique(sources):
            here = sources == source
            for name, values in self.loaders[source].read(numbers[here]).items():
                whole = batch.setdefault(name, np.empty((len(self.rows), *values.shape[1:]), values.dtype))
                whole[here] = values
        return batch

    def tokens_by_source(self, steps: int) -> dict[str, int]:
        """{name: tokens} of the first so many batches, over all processes."""
        counts = self.cycle.counts(steps * self.batch_size) * self.length
        return dict(zip(self.names, counts.tolist(), strict=True))
