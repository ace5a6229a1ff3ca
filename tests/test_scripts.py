"""scripts/run_until_complete.sh with a fake program that ends as it is told, start by start.

"ok" completes the run, "stop" ends with 0 and without, "TERM" waits for that signal; a number is an exit code.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "run_until_complete.sh"
FAKE = """
workdir=$1; shift
echo start >> "$workdir/starts"
number=$(wc -l < "$workdir/starts")
word=${!number}
if [[ $word == *+* ]]; then mkdir -p "$workdir/checkpoints/${word#*+}"; fi
case ${word%+*} in
  ok) echo '{}' > "$workdir/summary.json" ;;
  stop) ;;
  TERM) trap 'mkdir -p "$workdir/checkpoints/7"; echo heard; exit 0' TERM
    echo waiting; for i in {1..100}; do sleep 0.1; done; exit 9 ;;
  KILL) kill -KILL $$ ;;
  *) exit ${word%+*} ;;
esac
"""


@pytest.fixture(autouse=True)
def interruptible():
    """What is started in the background ignores Ctrl-C, and a shell cannot trap what it was told to ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def command(tmp_path):
    """command(options, words): what runs the fake program; a word 'CODE+STEP' makes a checkpoint too."""
    fake = tmp_path / "fake.sh"
    fake.write_text(FAKE)
    workdir = tmp_path / "a run"
    workdir.mkdir()

    def make(options, words):
        own = ["bash", str(SCRIPT), f"--workdir={workdir}", "--wait=0", *options.split()]
        return [*own, "--", "bash", str(fake), str(workdir), *words.split()]

    return make


def run(command, timeout=20):
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def starts(tmp_path) -> int:
    return (tmp_path / "a run" / "starts").read_text().count("start")


@pytest.mark.parametrize(
    ("options", "words", "code", "started", "line"),
    [
        ("", "ok", 0, 1, ""),
        ("", "1 KILL 1+3 ok", 0, 4, "restart 3: exit code 1, newest checkpoint 3, failure 1 of 5"),
        ("", "1 2 ok", 2, 2, "exit code 2, no checkpoint yet: no other start"),
        ("", "130 ok", 130, 1, "exit code 130"),
        ("", "1 1 1 1 1 ok", 1, 5, "gives up: exit code 1, no checkpoint yet, failure 5 of 5"),
        ("--tries=2", "1+3 1 1 ok", 1, 2, "gives up: exit code 1, newest checkpoint 3, failure 2 of 2"),
        ("--tries=2", "1+3 1+6 1+9 KILL ok", 137, 4, "gives up: exit code 137, newest checkpoint 9"),
        ("--tries=3", "1+08 1+10 1+9 1 ok", 1, 4, "newest checkpoint 10, failure 3 of 3"),
        ("", "stop+4 ok", 0, 1, "stopped by a signal: exit code 0, newest checkpoint 4"),
        ("--keep-going", "stop+4 stop+5 ok", 0, 3, "restart 2: exit code 0, newest checkpoint 5"),
        ("--keep-going --tries=2", "stop stop ok", 1, 2, "gives up: exit code 0, no checkpoint yet"),
    ],
)
def test_endings(command, tmp_path, options, words, code, started, line):
    ended = run(command(options, words))
    assert (ended.returncode, starts(tmp_path)) == (code, started), ended.stderr
    assert line in ended.stderr
    assert ended.stderr.count("run_until_complete: restart ") == started - 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("options", ["", "--keep-going"])
def test_a_signal_is_passed_on_and_nothing_is_started_again(command, tmp_path, options, number):
    words = "TERM ok"
    if number == signal.SIGINT:
        (tmp_path / "fake.sh").write_text(FAKE.replace("exit 0' TERM", "exit 0' INT"))
    started = subprocess.Popen(command(options, words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "waiting\n"
    started.send_signal(number)
    out, err = started.communicate(timeout=10)
    assert (started.returncode, out, starts(tmp_path)) == (0, "heard\n", 1)
    assert "stopped by a signal: exit code 0, newest checkpoint 7" in err


def test_a_summary_that_shows_late_is_waited_for(command, tmp_path):
    late = command("--wait=5", "stop ok")
    started = subprocess.Popen(late, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)
    (tmp_path / "a run" / "summary.json").write_text("{}")
    assert started.communicate(timeout=10) == (None, "")
    assert started.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "true"], "--workdir is missing"),
        (["--workdir=x"], "there is no command"),
        (["--workdir=x", "--tries=0", "--", "true"], "--tries=0"),
        (["--workdir=x", "--wait=1s", "--", "true"], "--wait=1s"),
        (["--workdir=x", "--trys=3", "--", "true"], "unknown option --trys=3"),
    ],
)
def test_wrong_options(arguments, words):
    ended = run(["bash", str(SCRIPT), *arguments])
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert words in ended.stderr


def test_help():
    ended = run(["bash", str(SCRIPT), "--help"])
    assert ended.returncode == 0
    assert ended.stdout.startswith("Starts a training command") and "--keep-going" in ended.stdout
    assert "set -" not in ended.stdout


def test_a_missing_program_is_a_failure_that_is_named(tmp_path):
    command = ["bash", str(SCRIPT), f"--workdir={tmp_path}", "--wait=0", "--tries=2", "--", "./nowhere"]
    ended = run(command)
    assert ended.returncode == 127 and "gives up: exit code 127" in ended.stderr


def test_it_can_be_run(tmp_path):
    assert os.access(SCRIPT, os.X_OK)
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'summary.json')!r}).touch()"
    assert run([str(SCRIPT), f"--workdir={tmp_path}", "--", sys.executable, "-c", code]).returncode == 0
