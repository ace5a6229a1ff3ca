"""The child that keeps a dead process's sockets open for a moment."""

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from siamese_jax.parallel import linger

ROOT = Path(__file__).parents[2]
# Takes two connections, says 'ready' over both, holds all but the second, and dies as its argument says.
PROGRAM = """
import os, signal, socket, sys
from siamese_jax.parallel import linger
linger.SECONDS = 2
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connections = [server.accept()[0] for _ in range(2)]
child = linger.hold_sockets(except_for={connections[1].fileno()})
for connection in connections:
    connection.sendall(b"ready")
sys.stdin.readline()
if sys.argv[1] == "well":
    linger.let_go(child)
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def seconds_until_closed(sock: socket.socket, limit: float) -> float:
    began = time.monotonic()
    while sock in select.select([sock], [], [], max(0, began + limit - time.monotonic()))[0]:
        if not sock.recv(100):
            return time.monotonic() - began
    return limit


@pytest.mark.parametrize("ending", ["killed", "well"])
def test_sockets_outlive_a_killed_process_only(ending):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, ending], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with program:
        port = int(program.stdout.readline())
        held, other = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
        with held, other:
            assert held.recv(5) == other.recv(5) == b"ready"
            program.stdin.write("\n")
            program.stdin.flush()
            program.wait(timeout=20)
            assert seconds_until_closed(other, 20) < 20
            if ending == "killed":
                assert seconds_until_closed(held, 1) == 1
            assert seconds_until_closed(held, 20) < 20


def test_a_process_without_sockets_needs_no_child(monkeypatch):
    monkeypatch.setattr(linger, "_sockets", set)
    assert linger.hold_sockets() is None
    linger.let_go(None)


def test_only_sockets_are_found():
    with socket.socket() as sock, open(os.devnull) as file:
        found = linger._sockets()
        assert sock.fileno() in found
        assert file.fileno() not in found
