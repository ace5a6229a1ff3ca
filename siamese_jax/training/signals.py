"""SIGTERM and SIGINT as a request to stop after the step in flight; a second Ctrl-C leaves at once.

With several processes a signal to any one of them stops all, at the same point of their work.
"""

import os
import signal
import threading

import jax
from jax.experimental import multihost_utils

NAMES = (signal.SIGTERM, signal.SIGINT)
INTERRUPTED = 130


class Stopped(Exception):
    """A signal asked to stop."""


class StopRequest:
    """A context manager; `poll` and `check` tell of the first signal.

    A thread hears the signals, because Python's handlers wait for the main thread to return from a compile,
    which may take minutes. With several processes all must ask equally often: jax's preemption service hears
    SIGTERM, and chooses a question, not asked by any process so far, to which all get the answer yes.
    """

    def __init__(self):
        self._requested, self._questions = False, 0
        self._previous = {}
        self._shared = jax.process_count() > 1

    def __enter__(self) -> "StopRequest":
        names = (signal.SIGINT,) if self._shared else NAMES
        self._previous = {name: signal.signal(name, self._handle) for name in names}
        self._ear, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        self._previous_bell = signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        signal.set_wakeup_fd(self._previous_bell)
        for name, handler in self._previous.items():
            signal.signal(name, handler)
        os.close(self._bell)  # ends the thread
        self._thread.join()
        os.close(self._ear)

    def poll(self) -> bool:
        """Whether a signal has come; with several processes, the same answer on all."""
        if self._shared and not self._requested:
            self._requested = multihost_utils.reached_preemption_sync_point(self._questions)
            self._questions += 1
        return self._requested

    def check(self) -> None:
        """Stopped, once a signal has come."""
        if self.poll():
            raise Stopped

    def _handle(self, number, frame) -> None:
        del number, frame
        self._requested = self._requested or not self._shared

    def _listen(self) -> None:
        heard = 0
        while byte := os.read(self._ear, 1):
            if byte[0] not in NAMES:
                continue
            if heard and byte[0] == signal.SIGINT:
                os._exit(INTERRUPTED)
            if not heard:
                line = f"\n{signal.Signals(byte[0]).name}: saving after this step; Ctrl-C leaves at once\n"
                os.write(2, line.encode())  # print could meet itself halfway through a line
            heard += 1
            if self._shared:
                os.kill(os.getpid(), signal.SIGTERM)  # Ctrl-C is no notice that jax's service would pass on
            else:
                self._requested = True
