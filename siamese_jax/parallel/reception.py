"""The roll call itself: process 0 receives all others, and each of them visits it, until all are there and agree.

Where somebody is missing or different, process 0 says so to all that are connected, and all end alike. Different is
the user's to mend (InputError); missing may come with the next start of all (FaultError).
"""

import contextlib
import errno
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from siamese_jax.errors import FaultError, InputError
from siamese_jax.parallel.lines import LAST_WORDS, Line, drain, listen, readable
from siamese_jax.parallel.wording import listed, names, oddity, one_line

TOKEN = "siamese_jax roll call 1"
FIRST_REMINDER, REMINDER = 2.0, 10.0  # seconds until the first line while waiting, and between the later ones
STATUS = 1.0  # seconds between what process 0 tells those who wait with it
STRANGER = 10.0  # seconds a connection may stay without a hello
NO_ANSWER = 15.0  # seconds without a word from process 0, connected, after which another connection is tried
GRACE = 5.0  # seconds left to the rest to arrive, once two processes disagree, so that they too are told
RESOLVE = 10.0  # seconds a host name may stay unknown: name services can lag behind the hosts' start
CONNECT = 5.0  # seconds of one try to connect
RETRY = 0.25  # seconds between two tries


@dataclass(frozen=True)
class Part:
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


class Reception:
    """Process 0's side of the roll call."""

    def __init__(self, part: Part):
        self.part = part
        self.mine = part.hello()
        self.strangers: list[Line] = []
        self.guests: dict[Line, dict] = {}  # hellos
        self.deadline = time.monotonic() + part.timeout
        self.next_status = 0.0
        self.odd_since: float | None = None
        self.reminder = _Reminder(part.say)

    def gather(self) -> tuple[dict[int, Line], dict[int, str]]:
        """Connections and host names by index, when all are there and agree; InputError or FaultError where not."""
        self.listener = self._listen()
        try:
            while not self._complete():
                self._serve()
                self._tell()
        except BaseException as error:
            if isinstance(error, InputError | FaultError):
                for line in self.guests:
                    line.send(type="refused", text=str(error), missing=isinstance(error, FaultError))
                    line.hang_up()
                drain(self.guests, LAST_WORDS)
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

    def _listen(self) -> socket.socket:
        try:
            return listen(self.part.port)
        except OSError as error:
            why = f"cannot be opened on this host ({_reason(error)}): choose another"
            if error.errno == errno.EADDRINUSE:
                why = "is already in use on this host: choose another, or end the program that uses it"
            raise InputError(f"port {self.part.port} of --coordinator {self.part.address} {why}") from error

    def _missing(self) -> list[int]:
        there = {0} | {hello["index"] for hello in self.guests.values()}
        return [index for index in range(self.part.processes) if index not in there]

    def _complete(self) -> bool:
        now = time.monotonic()
        odd = oddity(self.mine, list(self.guests.values()))
        self.odd_since = None if odd is None else self.odd_since or now
        everybody = len(self.guests) + 1 >= self.part.processes
        if odd and (everybody or now > min(self.deadline, self.odd_since + GRACE)):
            raise InputError(odd)
        missing = self._missing()
        if missing and now > self.deadline:
            raise FaultError(
                f"{names(missing)} of {self.part.processes} did not start within {self.part.timeout:g} s: start "
                f"{'it' if len(missing) == 1 else 'them'} with the same --coordinator and --processes, "
                "or raise --start_timeout"
            )
        return not missing and not odd

    def _serve(self) -> None:
        for ready in readable([self.listener, *self.strangers, *self.guests], 0.2):
            if ready is self.listener:
                with contextlib.suppress(OSError):  # who connected may have gone again
                    self.strangers.append(Line(self.listener.accept()[0]))
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

    def _greet(self, line: Line, hello: dict) -> None:
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
        return f"waiting for {number} processes: {listed(missing)} (at most {left} s more)"

    def _tell(self) -> None:
        if not self._missing():
            return
        self.reminder.remind(self._status())
        if time.monotonic() >= self.next_status:
            self.next_status = time.monotonic() + STATUS
            for line in self.guests:
                line.send(type="waiting", text=self._status())


class Visit:
    """The side of every other process: once process 0 answers, its clock counts, not this one's."""

    def __init__(self, part: Part):
        self.part = part
        self.hello = part.hello()
        self.began = time.monotonic()
        self.deadline = self.began + part.timeout
        self.reminder = _Reminder(part.say)

    def wait(self) -> tuple[Line, dict]:
        """The connection to process 0 and its start message; InputError where refused, FaultError where alone."""
        while True:
            try:
                line = Line(self._connect())
                try:
                    return line, self._answer(line)
                except BaseException:
                    line.close()
                    raise
            except _NoAnswer as error:
                reason = error
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise FaultError(
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
            patience = max(0.1, min(CONNECT, self.deadline - now))
            sock = socket.create_connection((self.part.host, self.part.port), timeout=patience)
        except (socket.gaierror, UnicodeError) as error:
            if now - self.began < min(RESOLVE, self.part.timeout - RETRY):
                raise _NoAnswer("unknown host") from error
            raise InputError(
                f"the host of --coordinator {self.part.address} cannot be resolved: use the name or IP address of "
                "process 0's host"
            ) from error
        except OSError as error:
            raise _NoAnswer(_reason(error)) from error
        if sock.getsockname() == sock.getpeername():  # TCP can connect a port that nobody listens on to itself
            sock.close()
            raise _NoAnswer("connection refused")
        return sock

    def _answer(self, line: Line) -> dict:
        line.send(**self.hello)
        answered, text = False, ""
        while True:
            for ready in readable([line], 0.2):
                ready.receive()
            now = time.monotonic()
            while line.inbox:
                message = line.inbox.popleft()
                if message.get("type") == "start":
                    return message
                if message.get("type") == "refused":
                    raise (FaultError if message["missing"] else InputError)(message["text"])
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


def _is_hello(message: dict) -> bool:
    kinds = {"index": int, "processes": int, "host": str, "facts": dict, "nonce": str}
    return message.get("token") == TOKEN and all(isinstance(message.get(key), kind) for key, kind in kinds.items())


def _reason(error: OSError) -> str:
    return one_line(error.strerror or str(error)).lower()
