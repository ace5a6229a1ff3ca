"""Batches of windows over a token store, each a pure function of (seed, step), and the evaluation pass.

Shapes: B rows that are read, L window length. Window w has the targets tokens[w*L : (w+1)*L] and as inputs
the tokens one earlier; in front of the very first token stands an end of text. So every token is a target
exactly once.
"""

import itertools
import math
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from siamese_jax.data.order import permute
from siamese_jax.data.store import TokenStore
from siamese_jax.errors import InputError


class WindowLoader:
    """Training batches: whole windows, in an order that is new in every epoch and fixed by the seed.

    Example number n = step * batch_size + row is window permute(n % num_windows) of epoch n // num_windows.
    rows: those of the batch that are read, int64 [B], all unless given: a process reads what its devices hold.
    cross_documents: whether a token may see the documents before its own; False adds what masks them.
    stream: more numbers that the order depends on, to tell several loaders of a seed apart. Raises InputError for a
    store shorter than one window.
    """

    def __init__(
        self,
        store: TokenStore,
        length: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        cross_documents: bool = True,
        rows: np.ndarray | None = None,
        stream: tuple[int, ...] = (),
    ):
        _check_batch_size(batch_size)
        self.rows = np.arange(batch_size, dtype=np.int64) if rows is None else rows
        _check_length(length)
        if store.num_tokens < length:
            raise InputError(
                f"the corpus {store.path} has {store.num_tokens} tokens, fewer than one window "
                f"of {length}: use more text or a shorter length"
            )
        self.store, self.length, self.batch_size = store, length, batch_size
        self.seed, self.shuffle, self.cross_documents = seed, shuffle, cross_documents
        self.num_windows = store.num_tokens // length
        self._stream = stream

    @property
    def fingerprint(self) -> str:
        """Of the data."""
        return self.store.fingerprint

    @property
    def batches_per_epoch(self) -> int:
        """Batches until every window was drawn at least once; the last may reach into the next epoch."""
        return math.ceil(self.num_windows / self.batch_size)

    def epoch_of(self, step: int) -> int:
        """The epoch of the first example of a batch, from 0."""
        return step * self.batch_size // self.num_windows

    def windows_of(self, step: int) -> np.ndarray:
        """The windows of the rows that are read of a batch: int64 [B]."""
        return self._windows(step * self.batch_size + self.rows)

    def _windows(self, examples: np.ndarray) -> np.ndarray:
        epochs, windows = np.divmod(examples, self.num_windows)
        if self.shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                windows[here] = permute(windows[here], self.num_windows, (self.seed, epoch, *self._stream))
        return windows

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """inputs, targets int32 [B, L] and weights float32 [B, L], 1 where a target counts (here everywhere).

        Without cross_documents also segments int32 [B, L], the document of each target counted from 1 within
        the window, and positions int32 [B, L], which restart at 0 in each. The input in front of a document's
        first token is the end of text before it and belongs to the document it opens.
        """
        return self.read(step * self.batch_size + self.rows)

    def read(self, examples: np.ndarray) -> dict[str, np.ndarray]:
        """The same for examples by number, int64 [B]."""
        windows = self._windows(examples)
        batch = _read_windows(self.store, windows, self.length)
        if self.cross_documents:
            return batch
        return batch | _segments(_documents(self.store, windows, batch["weights"]))

    def tokens_by_source(self, steps: int) -> dict[str, int]:
        """Nothing: there is one source."""
        return {}


def evaluation_batches(
    store: TokenStore,
    length: int,
    batch_size: int,
    cross_documents: bool = True,
) -> Iterator[dict[str, np.ndarray]]:
    """Every token of the store as a target exactly once, in order; every process gets the same batches.

    As `WindowLoader.batch`, and window int64 [B] (-1 for a row that only fills up the last batch), document
    int32 [B, L], the number of each target's document. Beyond the end weights are 0, tokens end of text,
    document -1 and segments 0.
    """
    _check_batch_size(batch_size)
    num_windows = num_evaluation_windows(store, length)
    rows = np.arange(batch_size, dtype=np.int64)
    return (
        _evaluation_batch(store, length, first + rows, num_windows, cross_documents)
        for first in range(0, num_windows, batch_size)
    )


def num_evaluation_windows(store: TokenStore, length: int) -> int:
    """Windows of an evaluation pass, the ragged last one included."""
    _check_length(length)
    return math.ceil(store.num_tokens / length)


def check_vocabulary(store: TokenStore, vocab_size: int) -> None:
    """Raises InputError where the store may hold token ids that a model of vocab_size does not have."""
    if store.vocab_size > vocab_size:
        raise InputError(
            f"the corpus {store.path} has token ids up to {store.vocab_size - 1}, beyond "
            f"model.vocab_size = {vocab_size}: set model.vocab_size to at least "
            f"{store.vocab_size} or use another tokenizer"
        )


class Prefetcher:
    """Batches made ready in a thread: iterates over (step, make_batch(step)) for step = start, start + 1, ...

    A context manager. At most `ready` finished batches wait. An error of make_batch is raised at the step
    that it belongs to, and again at every later one. Leaving the context ends the thread; it is a daemon, so
    it cannot hold up the end of a program.
    """

    def __init__(self, make_batch: Callable[[int], Any], start: int = 0, ready: int = 2):
        self._make_batch, self._start = make_batch, start
        self._queue = queue.Queue(maxsize=ready)
        self._closed = threading.Event()
        self._error = None
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def __enter__(self) -> "Prefetcher":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._closed.set()
        while self._thread.is_alive():
            self._drain()  # the thread may be waiting for room
            self._thread.join(0.01)
        self._drain()

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> tuple[int, Any]:
        if self._error is None:
            if self._closed.is_set():
                raise StopIteration
            step, batch, self._error = self._queue.get()
            if self._error is None:
                return step, batch
        raise self._error

    def _work(self) -> None:
        for step in itertools.count(self._start):
            if self._closed.is_set():
                return
            try:
                item = step, self._make_batch(step), None
            except BaseException as error:
                item = step, None, error
            self._queue.put(item)
            if item[2] is not None:
                return

    def _drain(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"the batch size is {batch_size}: it must be positive")


def _check_length(length: int) -> None:
    if length < 1:
        raise InputError(f"the window length is {length}: it must be at least 1")


def _read_windows(store: TokenStore, windows: np.ndarray, length: int) -> dict[str, np.ndarray]:
    tokens = np.full((len(windows), length + 1), store.end_of_text, np.int32)
    weights = np.zeros((len(windows), length), np.float32)
    starts = windows * length
    for row, start in enumerate(starts.tolist()):
        if start < 0:
            continue
        read = store.tokens[max(start - 1, 0) : start + length]
        missing = start == 0  # there is no token before the first: the end of text stands
        tokens[row, missing : missing + len(read)] = read
        weights[row, : store.num_tokens - start] = 1
    return {
        "inputs": np.ascontiguousarray(tokens[:, :-1]),
        "targets": np.ascontiguousarray(tokens[:, 1:]),
        "weights": weights,
    }


def _documents(store: TokenStore, windows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The document of each target, int32 [B, L], -1 where its weight is 0."""
    length = weights.shape[1]
    places = windows[:, None] * length + np.arange(length)
    documents = np.searchsorted(store.document_starts, places, side="right") - 1
    return np.where(weights > 0, documents, -1).astype(np.int32)


def _segments(documents: np.ndarray) -> dict[str, np.ndarray]:
    column = np.arange(documents.shape[1], dtype=np.int32)
    opens = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    positions = column - np.maximum.accumulate(np.where(opens, column, 0), axis=1)
    segments = np.where(documents < 0, 0, documents - documents[:, :1] + 1)
    return {"segments": segments.astype(np.int32), "positions": positions.astype(np.int32)}


def _evaluation_batch(
    store: TokenStore, length: int, windows: np.ndarray, num_windows: int, cross_documents: bool
) -> dict[str, np.ndarray]:
    windows = np.where(windows < num_windows, windows, -1)
    batch = _read_windows(store, windows, length)
    documents = _documents(store, windows, batch["weights"])
    batch |= {"window": windows, "document": documents}
    return batch if cross_documents else batch | _segments(documents)
