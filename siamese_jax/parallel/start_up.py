"""Start and end of a run's processes: who they are, that all are there and alike, and what one's end means to all.

One process needs none of this. Several are told by flags, by SLURM or by a TPU slice.
"""

import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils

from siamese_jax.errors import FaultError, InputError
from siamese_jax.parallel import lines, linger
from siamese_jax.parallel.roll_call import RollCall, free_port

START_TIMEOUT, LOST_AFTER = 300, 60
SHUTDOWN_TIMEOUT = 60
_ERROR, _FAULT = 2, 1  # exit codes
_call: RollCall | None = None
_holder = None  # the child that holds process 0's sockets
_index = 0


class Place(NamedTuple):
    """Where a process stands. local_devices: indices of the host's devices that are its own, None = all visible."""

    coordinator: str
    count: int
    index: int
    local_devices: list[int] | None = None


def define_flags() -> None:
    """--coordinator, --processes, --process and the two timeouts."""
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0; needless on SLURM and TPU slices.")
    flags.DEFINE_integer("processes", None, "Number of processes; 1 also where SLURM or a TPU slice says more.")
    flags.DEFINE_integer("process", None, "Index of this process, from 0.")
    flags.DEFINE_float("start_timeout", START_TIMEOUT, "Seconds to wait for the other processes.", lower_bound=1)
    flags.DEFINE_float("lost_after", LOST_AFTER, "Seconds of silence after which a process is lost.", lower_bound=1)


def start_processes(facts: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Joins the other processes, if there are any; to be called before anything touches a device.

    facts: what must be equal on all, by name. InputError, on every process, where one differs, FaultError where one
    is missing.
    From here on a lost process ends all others within seconds of being noticed, with a line that names it.
    """
    given = flags.FLAGS
    place = _given_place(given.coordinator, given.processes, given.process)
    if place is None and given.processes != 1:
        place = slurm_place(os.environ)
    if place is not None:
        if place.count > 1:
            _start_at(place, facts, say)
    elif given.processes != 1 and on_tpu_slice(os.environ):
        _start_on_tpu(facts, say)


def is_shared() -> bool:
    """Whether there are other processes."""
    return _call is not None


def is_main() -> bool:
    """Whether this process writes and speaks for all. Touches no device."""
    return _index == 0


def fail(line: str) -> None:
    """Tells the other processes that this one ends: `line` starts with 'error: ' or 'fault: '."""
    if _call is not None:
        _call.fail(line)


def leave() -> None:
    """The good end, after which no process takes this one for lost. Waits for the others to come to theirs."""
    global _call
    if _call is not None:
        linger.let_go(_holder)
        jax.distributed.shutdown()
        _call.leave()
        _call = None


def label() -> str:
    """'process 2: ' where there are several."""
    return f"process {_index}: " if _call is not None else ""


def _given_place(coordinator: str | None, count: int | None, index: int | None) -> Place | None:
    if coordinator is None and index is None and count in (None, 1):
        return None
    if None in (coordinator, count, index):
        raise InputError(
            f"--coordinator {coordinator}, --processes {count} and --process {index}: give all three or none"
        )
    return Place(coordinator, count, index)


def slurm_place(environment: Mapping[str, str]) -> Place | None:
    """The place that `srun` gave this task; None outside of one, or where it is the only task."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if any(name not in environment for name in names):
        return None
    job, nodes, count, index, local = (environment[name] for name in names)
    if int(count) == 1:
        return None
    port = 61440 + int(job) % 4096  # the same for all tasks, another for the next job
    return Place(f"{first_host(nodes)}:{port}", int(count), int(index), _devices_of_task(environment, int(local)))


def _devices_of_task(environment: Mapping[str, str], local: int) -> list[int] | None:
    """An equal share of what a host's tasks all see; None, all, where there is one task or each sees its own."""
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    num_tasks = max(int(tasks[0]) if tasks else 1, local + 1)
    visible = len([name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name])
    bound = visible == 1 or 0 < visible < int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    if num_tasks == 1 or bound:
        return None
    share = max(1, visible // num_tasks)
    return list(range(local * share, (local + 1) * share))


def first_host(nodes: str) -> str:
    """The first host of SLURM's list: 'a3' of 'a3,b1', 'n007' of 'n[007-015,020],b1'."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise InputError(f"SLURM_STEP_NODELIST is {nodes!r}: give --coordinator, --processes and --process")
    return "".join(part or "" for part in match.groups())


def on_tpu_slice(environment: Mapping[str, str]) -> bool:
    """Whether this may be one host of several of a TPU slice; jax asks the slice itself for the rest."""
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "")
    if hosts:
        return "," in hosts or "MEGASCALE_COORDINATOR_ADDRESS" in environment
    wanted = environment.get("JAX_PLATFORMS", "")
    is_vm = os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")
    return is_vm and "TPU_SKIP_MDS_QUERY" not in environment and wanted in ("", "tpu", "tpu,cpu")


def _timeouts() -> dict:
    seconds = int(flags.FLAGS.start_timeout), max(10, 2 * int(flags.FLAGS.lost_after)), SHUTDOWN_TIMEOUT
    names = ("initialization_timeout", "heartbeat_timeout_seconds", "shutdown_timeout_seconds")
    return dict(zip(names, seconds, strict=True))


def _start_at(place: Place, facts, say) -> None:
    """Roll call first, so that whoever is missing has a name; then jax, at a port that process 0 chose."""
    _watch(place, facts, say, {"port": free_port()} if place.index == 0 else None, _initialize)


def _keep_stdout() -> None:
    """What C++ prints there (gloo, a line for every peer) goes to stderr: stdout is the program's own."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", buffering=1, encoding=sys.stdout.encoding)


def _initialize(place: Place, announced: dict) -> None:
    _keep_stdout()
    address = f"{place.coordinator.rpartition(':')[0]}:{announced['port']}"
    jax.distributed.initialize(
        address, place.count, place.index, local_device_ids=place.local_devices,
        cluster_detection_method="deactivate",  # which would leave a SLURM task one GPU of its host
        coordinator_bind_address=f"{'[::]' if address.startswith('[') else '0.0.0.0'}:{announced['port']}",
        **_timeouts(),
    )  # fmt: skip


def _start_on_tpu(facts, say) -> None:
    """jax knows the slice; only then is there an address for the roll call."""
    say("waiting for all hosts of the TPU slice")
    _keep_stdout()
    try:
        jax.distributed.initialize(**_timeouts())
    except (ValueError, RuntimeError) as error:  # what it cannot find out, and who does not come
        raise (InputError if isinstance(error, ValueError) else FaultError)(
            f"the hosts of the TPU slice did not come together ({' '.join(str(error).split())[:200]}): "
            "start the program on all of them, or give --processes=1 for this host alone"
        ) from error
    if jax.process_count() > 1:
        place = Place(_shared_address(), jax.process_count(), jax.process_index())
        _watch(place, facts, say, None, lambda *_: None)


def _shared_address() -> str:
    """HOST:PORT of a free port of process 0, on all processes."""
    own = f"{_outward_address()}:{free_port()}".encode().ljust(64)
    rows = multihost_utils.broadcast_one_to_all(np.frombuffer(own, np.uint8))
    return bytes(np.asarray(rows, np.uint8)).decode().strip()


def _outward_address() -> str:
    """This host's address for others; its name may stand for 127.0.1.1 here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # an address of nobody; of a datagram socket this sends nothing
            return sock.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _watch(place: Place, facts, say, announcement, then: Callable[[Place, dict], None]) -> None:
    global _call, _holder, _index
    given = flags.FLAGS
    call = RollCall(place.coordinator, place.count, place.index, dict(facts), given.start_timeout, say)
    announced = call.join(announcement)
    call.watch(lambda index, why: _on_loss(place, call.hosts.get(index, "?"), index, why), given.lost_after)
    _call, _index = call, place.index
    then(place, announced)
    if place.index == 0:
        _holder = linger.hold_sockets(except_for=lines.descriptors())


def _on_loss(place: Place, host: str, index: int, why: str) -> None:
    """Ends this process at once: what waits for the lost one would wait for ever."""
    kind, _, text = why.partition(": ")
    if kind in ("error", "fault"):
        line, code = f"{kind}: process {index} on {host}: {text}", _ERROR if kind == "error" else _FAULT
    else:
        line = (
            f"fault: process {index} of {place.count} on {host} {why}, so process {place.index} stops too: start "
            "all again, and the run goes on from its newest checkpoint"
        )
        code = _FAULT
    sys.stdout.flush()
    os.write(2, f"{line}\n".encode())
    os._exit(code)
