"""Roll call of a run's processes over plain TCP before jax.distributed starts, and a watch over them afterwards.

Process 0 hears every other and tells them all, one JSON object a line: who is missing, different or lost, by index.
"""

import json
import socket
import threading
import time
from collections.abc import Callable

from siamese_jax.errors import InputError
from siamese_jax.parallel.lines import LAST_WORDS, Line, drain, readable
from siamese_jax.parallel.reception import Part, Reception, Visit
from siamese_jax.parallel.wording import one_line

SLOWEST_PING = 5.0  # seconds
LEAVE = 10.0  # seconds process 0 waits for the others' goodbye
FIRST_CAUSE = 0.3  # seconds that fail() leaves to the news of a lost process


def free_port() -> int:
    """A TCP port that nothing uses on this host now; another program may take it before the caller does."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return sock.getsockname()[1]


class RollCall:
    """One process's part in the roll call of a run and in the watch afterwards.

    address: "HOST:PORT" of process 0 ("[HOST]:PORT" for IPv6), unused where num_processes is 1; index: 0 to
    num_processes - 1; facts: what must be equal on all processes, by name; timeout: seconds until join() gives up;
    say: gets the lines to show while waiting. InputError: a wrong address, index, number or timeout.
    """

    def __init__(
        self,
        address: str,
        num_processes: int,
        index: int,
        facts: dict[str, str],
        timeout: float,
        say: Callable[[str], None],
    ):
        if num_processes < 1 or not 0 <= index < num_processes:
            raise InputError(
                f"process index {index} of {num_processes} process(es): use 0 to the number of processes - 1"
            )
        if not timeout > 0:
            raise InputError(f"--start_timeout is {timeout:g} s: use more than 0")
        host, port = _parse_address(address) if num_processes > 1 else ("", 0)
        self._part = Part(host, port, num_processes, index, dict(facts), timeout, say)
        self.hosts: dict[int, str] = {index: socket.gethostname()}  # names by index, complete after join()
        self._lines: dict[int, Line] = {}
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._on_loss: Callable[[int, str], None] | None = None
        self._silence = float("inf")
        self._interval = SLOWEST_PING
        self._next_ping = 0.0
        self._turned = 0.0
        self._ended = self._mute = self._stop = False

    def join(self, announcement: dict | None = None) -> dict:
        """Returns process 0's announcement (JSON values) on every process once all are there and agree.

        FaultError on every connected process where some did not come within the timeout, and where process 0 cannot
        be reached; InputError on all where two share an index or differ in number or facts, and on process 0 where
        it cannot have its port.
        """
        announcement = json.loads(json.dumps(announcement or {}))
        if self._part.processes == 1:
            return announcement
        if self._part.index == 0:
            self._lines, self.hosts = Reception(self._part).gather()
            for line in self._lines.values():
                line.send(type="start", announcement=announcement, hosts=list(self.hosts.items()))
            return announcement
        line, start = Visit(self._part).wait()
        self._lines, self.hosts = {0: line}, {index: host for index, host in start["hosts"]}
        return start["announcement"]

    def watch(self, on_loss: Callable[[int, str], None], silence: float = 60.0) -> None:
        """Watches from a daemon thread, which calls on_loss(index, why) once: for the first process that is lost.

        Lost is who closes its connection without leave(), calls fail(), or, once it watches too, sends nothing for
        `silence` seconds. A process that was itself taken for lost hears its own index. InputError: silence <= 0.
        """
        if not silence > 0:
            raise InputError(f"a silence of {silence:g} s: use more than 0")
        if self._thread or not self._lines:
            return
        self._on_loss, self._silence, self._interval = on_loss, silence, min(SLOWEST_PING, silence / 10)
        self._turned = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="roll-call", daemon=True)
        self._thread.start()

    def fail(self, text: str) -> None:
        """Tells all others, in about a second at most, that this process ends with this error text."""
        # The error may only follow from another process's death, and then that one is to be named.
        self._wait(FIRST_CAUSE)
        if not self._begin_end(mute=True):
            return
        for line in list(self._lines.values()):
            if self._part.index == 0:
                line.send(type="lost", index=0, why=one_line(text))
            else:
                line.send(type="failed", text=one_line(text))
            line.hang_up()
        self._finish(LAST_WORDS)

    def leave(self) -> None:
        """Ends this process's part well: nobody takes it for lost afterwards. Process 0 waits 10 s for the others.

        A process lost while process 0 waits is still reported.
        """
        if not self._begin_end(mute=self._part.index != 0):
            return
        for line in list(self._lines.values()):
            line.send(type="goodbye")
            if self._part.index != 0:
                line.hang_up()
        self._finish(LEAVE if self._part.index == 0 else LAST_WORDS)

    def _begin_end(self, mute: bool) -> bool:
        with self._lock:
            first, self._ended = not self._ended, True
            self._mute = self._mute or (first and mute)
        return first

    def _wait(self, seconds: float) -> None:
        if self._thread and self._thread is not threading.current_thread():
            self._done.wait(seconds)

    def _finish(self, seconds: float) -> None:
        """Until all connections are closed, by the other side or after these seconds."""
        if self._thread:
            self._wait(seconds)
            self._stop = True
            self._wait(LAST_WORDS)
            return
        deadline = time.monotonic() + seconds
        while self._lines and time.monotonic() < deadline:
            self._turn()
        self._close()

    def _close(self) -> None:
        for line in self._lines.values():
            line.hang_up()
            line.close()
        self._lines = {}

    def _run(self) -> None:
        try:
            while self._lines and not self._stop:
                self._turn()
        except Exception as error:  # nobody else would hear of it
            self._part.say(f"the watch over the other processes ended: {one_line(str(error))}")
        finally:
            self._close()
            self._done.set()

    def _turn(self) -> None:
        """Hears what came, sends what is due, and handles a loss; takes up to half a second."""
        pause = min(0.5, self._interval / 2)
        for line in readable(self._lines.values(), pause):
            line.receive()
        now = time.monotonic()
        if now - self._turned > pause + self._silence / 2:
            # This process itself stood still (stopped, swapped out): it cannot judge who was silent meanwhile.
            for line in self._lines.values():
                line.heard = now
        self._turned = now
        losses = [loss for index in list(self._lines) for loss in self._hear(index, now)]
        if losses:
            self._lose(*min(losses)[1:])
            return
        ping = now >= self._next_ping
        if ping:
            self._next_ping = now + self._interval
        for line in self._lines.values():
            line.send(type="ping") if ping else line.flush()

    def _hear(self, index: int, now: float) -> list[tuple[int, int, str]]:
        """(rank, index, why) of the losses that this connection tells; an error text may only follow from another
        process's death, so it ranks behind.
        """
        line = self._lines[index]
        losses = []
        while line.inbox:
            message = line.inbox.popleft()
            line.heard = now
            kind = message.get("type")
            if kind == "ping":
                line.watching = True
            elif kind == "goodbye":
                line.goodbye = True
            elif kind == "failed":
                losses.append((1, index, message["text"]))
            elif kind == "lost":
                losses.append((0, message["index"], message["why"]))
        if line.closed or (line.goodbye and index != 0):
            line.close()
            del self._lines[index]
            if not line.goodbye and not losses:
                losses.append((0, index, "closed its connection"))
        elif line.watching and not line.goodbye and now - line.heard > self._silence:
            losses.append((0, index, f"was silent for {self._silence:g} s"))
        return losses

    def _lose(self, index: int, why: str) -> None:
        lines = list(self._lines.values())
        for line in lines:
            if self._part.index == 0 and not self._mute:
                line.send(type="lost", index=index, why=why)
            line.hang_up()
        if self._part.index == 0:
            drain(lines, LAST_WORDS / 2)
        self._close()
        if self._on_loss and not self._mute:
            try:
                self._on_loss(index, why)
            except Exception as error:  # the thread has nobody to raise it to
                self._part.say(f"process {index} {why}; telling it failed: {one_line(str(error))}")


def _parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    if not name or not 1 <= number <= 65535 or (":" in name and not bracketed) or name != "".join(name.split()):
        raise InputError(
            f'--coordinator is "{one_line(address)}": use HOST:PORT of process 0, '
            "such as 10.0.0.1:1234 or [::1]:1234"
        )
    return name, number
