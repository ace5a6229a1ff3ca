"""Where a process stands: by flags, by SLURM's variables, on a TPU slice."""

import os
import pathlib
import subprocess
import sys

import pytest

from siamese_jax.errors import InputError
from siamese_jax.parallel.roll_call import free_port
from siamese_jax.parallel.start_up import Place, first_host, on_tpu_slice, slurm_place

ROOT = pathlib.Path(__file__).resolve().parents[2]
SLURM = {
    "SLURM_JOB_ID": "4100", "SLURM_STEP_NODELIST": "n[007-008,011],m1", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[007-015],b1", "n007"),
        ("n[001,007-015]", "n001"),
        ("gpu-a[3]", "gpu-a3"),
        ("rack[2-3]-ib,x", "rack2-ib"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_a_node_list_that_is_none():
    with pytest.raises(InputError, match=r"SLURM_STEP_NODELIST is '\[3\]'"):
        first_host("[3]")


def test_a_task_of_slurm():
    assert slurm_place(SLURM) == Place("n007:61444", 4, 2, None)  # 61440 + 4100 % 4096


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "5"}, [5]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_LOCALID": "1"}, [1]),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "5", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [5]),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "5", "CUDA_VISIBLE_DEVICES": "5"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [2, 3]),
        (
            {
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_LOCALID": "1",
                "CUDA_VISIBLE_DEVICES": "2,3",
                "SLURM_GPUS_ON_NODE": "4",
            },
            None,
        ),
    ],
)
def test_which_devices_of_its_host_a_task_has(changes, devices):
    assert slurm_place(SLURM | changes).local_devices == devices


PROGRAM = """
import os, sys, jax
from absl import flags
from siamese_jax.parallel import start_up
start_up.define_flags()
flags.FLAGS(sys.argv[:1] + ["--start_timeout=60"])
BEFORE
start_up.start_processes({}, lambda line: print(line, file=sys.stderr))
seen = jax.config.values["jax_cuda_visible_devices"]
print(jax.process_index(), jax.process_count(), seen, start_up.is_main(), sorted(start_up._call.hosts))
start_up.leave()
"""
# A TPU slice as jax would find it, of CPUs.
SLICE = """
start = jax.distributed.initialize
start_up.on_tpu_slice = lambda environment: True
jax.distributed.initialize = lambda **others: start(
    "127.0.0.1:PORT", 2, int(os.environ["INDEX"]), cluster_detection_method="deactivate", **others
)
"""


def run_two(program, environments) -> list[str]:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )
        for environment in environments
    ]  # fmt: skip
    return [each.communicate(timeout=100)[0].strip() for each in started]


def test_two_tasks_of_slurm_find_each_other():
    """One on each host, where jax itself would leave each the first GPU only."""
    step = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    job = SLURM | step | {"SLURM_JOB_ID": str(os.getpid())}  # a port of its own
    said = run_two(PROGRAM.replace("BEFORE", ""), [job | {"SLURM_PROCID": str(i)} for i in range(2)])
    assert said == ["0 2 all True [0, 1]", "1 2 all False [0, 1]"]


def test_two_hosts_of_a_slice_find_each_other():
    program = PROGRAM.replace("BEFORE", SLICE.replace("PORT", str(free_port())))
    said = run_two(program, [{"INDEX": str(i)} for i in range(2)])
    assert said == ["0 2 all True [0, 1]", "1 2 all False [0, 1]"]


def test_no_slurm_or_one_task():
    assert slurm_place({}) is None
    assert slurm_place(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert slurm_place({key: value for key, value in SLURM.items() if key != "SLURM_PROCID"}) is None  # salloc


def test_tpu_slices():
    assert on_tpu_slice({"TPU_WORKER_HOSTNAMES": "t0,t1"})
    assert not on_tpu_slice({"TPU_WORKER_HOSTNAMES": "localhost"})
    assert on_tpu_slice({"TPU_WORKER_HOSTNAMES": "t0", "MEGASCALE_COORDINATOR_ADDRESS": "t0"})
    assert not on_tpu_slice({"JAX_PLATFORMS": "cpu"})
