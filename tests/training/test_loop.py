"""The training loop in this process: signals at moments that no clock can hit, and a loss that is not finite."""

import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest
from programs import checkpoints_of, records, shared_place, undisturbed

from siamese_jax.checkpoint import Checkpoints, read_about
from siamese_jax.data.loader import WindowLoader
from siamese_jax.errors import FaultError
from siamese_jax.evaluation import validation
from siamese_jax.evaluation.perplexity import DomainsEvaluator
from siamese_jax.models.initialize import parameter_shapes
from siamese_jax.training.loop import build, train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return shared_place(tmp_path_factory)


@pytest.fixture(autouse=True)
def surroundings(place, monkeypatch):
    """The token stores and compiled programs of the place."""
    monkeypatch.setenv("SIAMESE_JAX_CACHE", place.environment["SIAMESE_JAX_CACHE"])
    shared = {
        "jax_compilation_cache_dir": place.environment["JAX_COMPILATION_CACHE_DIR"],
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in shared}
    for name, value in shared.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def run(place, tmp_path, monkeypatch):
    """Trains in this process; returns the summary. `run.said` holds the lines, `run.workdir` is the folder."""

    def go(evaluator=DomainsEvaluator):
        config = place.read_config("eval.prompt=abc", "eval.sample_tokens=5")
        monkeypatch.setattr(validation, "DomainsEvaluator", evaluator)
        return train(config, str(go.workdir), make_validation=validation.make_validation, say=go.said.append)

    go.workdir, go.said = tmp_path / "run", []
    return go


def interrupted_after(step: int, number: int):
    """An evaluator whose pass at the given call sends this process a signal after its first batch."""

    class Interrupted(DomainsEvaluator):
        calls = 0

        def __call__(self, params, progress=None, whole=False):
            Interrupted.calls += 1

            def interrupt(done):
                if Interrupted.calls == step and not interrupt.sent:
                    interrupt.sent = True
                    os.kill(os.getpid(), number)
                progress(done)

            interrupt.sent = False
            return super().__call__(params, interrupt, whole)

    return Interrupted


def summary_of(workdir) -> dict:
    return json.loads((workdir / "summary.json").read_text(encoding="utf-8"))


def assert_undisturbed(run, place):
    folder, _ = undisturbed(place)
    assert records(run.workdir) == records(folder)
    for name in ("validation", "train_loss", "samples", "tokens"):
        assert summary_of(run.workdir)[name] == summary_of(folder)[name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_validation_is_heard_and_the_validation_made_up_for(place, run, number, capfd):
    result = run(interrupted_after(2, number))
    assert (result["status"], result["step"], result["steps"]) == ("stopped", 20, 30)
    assert f"{number.name}: saving after this step" in capfd.readouterr().err
    assert [line for line in run.said if "validation given up" in line]
    assert checkpoints_of(run.workdir)[-1] == 20
    assert [line["step"] for line in records(run.workdir)] == list(range(1, 20))  # 20 is owed
    assert read_about(run.workdir / "checkpoints")[1]["owed"]["loss"] > 0
    again = run(interrupted_after(1, number))  # in the very validation that is made up for
    assert (again["status"], again["step"]) == ("stopped", 20)
    assert [line["step"] for line in records(run.workdir)] == list(range(1, 20))
    assert run()["status"] == "complete"
    assert_undisturbed(run, place)


def test_a_debt_that_was_settled_before_a_kill_is_not_settled_twice(place, run, tmp_path):
    """The line is in metrics.jsonl, but the newest checkpoint still says that it is owed."""
    run(interrupted_after(2, signal.SIGTERM))
    checkpoints = run.workdir / "checkpoints"
    shutil.copytree(checkpoints, tmp_path / "kept")
    assert run()["status"] == "complete"
    shutil.rmtree(checkpoints)
    shutil.copytree(tmp_path / "kept", checkpoints)
    (run.workdir / "summary.json").unlink()
    assert run()["status"] == "complete"
    assert_undisturbed(run, place)


def test_a_signal_in_the_last_validation_is_heard(place, run):
    result = run(interrupted_after(3, signal.SIGTERM))
    assert (result["status"], result["step"]) == ("stopped", 30)
    assert checkpoints_of(run.workdir)[-1] == 30 and not (run.workdir / "summary.json").exists()
    assert run()["status"] == "complete"
    assert_undisturbed(run, place)


def test_signals_are_handed_back(run):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run(interrupted_after(1, signal.SIGTERM))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1


def strict_lines(path) -> list[dict]:
    """metrics.jsonl as strict JSON, in which there is no NaN."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_loss_that_is_not_finite_ends_the_run(place, run, monkeypatch):
    """The eighth batch has a weight that is NaN."""
    batch = WindowLoader.batch

    def spoiled(self, step):
        rows = batch(self, step)
        return rows | {"weights": np.full_like(rows["weights"], np.nan)} if step == 7 else rows

    monkeypatch.setattr(WindowLoader, "batch", spoiled)
    with pytest.raises(FaultError) as caught:
        run()
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("training stopped at step 8: ") and "loss nan" in message
    lines = strict_lines(run.workdir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["loss"] is None and lines[-1]["non_finite"]["loss"] == "NaN"
    assert "last finite metrics: step 7, " in message and f"loss {lines[6]['loss']:.6g}" in message
    assert "checkpoint 6 is the one to return to" in message
    config = place.read_config()
    shapes = {"params": parameter_shapes(build(config, str(run.workdir.parent / "other")).model_config)}
    assert checkpoints_of(run.workdir) == [3, 6]
    with Checkpoints(run.workdir / "checkpoints") as checkpoints:
        for step in (3, 6):
            _, state, _ = checkpoints.restore(shapes, step, partial=True)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_an_absurd_learning_rate_ends_the_program_with_one_line(place, tmp_path):
    workdir = tmp_path / "run"
    overrides = ("schedule.peak=1e25", "optimizer.clip_norm=0.0")
    ended = place.run(*place.arguments(workdir, *overrides))
    assert ended.code == 1
    assert ended.err.startswith("fault: training stopped at step 1: ") and ended.err.count("\n") == 1
    assert "last finite metrics: none; there is no checkpoint yet" in ended.err
    assert [line["step"] for line in strict_lines(workdir / "metrics.jsonl")] == [1]
    assert checkpoints_of(workdir) == []
