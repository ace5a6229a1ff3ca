"""tests/faults.py: three chosen rounds here, thirty random ones with -m slow.

In a process of its own, because it forks the processes of the runs: nothing of jax may live in it.
"""

import json
import subprocess
import sys

import pytest
from faults import EVERY
from programs import ROOT


def faults(folder, *options, timeout) -> dict:
    command = [sys.executable, "-m", "tests.faults", "--json", f"--folder={folder}", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def assert_little_lost(result):
    assert result["failed"] == {} and result["wrong_losses"] == 0
    assert result["max_steps_lost"] <= EVERY and result["max_steps_lost_during_save"] <= 2 * EVERY


def test_three_chosen_faults(tmp_path):
    """SIGKILL during a save, SIGTERM of another than process 0 in the final evaluation, SIGKILL of process 0."""
    result = faults(tmp_path, "--short", timeout=240)
    assert result["signals"] == {"SIGKILL save": 1, "SIGKILL training": 1, "SIGTERM final evaluation": 1}
    assert result["rounds"] == 3 and result["came_too_late"] == 0 and result["exact"]
    assert_little_lost(result)


@pytest.mark.slow
def test_thirty_random_rounds(tmp_path):
    result = faults(tmp_path, "--runs=30", timeout=3000)
    assert result["rounds"] == 30 and sum(result["signals"].values()) >= 30
    assert_little_lost(result)
