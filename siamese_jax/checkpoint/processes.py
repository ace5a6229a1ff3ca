"""One verdict on all processes: what fails on one of them has failed on all. And one process before the others."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from siamese_jax.checkpoint.seal import Broken, one_line
from siamese_jax.errors import InputError

T = TypeVar("T")
WAIT_MS = 20 * 60 * 1000  # one process may seal or verify large files while the others wait
A_DAY_MS = 24 * 3600 * 1000  # tokenising may take hours


def together(work):
    """The value of `work()`; Broken on every process if it failed on any."""
    value, reason = None, None
    try:
        value = work()
    except Exception as fault:
        reason = one_line(fault)
    if reason := vote(reason):
        raise Broken(reason)
    return value


def vote(word):
    """On every process, the word of the first process that has one; None if none has."""
    if jax.process_count() == 1:
        return word
    barrier("vote")  # a collective gives up when a process comes 30 s late, this does not
    ballot = np.frombuffer((word or "").encode()[:200].ljust(200, b"\0"), np.uint8)
    rows = multihost_utils.process_allgather(ballot)
    words = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
    return next(filter(None, words), None)


def check_same(what: str, digest: bytes) -> None:
    """InputError on every process unless all of them have the same digest; what: it is of."""
    if jax.process_count() == 1:
        return
    barrier("same")
    rows = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    others = [index for index, row in enumerate(rows) if row.tobytes() != rows[0].tobytes()]
    if others:
        listed = ", ".join(map(str, others))
        raise InputError(f"{what} differ between process 0 and {listed}: give all hosts the same files")


def barrier(name, wait_ms=WAIT_MS):
    """Waits for all processes; safe in a background thread, unlike a collective."""
    ocp.multihost.get_barrier_sync_fn()(key=f"siamese_jax_{name}", timeout_ms=wait_ms)


def first_process_first(work: Callable[[], T]) -> T:
    """work() on every process, on process 0 before the others, so that they find what it has made.

    A process that fails ends all others (parallel/start_up.py), so nobody waits here for one that is gone.
    """
    if jax.process_count() == 1:
        return work()
    result = work() if jax.process_index() == 0 else None
    barrier("first", A_DAY_MS)
    return result if jax.process_index() == 0 else work()
