"""A run that is interrupted anyhow and started again gives bit for bit what an undisturbed one gives."""

import json
import random
import signal

import pytest
from programs import checkpoints_of, records, shared_place, steps_written, undisturbed

STEPS = 30


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return shared_place(tmp_path_factory)


@pytest.fixture(scope="module")
def reference(place):
    """The run folder of a run that nobody disturbed."""
    workdir, ended = undisturbed(place)
    assert ended.code == 0, ended.err
    return workdir


def summary(workdir) -> dict:
    return json.loads((workdir / "summary.json").read_text(encoding="utf-8"))


def assert_same_run(workdir, reference):
    """Every line of the metrics and the final figures, bit for bit; each step once."""
    assert [record["step"] for record in records(workdir)] == list(range(1, STEPS + 1))
    assert records(workdir) == records(reference)
    for name in ("validation", "train_loss", "tokens", "step"):
        assert summary(workdir)[name] == summary(reference)[name]
    assert checkpoints_of(workdir) == checkpoints_of(reference) == [24, 27, 30]
    assert not [path for path in (workdir / "checkpoints").iterdir() if not path.name.isdecimal()]


def finish(place, workdir):
    ended = place.run(*place.arguments(workdir))
    assert ended.code == 0, ended.err
    return ended


def kill_at(place, workdir, moment) -> bool:
    """Starts the run and kills it at a moment; False where it was complete before."""
    started = place.start(*place.arguments(workdir))
    if not started.until(moment):
        assert started.ended().code == 0, started.text()
        return False
    started.signal(signal.SIGKILL)
    return started.ended().code == -signal.SIGKILL


def saving_after(workdir, step):
    """A moment: a checkpoint beyond `step` is being written."""
    folder = workdir / "checkpoints"
    return lambda: any(int(path.name.partition(".")[0]) > step for path in folder.glob("*.saving*"))


def lines_after(workdir, step):
    """A moment: metrics.jsonl has more than `step` lines."""
    return lambda: steps_written(workdir) > step


def kills(place, workdir, moments) -> int:
    """Kills at one moment after another, each beyond what is done; returns how many kills came in time."""
    return sum(kill_at(place, workdir, moment(workdir, step)) for moment, step in moments)


def test_killed_runs_continue_exactly(place, reference, tmp_path):
    """In the first steps, during a save, and late."""
    workdir = tmp_path / "run"
    assert kills(place, workdir, [(lines_after, 3), (saving_after, 8), (lines_after, 20)]) >= 2
    finish(place, workdir)
    assert_same_run(workdir, reference)


@pytest.mark.slow
def test_runs_killed_again_and_again_continue_exactly(place, reference, tmp_path):
    workdir, draw = tmp_path / "run", random.Random(1)
    steps = sorted(draw.sample(range(1, 28), 8))
    moments = [(draw.choice((saving_after, lines_after)), step) for step in steps]
    assert kills(place, workdir, moments) >= 5
    finish(place, workdir)
    assert_same_run(workdir, reference)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_says_how_to_go_on(place, reference, tmp_path, number):
    workdir = tmp_path / "run"
    arguments = place.arguments(workdir)
    started = place.start(*arguments)
    assert started.until(lines_after(workdir, 4))
    started.signal(number)
    ended = started.ended()
    assert ended.code == 0, ended.err
    assert ended.err == f"\n{number.name}: saving after this step; Ctrl-C leaves at once\n"
    stopped, command = ended.out.splitlines()[-2:]
    step = steps_written(workdir)
    assert stopped == f"stopped at step {step} of {STEPS}, saved. To go on:"
    assert command.split() == ["python", "train.py", *arguments]
    assert checkpoints_of(workdir)[-1] == step < STEPS
    again = finish(place, workdir)
    assert f"starting at step {step} of {STEPS} from checkpoint {step}" in again.out
    assert_same_run(workdir, reference)


def test_a_second_interrupt_leaves_at_once_even_while_compiling(place, reference, tmp_path):
    """Without JAX's cache the compile of the initial state takes long enough to meet it."""
    workdir = tmp_path / "run"
    started = place.start(
        *place.arguments(workdir), environment={"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "none")}
    )
    assert started.until(lambda: "devices: " in started.text()[0])
    started.signal(signal.SIGINT)
    assert started.until(lambda: "SIGINT: saving after this step" in started.text()[1])
    started.signal(signal.SIGINT)
    assert started.ended().code == 130
    assert steps_written(workdir) == 0
    finish(place, workdir)
    assert_same_run(workdir, reference)


def break_checkpoint(workdir, step) -> None:
    """Cuts the largest file of a checkpoint in half."""
    paths = [path for path in (workdir / "checkpoints" / str(step)).rglob("*") if path.is_file()]
    largest = max(paths, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


@pytest.fixture
def stopped_at_9(place, tmp_path):
    """A run folder with checkpoints 3, 6 and 9 and lines up to 9."""
    workdir = tmp_path / "run"
    assert kill_at(place, workdir, lambda: checkpoints_of(workdir)[-1:] >= [9])
    return workdir


def test_a_broken_newest_checkpoint_is_passed_over(place, reference, stopped_at_9):
    steps = checkpoints_of(stopped_at_9)
    break_checkpoint(stopped_at_9, steps[-1])
    strict = place.run(*place.arguments(stopped_at_9, "checkpoint.strict=True"))
    assert strict.code == 2 and strict.err.count("\n") == 1
    assert strict.err.startswith(f"error: checkpoint {steps[-1]} in ") and "is broken" in strict.err
    ended = finish(place, stopped_at_9)
    told = [line for line in ended.out.splitlines() if "is broken" in line]
    assert len(told) == 1 and f"checkpoint {steps[-1]} is broken" in told[0]
    assert f"going back to {steps[-2]}: steps {steps[-2] + 1} to {steps[-1]} are lost" in told[0]
    (stopped_at_9 / "checkpoints" / f"{steps[-1]}.aside1").rename(stopped_at_9 / "aside")
    assert_same_run(stopped_at_9, reference)


def test_a_run_with_only_broken_checkpoints_stops(place, stopped_at_9):
    for step in checkpoints_of(stopped_at_9):
        break_checkpoint(stopped_at_9, step)
    ended = place.run(*place.arguments(stopped_at_9))
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert ended.err.startswith(f"error: no checkpoint in {stopped_at_9 / 'checkpoints'} is sound")


def test_a_disk_that_fills_up_during_a_save_ends_the_run(place, reference, tmp_path):
    """RLIMIT_FSIZE is a full disk that needs no mount: writes beyond it fail."""
    workdir = tmp_path / "run"
    assert kill_at(place, workdir, lambda: checkpoints_of(workdir)[-1:] >= [3])
    last = checkpoints_of(workdir)[-1]
    ended = place.run(*place.arguments(workdir), file_bytes=40_000)
    assert ended.code == 1
    assert ended.err.count("\n") == 1, ended.err
    assert f"fault: checkpoint {last + 3} could not be saved" in ended.err
    assert f"the newest complete one is {last}" in ended.err
    assert checkpoints_of(workdir)[-1] == last
    finish(place, workdir)
    assert_same_run(workdir, reference)


def test_a_disk_that_does_not_take_the_metrics_ends_the_run(place, reference, tmp_path):
    workdir = tmp_path / "run"
    ended = place.run(*place.arguments(workdir, "checkpoint.every=1000"), file_bytes=2_600)
    assert ended.code == 1
    assert ended.err.count("\n") == 1, ended.err
    assert ended.err.startswith(f"fault: cannot write {workdir / 'metrics.jsonl'} at step ")
    finish(place, workdir)
    assert_same_run(workdir, reference)
