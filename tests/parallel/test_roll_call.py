"""The roll call with real processes: who is missing, different, killed, stopped or failed is named by everybody.

One interpreter, which imports the module only, never jax, forks all of them, so that each starts in milliseconds.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from siamese_jax.errors import FaultError, InputError
from siamese_jax.parallel import reception
from siamese_jax.parallel.lines import Line
from siamese_jax.parallel.roll_call import RollCall, free_port

ROOT = Path(__file__).parents[2]
# Each connection to the nursery becomes a child with that connection as its stdin, stdout and stderr. None is
# reaped before the nursery ends, so that a child's process id stays its own.
NURSERY = """
import json, os, socket, sys, time
from siamese_jax.errors import FaultError, InputError
from siamese_jax.parallel.roll_call import RollCall

server = socket.socket(fileno=int(sys.argv[1]))
while True:
    connection = server.accept()[0]
    if os.fork() == 0:
        break
    connection.close()
server.close()
for number in range(3):
    os.dup2(connection.fileno(), number)
connection.close()

def tell(*words):
    print(*words, flush=True)

tell("started", os.getpid())
o = json.loads(sys.stdin.readline())
try:
    say = lambda text: tell("said", text)
    call = RollCall(o["address"], o["processes"], o["index"], o["facts"], o["timeout"], say)
    tell("joined", json.dumps(call.join(o["announcement"])))
except (InputError, FaultError) as error:
    tell("refused", error)
    sys.exit(2)
if o["silence"]:
    call.watch(lambda index, why: tell("lost", index, why), o["silence"])
for line in sys.stdin:
    command, _, text = line.strip().partition(" ")
    if command == "fork" and os.fork() == 0:
        time.sleep(float(text))
        os._exit(0)
    if command == "fail":
        call.fail(text)
    if command == "leave":
        call.leave()
        call.leave()
    if command == "exit":
        break
    tell("done", command)
"""


class Child:
    def __init__(self, nursery, port, processes, index, facts=None, timeout=20.0, silence=30.0, announcement=None):
        options = {
            "address": f"127.0.0.1:{port}",
            "processes": processes,
            "index": index,
            "facts": facts or {},
            "timeout": timeout,
            "silence": silence,
            "announcement": announcement,
        }
        self.connection = socket.create_connection(nursery)
        self.lines: queue.Queue[str] = queue.Queue()
        self.seen: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.pid = int(self.expect("started"))
        self.command(json.dumps(options))

    def _read(self):
        try:
            for line in self.connection.makefile():
                self.lines.put(line.strip())
        except ConnectionResetError:  # killed before it read its last command
            pass

    def expect(self, word, seconds=15.0):
        """What follows this word in the next line that begins with it."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no line with {word!r} within {seconds} s, but {self.seen}")
            self.seen.append(line)
            first, _, rest = line.partition(" ")
            if first == word:
                return rest

    def command(self, text):
        self.connection.sendall(f"{text}\n".encode())

    def signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)

    def rest(self):
        """All lines from here to the end of the process, which is told to exit."""
        self.command("exit")
        self.wait()
        return [self.lines.get_nowait() for _ in range(self.lines.qsize())]

    def wait(self):
        self.reader.join(timeout=15)
        assert not self.reader.is_alive()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(reception, "RETRY", 0.02)


@pytest.fixture(scope="module")
def nursery():
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        address, number = server.getsockname(), server.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, str(number)], stdin=subprocess.DEVNULL, pass_fds=[number], cwd=ROOT
        )
    yield address
    process.kill()
    process.wait()


@pytest.fixture
def start(nursery):
    children = []

    def start_child(*arguments, **options):
        children.append(Child(nursery, *arguments, **options))
        return children[-1]

    yield start_child
    for child in children:
        child.kill()
        child.connection.close()


def start_groups(start, groups, processes=3, **options):
    """Groups of processes side by side, each a list by index, all joined and watching."""
    ports = [free_port() for _ in range(groups)]
    started = [[start(port, processes, index, **options) for index in range(processes)] for port in ports]
    for children in started:
        for child in children:
            child.expect("joined")
    return started


def expect_no_loss(children):
    for child in children:
        assert not [line for line in child.rest() if line.startswith("lost")]


def run_threads(calls, announcement=None):
    """What join() gave or raised in a thread for each."""
    results = [None] * len(calls)

    def join(at):
        try:
            results[at] = calls[at].join(announcement if at == 0 else None)
        except (InputError, FaultError) as error:
            results[at] = str(error)

    threads = [threading.Thread(target=join, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return results


def leave_all(calls):
    threads = [threading.Thread(target=call.leave, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=8)
    assert not any(thread.is_alive() for thread in threads)


def make_calls(indices, processes, facts=None, timeout=10.0, said=None):
    address = f"127.0.0.1:{free_port()}"
    facts = facts or [{}] * len(indices)
    say = (said if said is not None else []).append
    return [
        RollCall(address, processes, index, fact, timeout, say) for index, fact in zip(indices, facts, strict=True)
    ]


def test_all_get_the_announcement_of_process_0_whoever_comes_first(start):
    port = free_port()
    early = [start(port, 3, index) for index in (2, 1)]
    time.sleep(0.3)
    first = start(port, 3, 0, announcement={"coordinator_port": 12345})
    for child in [first, *early]:
        assert json.loads(child.expect("joined")) == {"coordinator_port": 12345}
    for child in [first, *early]:
        child.command("leave")
    for child in [first, *early]:
        child.expect("done")
    expect_no_loss([first, *early])


def test_host_names_are_known_to_all():
    calls = make_calls([0, 1, 2], 3)
    assert run_threads(calls, {"a": 1}) == [{"a": 1}] * 3
    assert [call.hosts for call in calls] == [dict.fromkeys(range(3), socket.gethostname())] * 3
    leave_all(calls)


def test_one_process_needs_nobody():
    call = RollCall("", 1, 0, {}, 1.0, print)
    assert call.join({"a": 1}) == {"a": 1}
    call.watch(lambda index, why: None)
    call.fail("text")
    call.leave()


def test_missing_processes_are_named_on_all(monkeypatch):
    monkeypatch.setattr(reception, "FIRST_REMINDER", 0.3)
    said = []
    results = run_threads(make_calls([0, 2], 4, timeout=0.7, said=said))
    expected = (
        "processes 1 and 3 of 4 did not start within 0.7 s: "
        "start them with the same --coordinator and --processes, or raise --start_timeout"
    )
    assert results == [expected] * 2
    assert len(said) == 2
    assert all(text.startswith("waiting for 2 of 4 processes: 1, 3 (at most ") for text in said)


def test_missing_process_0_is_named(monkeypatch):
    monkeypatch.setattr(reception, "FIRST_REMINDER", 0.3)
    said = []
    (call,) = make_calls([1], 2, timeout=0.5, said=said)
    with pytest.raises(FaultError, match=r"^process 0 cannot be reached at 127\.0\.0\.1:\d+ within 0.5 s \("):
        call.join()
    assert len(said) == 1
    assert said[0].startswith("waiting for process 0 at 127.0.0.1:")


def test_another_program_at_the_address_of_process_0():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            while True:
                try:
                    sock = server.accept()[0]
                except OSError:
                    return
                sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=answer, daemon=True).start()
        call = RollCall(f"127.0.0.1:{server.getsockname()[1]}", 2, 1, {}, 0.4, print)
        with pytest.raises(FaultError, match=r"cannot be reached.*another program"):
            call.join()


def test_another_fact_is_named_on_all():
    facts = [{"configuration": "c" * 64, "library": "0.1"} for _ in range(3)]
    facts[2] = {"configuration": "a1b2" * 16, "library": "0.2"}
    expected = (
        "process 2 has another configuration (a1b2a1b2a1b2...) than process 0 (cccccccccccc...): "
        "start all with the same --config and overrides"
    )
    assert run_threads(make_calls([0, 1, 2], 3, facts)) == [expected] * 3


def test_a_fact_in_which_process_0_is_the_odd_one():
    facts = [{"library": "0.1"}, {"library": "0.2"}, {"library": "0.2"}]
    expected = (
        "processes 1 and 2 have another library (0.2) than process 0 (0.1): install the same version on every host"
    )
    assert run_threads(make_calls([0, 1, 2], 3, facts)) == [expected] * 3


@pytest.mark.parametrize(
    ("name", "other", "advice"),
    [
        ("arguments", "other", "start all with the same arguments"),
        ("prompts", "other", "start all with the same prompts"),
        ("workdir", "another", "start all with the same --workdir"),
        ("jax", "another", "install the same version on every host"),
    ],
)
def test_each_fact_has_its_advice(name, other, advice):
    results = run_threads(make_calls([0, 1], 2, [{name: "a"}, {name: "b"}]))
    assert results == [f"process 1 has {other} {name} (b) than process 0 (a): {advice}"] * 2


def test_facts_that_part_late_or_are_missing():
    late = run_threads(make_calls([0, 1], 2, [{"data": "x" * 40 + "1"}, {"data": "x" * 40 + "2"}]))
    assert (
        late
        == ["process 1 has another data (...xxxxxx2) than process 0 (...xxxxxx1): start all with the same data"] * 2
    )
    missing = run_threads(make_calls([0, 1], 2, [{}, {"data": "two\nlines"}]))
    assert (
        missing
        == ["process 1 has another data (two lines) than process 0 (none): start all with the same data"] * 2
    )


def test_the_same_index_twice_is_named_on_all():
    host = socket.gethostname()
    results = run_threads(make_calls([0, 1, 1], 3))
    assert (
        results == [f"two processes have index 1, on hosts {host} and {host}: give each its own index, 0 to 2"] * 3
    )


def test_another_number_of_processes_is_named_on_all():
    address = f"127.0.0.1:{free_port()}"
    calls = [RollCall(address, 3 if index != 1 else 2, index, {}, 10.0, print) for index in range(3)]
    expected = "process 1 expected 2 processes, process 0 expected 3: start all with the same --processes"
    assert run_threads(calls) == [expected] * 3


def test_a_difference_is_told_though_somebody_is_missing(monkeypatch):
    monkeypatch.setattr(reception, "GRACE", 0.3)
    results = run_threads(make_calls([0, 1], 3, [{"data": "a"}, {"data": "b"}], timeout=60.0))
    assert results == ["process 1 has another data (b) than process 0 (a): start all with the same data"] * 2


def test_a_process_that_ends_while_waiting_can_come_again(start):
    port = free_port()
    first = start(port, 3, 0)
    gone = start(port, 3, 1)
    time.sleep(0.3)
    gone.kill()
    gone.wait()
    others = [start(port, 3, index) for index in (1, 2)]
    for child in [first, *others]:
        child.expect("joined")


def test_a_killed_process_is_named_by_all_others(start):
    groups = start_groups(start, 2)
    killed = [children.pop(victim) for victim, children in enumerate(groups)]
    for child in killed:
        child.kill()
    for victim, children in enumerate(groups):
        for child in children:
            assert child.expect("lost", seconds=5) == f"{victim} closed its connection"
        expect_no_loss(children)


def test_a_forked_worker_does_not_hide_that_its_parent_was_killed(start):
    ((first, second),) = start_groups(start, 1, processes=2)
    second.command("fork 8")
    second.expect("done")
    second.kill()
    assert first.expect("lost", seconds=5) == "1 closed its connection"


def test_a_stopped_process_is_named_by_all_others(start):
    groups = start_groups(start, 2, silence=1.0)
    stopped = [children.pop(victim) for victim, children in enumerate(groups)]
    time.sleep(0.3)
    for child in stopped:
        child.signal(signal.SIGSTOP)
    for victim, children in enumerate(groups):
        for child in children:
            assert child.expect("lost") == f"{victim} was silent for 1 s"
    for child in stopped:
        child.signal(signal.SIGCONT)
    for child in stopped:
        assert child.expect("lost")


def test_the_error_of_one_reaches_all_others(start):
    groups = start_groups(start, 2)
    victims = (0, 2)
    for victim, children in zip(victims, groups, strict=True):
        children[victim].command("fail the loss is NaN at step 7")
    for victim, children in zip(victims, groups, strict=True):
        failed = children.pop(victim)
        for child in children:
            assert child.expect("lost") == f"{victim} the loss is NaN at step 7"
        failed.expect("done")
        expect_no_loss([failed, *children])


def test_an_error_that_follows_from_a_killed_process_does_not_hide_it(start):
    (children,) = start_groups(start, 1)
    children[2].kill()
    children[1].command("fail connection reset by peer")
    for child in children[:2]:
        assert child.expect("lost") == "2 closed its connection"


def test_leaving_is_no_loss(start):
    upward, downward = start_groups(start, 2)
    for pair in zip(upward, reversed(downward), strict=True):
        for child in pair:
            child.command("leave")
        time.sleep(0.1)
    for child in upward + downward:
        child.expect("done")
        assert not [line for line in child.seen if line.startswith("lost")]
    expect_no_loss(upward + downward)


def test_a_process_lost_after_another_left_is_named(start):
    (children,) = start_groups(start, 1)
    children[1].command("leave")
    children[1].expect("done")
    assert not children[1].rest()
    children[2].kill()
    assert children[0].expect("lost") == "2 closed its connection"


def test_leaving_without_a_watch():
    calls = make_calls([0, 1], 2)
    run_threads(calls)
    leave_all(calls)
    calls[0].fail("after the end")


def test_strangers_are_ignored():
    calls = make_calls([0, 1], 2)
    port = calls[0]._part.port
    results = []
    first = threading.Thread(target=lambda: results.append(calls[0].join({"a": 1})), daemon=True)
    first.start()
    strangers = []
    for text in [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\n" * 9,
        b"[" * 100000 + b"\n",
        b'{"index": 1}\n',
        b'{"tok',
    ]:
        for _ in range(50):
            try:
                strangers.append(socket.create_connection(("127.0.0.1", port), timeout=2))
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        strangers[-1].sendall(text)
    assert calls[1].join() == {"a": 1}
    first.join(timeout=10)
    assert results == [{"a": 1}]
    for sock in strangers:
        sock.close()
    leave_all(calls)


def test_a_message_in_pieces_is_read():
    here, there = socket.socketpair()
    line = Line(here)
    for piece in (b'{"ty', b'pe": "ping"}\n{"type": ', b'"goodbye"}\n{"'):
        there.sendall(piece)
        line.receive()
    assert [message["type"] for message in line.inbox] == ["ping", "goodbye"]
    assert not line.closed
    there.close()
    line.receive()
    assert line.closed
    line.send(type="ping")
    line.close()


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InputError, match=f"^port {port} of --coordinator 127.0.0.1:{port} is already in use"):
            RollCall(f"127.0.0.1:{port}", 2, 0, {}, 1.0, print).join()


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1234", "host:x", "host:0", "host:65536", "::1:99", "a b:1"]
)
def test_a_wrong_address_is_refused(address):
    with pytest.raises(InputError, match=r"^--coordinator is .*use HOST:PORT"):
        RollCall(address, 2, 0, {}, 1.0, print)


def test_wrong_numbers_are_refused():
    for processes, index in [(2, 2), (2, -1), (0, 0)]:
        with pytest.raises(InputError, match="process index"):
            RollCall("host:1", processes, index, {}, 1.0, print)
    with pytest.raises(InputError, match="--start_timeout"):
        RollCall("host:1", 2, 0, {}, 0.0, print)


def test_an_unknown_host_is_refused(monkeypatch):
    def unknown(*arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    call = RollCall("nosuchhost.invalid:1234", 2, 1, {}, 0.4, print)
    with pytest.raises(InputError, match=r"^the host of --coordinator nosuchhost\.invalid:1234 cannot be resolved"):
        call.join()


def test_ipv6():
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 on this host")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback on this host")
    port = free_port()
    calls = [RollCall(f"[::1]:{port}", 2, index, {}, 10.0, print) for index in range(2)]
    assert run_threads(calls, {"a": 1}) == [{"a": 1}] * 2
    leave_all(calls)
