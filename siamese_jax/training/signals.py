"""SIGTERM and SIGINT as a request to stop after the step in flight; a second Ctrl-C leaves at once."""

import os
import signal

NAMES = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """A context manager; `requested` turns true at the first signal.

    With the first signal the previous behaviour of SIGINT's default comes back, so that the second Ctrl-C ends
    the process even inside a long compile.
    """

    def __init__(self):
        self.requested = False
        self._previous = {}

    def __enter__(self) -> "StopRequest":
        self._previous = {name: signal.signal(name, self._handle) for name in NAMES}
        return self

    def __exit__(self, *_) -> None:
        for name, handler in self._previous.items():
            signal.signal(name, handler)

    def _handle(self, number, frame) -> None:
        del frame
        self.requested = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        line = f"\n{signal.Signals(number).name}: saving after this step; Ctrl-C leaves at once\n"
        os.write(2, line.encode())  # print could meet itself halfway through a line
