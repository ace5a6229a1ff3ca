"""Metrics on disk across resumes, and the arithmetic of speed with a fake clock."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.errors import FaultError, InputError
from siamese_jax.training import metrics
from siamese_jax.training.metrics import MetricWriter, Throughput, read_metrics


def write(workdir, resume_step, steps):
    writer = MetricWriter(workdir, resume_step)
    for step in steps:
        writer.write(step, {"loss": 10.0 * step})
    writer.close()


def steps_of(workdir):
    return [record["step"] for record in read_metrics(workdir / "metrics.jsonl")]


def test_lines_and_events(tmp_path):
    writer = MetricWriter(tmp_path / "run")
    writer.write(1, {"tokens": 64, "loss": jnp.float32(0.5), "validation/loss": np.float64(0.25)})
    path = tmp_path / "run" / "metrics.jsonl"
    assert path.read_text() == '{"step": 1, "tokens": 64, "loss": 0.5, "validation/loss": 0.25}\n'  # flushed
    writer.close()
    assert any(file.stat().st_size for file in (tmp_path / "run").glob("events.out.tfevents.*"))


def test_non_finite_values_are_valid_json_and_come_back(tmp_path):
    writer = MetricWriter(tmp_path)
    writer.write(3, {"loss": jnp.float32("nan"), "grad_norm": math.inf, "update_norm": -math.inf, "mfu": 0.5})
    writer.close()

    def reject(constant):
        raise AssertionError(constant)

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=reject)
    assert record["loss"] is None
    assert record["non_finite"] == {"loss": "NaN", "grad_norm": "Infinity", "update_norm": "-Infinity"}
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record.pop("loss"))
    assert record == {"step": 3, "grad_norm": math.inf, "update_norm": -math.inf, "mfu": 0.5}


def test_resume_cuts_what_the_killed_run_left(tmp_path):
    write(tmp_path, 0, range(1, 8))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    write(tmp_path, 4, [5, 6])
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert [file.name for file in tmp_path.iterdir() if "events" not in file.name] == ["metrics.jsonl"]


def test_resume_beyond_the_last_line_drops_the_torn_one(tmp_path):
    write(tmp_path, 0, [10, 20])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 30, "loss": 1.0}')  # whole, but without its newline
    write(tmp_path, 25, [30])
    assert steps_of(tmp_path) == [10, 20, 30]


def test_a_start_from_scratch_keeps_nothing(tmp_path):
    write(tmp_path, 0, [0, 1, 2])
    write(tmp_path, 0, [0, 1])
    assert steps_of(tmp_path) == [0, 1]


def test_a_step_is_never_written_twice(tmp_path):
    write(tmp_path, 0, [1, 2])
    writer = MetricWriter(tmp_path, 2)
    with pytest.raises(ValueError, match="step 2 after step 2"):
        writer.write(2, {"loss": 1.0})
    writer.close()


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(InputError, match=r"metrics.jsonl line 2 is not JSON .*not json"):
        read_metrics(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_in_one_line(tmp_path):
    writer = MetricWriter(tmp_path)
    writer._file = open("/dev/full", "w")
    with pytest.raises(FaultError, match=r"cannot write .*metrics\.jsonl at step 7: No space"):
        writer.write(7, {"loss": 1.0})
    writer._board.close()


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_throughput_leaves_pauses_out():
    clock = Clock()
    speed = Throughput(1000, num_steps=50, flops_per_unit=6.0, peak_flops=24_000.0, clock=clock)
    clock.now += 60  # compilation, before the first tick
    speed.tick(11)
    assert speed.summary() == {}
    clock.now += 2
    speed.tick(12)
    with speed.paused():
        clock.now += 500
    clock.now += 1
    speed.pause()
    clock.now += 30
    speed.resume()
    clock.now += 1
    speed.tick(13)
    assert speed.summary() == pytest.approx(
        {"tokens_per_second": 500, "step_seconds": 2, "eta_seconds": 74, "mfu": 0.125}
    )


def test_throughput_slides_and_takes_strides():
    clock = Clock()
    speed = Throughput(100, num_steps=1000, window=2, clock=clock)
    for step, seconds in ((10, 0), (20, 1000), (30, 20), (40, 60)):
        clock.now += seconds
        speed.tick(step)
    assert speed.summary() == pytest.approx({"tokens_per_second": 25, "step_seconds": 4, "eta_seconds": 3840})


def test_pauses_do_not_nest_and_end_after_an_error():
    speed = Throughput(1, num_steps=1, clock=Clock())
    with pytest.raises(RuntimeError, match="do not nest"), speed.paused():
        speed.pause()
    speed.pause()


def test_flops_per_token():
    assert metrics.flops_per_token(1000, num_layers=2, attention_width=8, length=16) == 6000 + 12 * 2 * 8 * 16
    assert metrics.flops_per_token(1000, 2, 8, 16, causal=True) == 6000 + 6 * 2 * 8 * 16


def test_format_line():
    record = {
        "mfu": 0.3825,
        "loss": 3.41234,
        "learning_rate": 4e-4,
        "grad_norm": 0.4321,
        "tokens_per_second": 52_123.0,
        "eta_seconds": 7384,
        "param_norm": 1.0,
    }
    assert metrics.format_line(12, 10_000, record) == (
        "step    12/10000  loss 3.4123  lr 4.00e-04  grad 0.432  52.1k tokens/s  mfu 38.2%  2h03m left"
    )
    assert metrics.format_line(1, 5, {"loss": math.nan}) == "step 1/5  loss nan"


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.42, "0.4s"),
        (9.96, "10.0s"),
        (45.4, "45s"),
        (59.6, "1m00s"),
        (200, "3m20s"),
        (3599.9, "1h00m"),
        (7384, "2h03m"),
        (4 * 86400 + 6.5 * 3600, "4d06h"),
        (math.inf, "unknown"),
        (math.nan, "unknown"),
    ],
)
def test_format_duration(seconds, text):
    assert metrics.format_duration(seconds) == text


@pytest.mark.parametrize(
    "value, text",
    [
        (7, "7"),
        (950, "950"),
        (1000, "1.00k"),
        (12_345, "12.3k"),
        (950_000, "950k"),
        (999_900, "1.00M"),
        (4.56e9, "4.56B"),
    ],
)
def test_format_count(value, text):
    assert metrics.format_count(value) == text


FULL_DISK = """
import resource, signal, sys
from siamese_jax.errors import FaultError
from siamese_jax.training.metrics import MetricWriter
writer = MetricWriter(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    for step in range(1, 1000):
        writer.write(step, {"loss": 1.0})
except FaultError as fault:
    print(fault)
"""


def test_a_full_disk_is_told_and_does_not_hang(tmp_path):
    """The events are longer than the lines, so they meet the limit first."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("cannot write ") and "File too large" in done.stdout, done
