"""Connections of the roll call: JSON objects over TCP, one a line, none of which ever blocks.

A process that is forked off keeps none of them.
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable

LAST_WORDS = 1.0  # seconds that an ending process waits until its last message is read
LONGEST_LINE = 1 << 20  # bytes
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Line:
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
        _open.add(sock)

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


def listen(port: int) -> socket.socket:
    """A listening socket on all interfaces, IPv6 too where this host has it; OSError where it cannot be had."""
    sock = None
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv4 decides below whether the port is free
            sock = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    sock = sock or socket.create_server(("", port), backlog=128)
    sock.setblocking(False)
    _open.add(sock)
    return sock


def descriptors() -> set[int]:
    """Those of all connections that are open here."""
    return {sock.fileno() for sock in list(_open) if sock.fileno() >= 0}


def readable(lines: Iterable, seconds: float) -> list:
    """Those of these that can be read, or have ended, within these seconds."""
    # Not select.select: it fails in a process with more than 1024 open files.
    with selectors.DefaultSelector() as selector:
        for line in lines:
            if line.fileno() >= 0:
                selector.register(line, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def drain(lines: Iterable[Line], seconds: float) -> None:
    """Until the other sides have read their last message and closed, at most these seconds.

    Closing before, with something unread here, could take the message back.
    """
    deadline = time.monotonic() + seconds
    while (left := [line for line in lines if not line.closed]) and time.monotonic() < deadline:
        for line in readable(left, 0.05):
            line.receive()


def _drop_in_child() -> None:
    # A forked worker that kept the connection would outlive its killed parent and hide that it is gone.
    for sock in list(_open):
        sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
