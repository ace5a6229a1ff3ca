"""train.py as a newcomer meets it: a whole run, its output and files, --json, --help, a finished run again."""

import json
import os
import pty
import subprocess
import sys
import termios

import pytest
from programs import ROOT, SAMPLE, checkpoints_of, records, shared_place, snapshot, undisturbed


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return shared_place(tmp_path_factory)


@pytest.fixture(scope="module")
def normal(place):
    """(run folder, how it ended) of an ordinary run."""
    workdir, ended = undisturbed(place)
    return workdir, ended, place.arguments(workdir, *SAMPLE)


def test_a_run_trains_and_says_what_it_did(normal):
    workdir, ended, _ = normal
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0] == "configuration"
    order = [
        "group ",
        "model: ",
        "data: ",
        "devices: 1 x cpu",
        "starting at step 0 of 30",
        "compiled the step",
    ]
    order += ["step  1/30", "step 10/30", "step 30/30", f"the run in {workdir} is complete", "to evaluate:"]
    places = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in order]
    assert places == sorted(places)
    losses = [record["loss"] for record in records(workdir)]
    assert losses[-1] < losses[0]


def test_a_run_says_nothing_strange(normal):
    """No log lines, warnings or bars."""
    _, ended, _ = normal
    assert ended.err == ""
    assert "\r" not in ended.out


def test_the_run_folder_holds_what_the_design_says(normal):
    workdir, _, _ = normal
    assert {path.name for path in workdir.iterdir() if "tfevents" not in path.name} == {
        "config.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "summary.json",
    }  # fmt: skip
    assert len(list(workdir.glob("events.out.tfevents.*"))) == 1
    assert checkpoints_of(workdir) == [24, 27, 30]
    lines = records(workdir)
    assert [line["step"] for line in lines] == list(range(1, 31))
    named = {"tokens", "loss", "learning_rate", "grad_norm", "param_norm", "update_norm"}
    assert all(named <= line.keys() for line in lines)
    validated = [line["step"] for line in lines if {"validation/loss", "validation/bits_per_byte"} <= line.keys()]
    assert validated == [10, 20]
    watched = [line["step"] for line in lines if {"post_rms/1", "pre_rms/1", "post_over_pre/0"} <= line.keys()]
    assert watched == [7, 14, 21, 28]
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["status"] == "complete" and summary["train_loss"] == lines[-1]["loss"]


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_a_finished_run_again_changes_nothing(place, normal, json_flag):
    workdir, _, arguments = normal
    before = snapshot(workdir)
    ended = place.run(*arguments, *json_flag)
    assert ended.code == 0 and ended.err == ""
    if json_flag:
        assert json.loads(ended.out)["status"] == "complete already"
    else:
        assert ended.out.startswith(f"the run in {workdir} is complete already")
    assert snapshot(workdir) == before


def test_json_prints_one_object(place):
    workdir = place.folder / "json"
    ended = place.run(*place.arguments(workdir), "--json")
    assert ended.code == 0
    result = json.loads(ended.out)
    assert ended.out.count("\n") == 1 and result["step"] == 30 and result["validation"]["tokens"] > 0
    assert "starting at step 0 of 30" in ended.err


def test_help_shows_the_docstring_and_every_flag(place):
    ended = place.run("--help")
    assert ended.code == 0 and ended.err == ""
    assert ended.out.startswith("Trains a language, image or diffusion model")
    for flag in ("--workdir", "--config", "--[no]json"):
        assert flag in ended.out


def test_the_closing_command_starts_a_new_run_from_the_weights(place, normal):
    workdir, ended, _ = normal
    command = ended.out.splitlines()[-1].split()
    assert command[:2] == ["python", "train.py"]
    again = place.run(*command[2:])
    assert again.code == 0, again.err
    assert f"starting at step 0 of 30 from the weights of {workdir}, checkpoint 30" in again.out
    assert records(f"{workdir}-2")[0]["loss"] < records(workdir)[0]["loss"]


def test_bars_appear_on_a_terminal(place):
    """And only there: `test_a_run_says_nothing_strange` is the other half."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    arguments = place.arguments(place.folder / "terminal")
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments], cwd=ROOT, env=place.environment | {"TERM": "xterm"},
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0
    assert b"\r" in shown and b"step/s" in shown and b"30/30" in shown


def test_our_package_uses_nothing_deprecated(place):
    """Own process: warnings are counted from the first import on."""
    workdir = place.folder / "warnings"
    started = place.start(
        *place.arguments(workdir),
        environment={"PYTHONWARNINGS": "always::DeprecationWarning,always::FutureWarning"},
    )
    ended = started.ended()
    assert ended.code == 0, ended.err
    warned = [line for line in ended.err.splitlines() if "Warning:" in line]
    assert not [line for line in warned if str(ROOT) in line]
