"""Where a process stands: by flags, by SLURM's variables, on a TPU slice."""

import os
import pathlib
import subprocess
import sys

import pytest

from siamese_jax.errors import InputError
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


def test_two_tasks_of_slurm_find_each_other():
    """One on each host, where jax itself would leave each the first GPU only."""
    job = str(os.getpid())  # a port of its own
    alone = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    program = (
        "import sys, jax\n"
        "from absl import flags\n"
        "from siamese_jax.parallel import start_up\n"
        "start_up.define_flags()\n"
        "flags.FLAGS(sys.argv)\n"
        "start_up.start_processes({}, print)\n"
        "print(jax.process_index(), jax.process_count(), jax.config.values['jax_cuda_visible_devices'])\n"
        "start_up.leave()\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, "--start_timeout=60"],
            env=os.environ | SLURM | alone | {"SLURM_JOB_ID": job, "SLURM_PROCID": str(i), "JAX_PLATFORMS": "cpu"},
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    assert [each.communicate(timeout=100)[0].split() for each in started] == [["0", "2", "all"], ["1", "2", "all"]]


def test_no_slurm_or_one_task():
    assert slurm_place({}) is None
    assert slurm_place(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert slurm_place({key: value for key, value in SLURM.items() if key != "SLURM_PROCID"}) is None  # salloc


def test_tpu_slices():
    assert on_tpu_slice({"TPU_WORKER_HOSTNAMES": "t0,t1"})
    assert not on_tpu_slice({"TPU_WORKER_HOSTNAMES": "localhost"})
    assert on_tpu_slice({"TPU_WORKER_HOSTNAMES": "t0", "MEGASCALE_COORDINATOR_ADDRESS": "t0"})
    assert not on_tpu_slice({"JAX_PLATFORMS": "cpu"})
