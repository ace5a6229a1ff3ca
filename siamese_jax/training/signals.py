"""SIGTERM and SIGINT as a request to stop after the step in flight; a second Ctrl-C leaves at once."""

import os
import signal
import threading

NAMES = (signal.SIGTERM, signal.SIGINT)
INTERRUPTED = 130


class Stopped(Exception):
    """A signal asked to stop."""


class StopRequest:
    """A context manager; `requested` turns true at the first signal.

    A thread hears the signals, because Python's handlers wait for the main thread to return from a compile,
    which may take minutes.
    """

    def __init__(self):
        self.requested = False
        self._previous = {}

    def __enter__(self) -> "StopRequest":
        self._previous = {name: signal.signal(name, self._handle) for name in NAMES}
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

    def check(self) -> None:
        """Stopped, once a signal has come."""
        if self.requested:
            raise Stopped

    def _handle(self, number, frame) -> None:
        del number, frame
        self.requested = True

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
            self.requested = True
