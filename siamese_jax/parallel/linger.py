"""Keeps the sockets of jax's coordination service open for a moment after process 0 has died.

Where they close with it, the other processes' jax ends them from C++ with a page of text that names nobody, often
before the watch (roll_call.py) can name the one that died.
"""

import contextlib
import os
import stat
import subprocess

SECONDS = 5


def hold_sockets(except_for: set[int] = frozenset()) -> subprocess.Popen | None:
    """A child that holds this process's sockets until SECONDS after its end; None where there is no such thing.

    except_for: descriptors that must close at once. To be called once all connections are there.
    """
    descriptors = _sockets() - except_for
    if not descriptors:
        return None
    # A child of this process's own program would copy its memory, and a fork would stop at its threads' locks.
    return subprocess.Popen(
        ["/bin/sh", "-c", f"read line || exec sleep {SECONDS}"],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        pass_fds=sorted(descriptors), start_new_session=True,
    )  # fmt: skip


def let_go(child: subprocess.Popen | None) -> None:
    """The good end: nothing is held any longer."""
    if child is not None:
        child.kill()
        child.wait()
        child.stdin.close()


def _sockets() -> set[int]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed again
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    found.add(int(name))
    return found
