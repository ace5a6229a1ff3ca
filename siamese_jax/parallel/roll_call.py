"""Roll call of a run's processes over plain TCP before jax.distributed starts, and a watch over them afterwards.

Process 0 hears every other and tells them all, one JSON object a line: who is missing, different or lost, by index.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from siamese_jax.errors import InputError

TOKEN = "siamese_jax roll call 1"
FIRST_REMINDER, REMINDER = 2.0, 10.0  # seconds until the first line while waiting, and between the later ones
STATUS = 1.0  # seconds between what process 0 tells those who wait with it
STRANGER = 10.0  # seconds a connection may stay without a hello
NO_ANSWER = 15.0  # seconds without a word from process 0, connected, after which another connection is tried
GRACE = 5.0  # seconds left to the rest to arrive, once two processes disagree, so that they too are told
RESOLVE = 10.0  # seconds a host name may stay unknown: name services can lag behind the hosts' start
RETRY = 0.25  # seconds between two tries to connect
SLOWEST_PING = 5.0  # seconds
LEAVE = 10.0  # seconds process 0 waits for the others' goodbye
LAST_WORDS = 1.0  # seconds that an ending process waits until its last message is read
FIRST_CAUSE = 0.3  # seconds that fail() leaves to the news of a lost process
LONGEST_LINE = 1 << 20  # bytes
LONGEST_TEXT = 500  # characters of an error text
LONGEST_VALUE = 12  # characters of a fact in a message
MOST_NAMED = 8  # indices in a message

ADVICE = {
    "configuration": "start all with the same --config and overrides",
    "library": "install the same version on every host",
}


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
        self._part = _Part(host, port, num_processes, index, dict(facts), timeout, say)
        self.hosts: dict[int, str] = {index: socket.gethostname()}  # names by index, complete after join()
        self._lines: dict[int, _Line] = {}
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

        InputError, on every connected process: some did not come within the timeout, two share an index, or they
        differ in number or facts; also: process 0 cannot be reached, or cannot have its port.
        """
        announcement = json.loads(json.dumps(announcement or {}))
        if self._part.processes == 1:
            return announcement
        if self._part.index == 0:
            self._lines, self.hosts = _Reception(self._part).gather()
            for line in self._lines.values():
                line.send(type="start", announcement=announcement, hosts=list(self.hosts.items()))
            return announcement
        line, start = _Visit(self._part).wait()
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
                line.send(type="lost", index=0, why=_one_line(text))
            else:
                line.send(type="failed", text=_one_line(text))
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
            self._part.say(f"the watch over the other processes ended: {_one_line(str(error))}")
        finally:
            self._close()
            self._done.set()

    def _turn(self) -> None:
        """Hears what came, sends what is due, and handles a loss; takes up to half a second."""
        pause = min(0.5, self._interval / 2)
        for line in _readable(self._lines.values(), pause):
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
            _drain(lines, LAST_WORDS / 2)
        self._close()
        if self._on_loss and not self._mute:
            try:
                self._on_loss(index, why)
            except Exception as error:  # the thread has nobody to raise it to
                self._part.say(f"process {index} {why}; telling it failed: {_one_line(str(error))}")


@dataclass(frozen=True)
class _Part:
    """What this process brings to the roll call; timeout in seconds."""

    host: str
    port: int
    processes: int
    index: int
    facts: dict[str, str]
    timeout: float
    say: Callable[[str], None]

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def hello(self) -> dict:
        # The nonce tells this process coming again over a new connection from a second one with the same index.
        return {
            "token": TOKEN,
            "index": self.index,
            "processes": self.processes,
            "host": socket.gethostname(),
            "facts": self.facts,
            "nonce": uuid.uuid4().hex,
        }


class _Line:
    """One connection, never blocking: JSON objects, one a line; `closed` once it ended, broke or carries nonsense.

    Any thread may send and hang up; one at a time receives and closes.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.inbox: deque[dict] = deque()
        self.closed = self.watching = self.goodbye = False
        self.since = self.heard = time.monotonic()
        self._in = self._out = b""
        self._lock = threading.Lock()
        _OPEN.add(sock)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, **message) -> None:
        with self._lock:
            self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        with self._lock:
            try:
                while self._out:
                    self._out = self._out[self.sock.send(self._out) :]
            except BlockingIOError:
                pass
            except OSError:  # receive() finds the end of the connection, after the last words that came over it
                self._out = b""

    def receive(self) -> None:
        """One read, so that nobody who sends without end holds up the others."""
        try:
            chunk = self.sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            chunk = b""
        *lines, self._in = (self._in + chunk).split(b"\n")
        self.closed = self.closed or not chunk or len(self._in) > LONGEST_LINE
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self.closed = True
                return
            self.inbox.append(message)

    def hang_up(self) -> None:
        """Nothing more will be sent; what the other side still sends can be read."""
        self.flush()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.closed = True
        self.sock.close()


class _Reception:
    """Process 0's side of the roll call."""

    def __init__(self, part: _Part):
        self.part = part
        self.mine = part.hello()
        self.strangers: list[_Line] = []
        self.guests: dict[_Line, dict] = {}  # hellos
        self.deadline = time.monotonic() + part.timeout
        self.next_status = 0.0
        self.odd_since: float | None = None
        self.reminder = _Reminder(part.say)

    def gather(self) -> tuple[dict[int, _Line], dict[int, str]]:
        """Connections and host names by index, when all are there and agree; InputError on all where not."""
        self.listener = _listen(self.part)
        _OPEN.add(self.listener)
        try:
            while not self._complete():
                self._serve()
                self._tell()
        except BaseException as error:
            if isinstance(error, InputError):
                for line in self.guests:
                    line.send(type="refused", text=str(error))
                    line.hang_up()
                _drain(self.guests, LAST_WORDS)
            for line in self.guests:
                line.close()
            raise
        finally:
            self.listener.close()
            for line in self.strangers:
                line.close()
        hellos = sorted([self.mine, *self.guests.values()], key=lambda hello: hello["index"])
        lines = {hello["index"]: line for line, hello in self.guests.items()}
        return lines, {hello["index"]: hello["host"] for hello in hellos}

    def _missing(self) -> list[int]:
        there = {0} | {hello["index"] for hello in self.guests.values()}
        return [index for index in range(self.part.processes) if index not in there]

    def _complete(self) -> bool:
        now = time.monotonic()
        odd = _oddity(self.mine, list(self.guests.values()))
        self.odd_since = None if odd is None else self.odd_since or now
        everybody = len(self.guests) + 1 >= self.part.processes
        if odd and (everybody or now > min(self.deadline, self.odd_since + GRACE)):
            raise InputError(odd)
        missing = self._missing()
        if missing and now > self.deadline:
            raise InputError(
                f"{_names(missing)} of {self.part.processes} did not start within {self.part.timeout:g} s: start "
                f"{'it' if len(missing) == 1 else 'them'} with the same --coordinator and --processes, "
                "or raise --start_timeout"
            )
        return not missing and not odd

    def _serve(self) -> None:
        for ready in _readable([self.listener, *self.strangers, *self.guests], 0.2):
            if ready is self.listener:
                with contextlib.suppress(OSError):  # who connected may have gone again
                    self.strangers.append(_Line(self.listener.accept()[0]))
            else:
                ready.receive()
        now = time.monotonic()
        for line in list(self.strangers):
            if line.inbox:
                self._greet(line, line.inbox.popleft())
            elif line.closed or now - line.since > STRANGER:
                self.strangers.remove(line)
                line.close()
        for line in list(self.guests):
            if line.closed:  # its process ended, and may be started again
                line.close()
                del self.guests[line]

    def _greet(self, line: _Line, hello: dict) -> None:
        self.strangers.remove(line)
        if not _is_hello(hello):
            line.close()
            return
        for other, known in list(self.guests.items()):
            if known["nonce"] == hello["nonce"]:
                other.close()
                del self.guests[other]
        self.guests[line] = hello
        line.send(type="waiting", text=self._status())

    def _status(self) -> str:
        missing = self._missing()
        left = max(0, round(self.deadline - time.monotonic()))
        number = f"{len(missing)} of {self.part.processes}"
        return f"waiting for {number} processes: {_listed(missing)} (at most {left} s more)"

    def _tell(self) -> None:
        if not self._missing():
            return
        self.reminder.remind(self._status())
        if time.monotonic() >= self.next_status:
            self.next_status = time.monotonic() + STATUS
            for line in self.guests:
                line.send(type="waiting", text=self._status())


class _Visit:
    """The side of every other process: once process 0 answers, its clock counts, not this one's."""

    def __init__(self, part: _Part):
        self.part = part
        self.hello = part.hello()
        self.began = time.monotonic()
        self.deadline = self.began + part.timeout
        self.reminder = _Reminder(part.say)

    def wait(self) -> tuple[_Line, dict]:
        """The connection to process 0 and its start message; InputError where it refuses or cannot be reached."""
        while True:
            try:
                line = _Line(self._connect())
                try:
                    return line, self._answer(line)
                except BaseException:
                    line.close()
                    raise
            except _NoAnswer as error:
                reason = error
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise InputError(
                    f"process 0 cannot be reached at {self.part.address} within {self.part.timeout:g} s "
                    f"({reason}): start it with the same --coordinator, open the port between the hosts, "
                    "or raise --start_timeout"
                )
            self.reminder.remind(self._status())
            time.sleep(min(RETRY, left))

    def _status(self) -> str:
        left = max(0, round(self.deadline - time.monotonic()))
        return f"waiting for process 0 at {self.part.address} (at most {left} s more)"

    def _connect(self) -> socket.socket:
        now = time.monotonic()
        try:
            patience = max(0.1, min(SLOWEST_PING, self.deadline - now))
            sock = socket.create_connection((self.part.host, self.part.port), timeout=patience)
        except (socket.gaierror, UnicodeError) as error:
            if now - self.began < min(RESOLVE, self.part.timeout - RETRY):
                raise _NoAnswer("unknown host") from error
            raise InputError(
                f"the host of --coordinator {self.part.address} cannot be resolved: use the name or IP address of "
                "process 0's host"
            ) from error
        except OSError as error:
            raise _NoAnswer(_one_line(error.strerror or str(error)).lower()) from error
        if sock.getsockname() == sock.getpeername():  # TCP can connect a port that nobody listens on to itself
            sock.close()
            raise _NoAnswer("connection refused")
        return sock

    def _answer(self, line: _Line) -> dict:
        line.send(**self.hello)
        answered, text = False, ""
        while True:
            for ready in _readable([line], 0.2):
                ready.receive()
            now = time.monotonic()
            while line.inbox:
                message = line.inbox.popleft()
                if message.get("type") == "start":
                    return message
                if message.get("type") == "refused":
                    raise InputError(message["text"])
                if message.get("type") == "waiting":
                    answered, line.heard, text = True, now, message["text"]
            if line.closed:
                raise _NoAnswer("it closed the connection" if answered else "another program seems to answer there")
            if now - line.heard > NO_ANSWER or (now > self.deadline and not answered):
                raise _NoAnswer("it takes the connection but does not answer")
            self.reminder.remind(text if answered else self._status())


class _NoAnswer(Exception):
    """Process 0 is not there yet; the message says how that shows."""


class _Reminder:
    """Says a line after 2 seconds, and then every 10."""

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.next = time.monotonic() + FIRST_REMINDER

    def remind(self, text: str) -> None:
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + REMINDER
            self.say(text)


def _parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    if not name or not 1 <= number <= 65535 or (":" in name and not bracketed) or name != "".join(name.split()):
        raise InputError(
            f'--coordinator is "{_one_line(address)}": use HOST:PORT of process 0, '
            "such as 10.0.0.1:1234 or [::1]:1234"
        )
    return name, number


def _listen(part: _Part) -> socket.socket:
    """A listening socket on all interfaces, IPv6 too where this host has it; InputError where it cannot be had."""
    try:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                # IPv4 decides below whether the port is free.
                return _nonblocking(
                    socket.create_server(("", part.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
                )
        return _nonblocking(socket.create_server(("", part.port), backlog=128))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "is already in use on this host: choose another, or end the program that uses it"
        else:
            why = (
                f"cannot be opened on this host ({_one_line(error.strerror or str(error)).lower()}): choose another"
            )
        raise InputError(f"port {part.port} of --coordinator {part.address} {why}") from error


def _nonblocking(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    return sock


def _readable(lines: Iterable, seconds: float) -> list:
    """Those of these that can be read, or have ended, within these seconds."""
    # Not select.select: it fails in a process with more than 1024 open files.
    with selectors.DefaultSelector() as selector:
        for line in lines:
            if line.fileno() >= 0:
                selector.register(line, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def _drain(lines: Iterable[_Line], seconds: float) -> None:
    """Until the other sides have read their last message and closed, at most these seconds.

    Closing before, with something unread here, could take the message back.
    """
    deadline = time.monotonic() + seconds
    while (left := [line for line in lines if not line.closed]) and time.monotonic() < deadline:
        for line in _readable(left, 0.05):
            line.receive()


def _is_hello(message: dict) -> bool:
    kinds = {"index": int, "processes": int, "host": str, "facts": dict, "nonce": str}
    return message.get("token") == TOKEN and all(isinstance(message.get(key), kind) for key, kind in kinds.items())


def _oddity(mine: dict, others: list[dict]) -> str | None:
    """One line on the first thing in which the processes do not fit together, or None."""
    others = sorted(others, key=lambda hello: hello["index"])
    for hello in others:
        if hello["processes"] != mine["processes"]:
            same = [other["index"] for other in others if other["processes"] == hello["processes"]]
            return (
                f"{_names(same)} expected {hello['processes']} processes, process 0 expected {mine['processes']}: "
                "start all with the same --processes"
            )
    for first, second in zip([mine, *others], others, strict=False):
        if first["index"] == second["index"]:
            return (
                f"two processes have index {first['index']}, on hosts {_one_line(first['host'])} and "
                f"{_one_line(second['host'])}: give each its own index, 0 to {mine['processes'] - 1}"
            )
    return next((text for name in _fact_names(mine, others) if (text := _odd_fact(name, mine, others))), None)


def _fact_names(mine: dict, others: list[dict]) -> list[str]:
    return list(dict.fromkeys(name for hello in [mine, *others] for name in hello["facts"]))


def _odd_fact(name: str, mine: dict, others: list[dict]) -> str | None:
    expected = mine["facts"].get(name)
    values = {hello["index"]: hello["facts"].get(name) for hello in others}
    odd = next((value for value in values.values() if value != expected), expected)
    same = [index for index, value in values.items() if value == odd]
    if odd == expected:
        return None
    verb = "has" if len(same) == 1 else "have"
    advice = ADVICE.get(name, f"start all with the same {_one_line(name)}")
    return (
        f"{_names(same)} {verb} another {_one_line(name)} ({_short(odd, expected)}) than process 0 "
        f"({_short(expected, odd)}): {advice}"
    )


def _short(value: str | None, other: str | None) -> str:
    """The first characters of a fact, or those where it parts from the other value."""
    if value is None:
        return "none"
    value, other = _one_line(value), _one_line(other or "")
    pairs = enumerate(zip(value, other, strict=False))
    start = next((at for at, (mine, its) in pairs if mine != its), min(len(value), len(other)))
    start = 0 if start < LONGEST_VALUE else start - LONGEST_VALUE // 2
    cut = value[start : start + LONGEST_VALUE]
    return f"{'...' if start else ''}{cut}{'...' if start + LONGEST_VALUE < len(value) else ''}"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:LONGEST_TEXT]


def _listed(indices: list[int]) -> str:
    more = len(indices) - MOST_NAMED
    return ", ".join(map(str, indices[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")


def _names(indices: list[int]) -> str:
    """The processes with these indices, in words."""
    if len(indices) == 1:
        return f"process {indices[0]}"
    if len(indices) > MOST_NAMED:
        return f"processes {_listed(indices)}"
    return f"processes {_listed(indices[:-1])} and {indices[-1]}"


_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _drop_in_child() -> None:
    # A forked worker that kept the connection would outlive its killed parent and hide that it is gone.
    for sock in list(_OPEN):
        sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
