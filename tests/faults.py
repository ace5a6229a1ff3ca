"""Kills and stops real training runs at random moments, and checks what was lost, who said so, and the bits.

python -m tests.faults --runs 30; python -m tests.faults --help tells the rest.
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import pathlib
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings

from tests.programs import ROOT, Place, checkpoints_of, records, write_corpus

HELP = """\
Each round trains a tiny model (60 updates, a checkpoint every 3, a validation every 20) with real processes of
train.py in a run folder of its own, sends SIGKILL or SIGTERM to a random one of them, one to three times, and
starts all again until the run is complete. A third of the signals come at a moment uniform over the run, a third
during a save, a third during an evaluation. Every fifth round has one process only. Checked in every round:

  SIGTERM   all processes exit with 0 and the newest checkpoint is the step where they stopped. Before the
            processes are one run (jax.distributed) it just ends the process: nothing may be lost then either
  SIGKILL   the others exit with 1 within 30 s with a line that names the killed one; while they wait for each
            other, after --start_timeout. Lost are at most the steps of one checkpoint interval, of two
            where a save was in flight
  restart   starts from the newest checkpoint, and says so
  the end   every step once, every loss and every figure of the final validation as in an undisturbed run of as
            many processes: bit for bit, where two undisturbed runs agree bit for bit (else within 1e-6)

The processes are forked from one that has done the imports, and read a cache of compiled steps, which saves
about ten seconds each; --fresh starts `python train.py` from scratch instead. Whoever runs longer than --limit
is reported with what py-spy sees, and fails its round. Folders of failed rounds are kept. Exit code: 0 if all
rounds went well, 1 if not.

examples:
  python -m tests.faults --runs 30
  python -m tests.faults --runs 30 --only 17     # round 17 of those 30 again
  python -m tests.faults --runs 10 --processes 3 --devices 1 --seed 4
  python -m tests.faults --short                 # three chosen rounds, about a minute
"""
STEPS, SHORT_STEPS, EVERY, EVAL_EVERY = 60, 30, 3, 20
START_TIMEOUT, SURVIVE = 20, 30  # seconds
FINAL, STARTING = "evaluating the whole validation set", "starting at step"
DELAYS = {"save": 0.08, "validation": 1.0, "final evaluation": 1.0}  # seconds into a moment, at most
NAMES = {signal.SIGKILL: "SIGKILL", signal.SIGTERM: "SIGTERM"}


class Failed(Exception):
    """A round that went wrong, in one line. wrong: losses that differ."""

    def __init__(self, why: str, wrong: int = 0):
        super().__init__(why)
        self.wrong = wrong


@dataclasses.dataclass(frozen=True)
class Fault:
    """One signal of a plan. at: where in the run (0 to 1) the moment is looked for; delay: seconds into it."""

    number: int
    process: int
    moment: str
    at: float
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to happen in a round."""

    name: str
    processes: int
    faults: tuple[Fault, ...]


@dataclasses.dataclass
class Hit:
    """What a signal met and did. lost: steps; others: seconds until the last other process had ended."""

    signal: str
    process: int
    moment: str
    step: int
    lost: int = 0
    saving: bool = False
    others: float = 0.0
    kind: str = ""

    def __str__(self) -> str:
        lost = f", lost {self.lost}" if self.lost else ""
        kind = f", {self.kind}" if self.kind else ""
        return f"{self.signal} {self.process} in {self.moment} at {self.step}{lost}{kind}"


@dataclasses.dataclass
class Reference:
    """What an undisturbed run gave, how long it took to its first step, and to its end."""

    records: list[dict]
    validation: dict
    first_step: float = 0.0
    seconds: float = 0.0
    exact: bool = True


class Child:
    """One running process of train.py."""

    def __init__(self, index: int, pid: int, outputs: pathlib.Path):
        self.index, self.pid, self.outputs = index, pid, outputs
        self.code, self.end = None, 0.0

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.code, self.end = os.waitstatus_to_exitcode(status), time.monotonic()
        return self.code is not None

    def kill(self, number: int = signal.SIGKILL) -> None:
        if not self.poll():
            os.kill(self.pid, number)

    def out(self) -> str:
        return self.outputs.with_suffix(".out").read_text(encoding="utf-8", errors="replace")

    def err(self) -> str:
        return self.outputs.with_suffix(".err").read_text(encoding="utf-8", errors="replace")


class Start:
    """All processes of a run, started once."""

    def __init__(self, lab: "Lab", workdir: pathlib.Path, processes: int, write_cache: bool = False):
        self.workdir, self.began, self.steps = workdir, time.monotonic(), lab.steps
        self.limit = lab.options.limit
        self.before, self.stale = newest(workdir), saving(workdir)
        self.number = len(list(workdir.parent.glob(f"{workdir.name}.*.0.out")))
        arguments = lab.arguments(workdir, processes)
        self.children = [self._child(lab, i, processes, arguments, write_cache) for i in range(processes)]

    def _child(self, lab, index, processes, arguments, write_cache) -> Child:
        outputs = self.workdir.with_name(f"{self.workdir.name}.{self.number}.{index}.x")
        for suffix in (".out", ".err"):
            outputs.with_suffix(suffix).touch()
        own = [*arguments, f"--process={index}"] if processes > 1 else arguments
        devices = lab.options.devices * (1 if processes > 1 else lab.options.processes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fork: no backend of jax is alive in this process
            pid = os.fork()
        if pid == 0:
            _become(own, outputs, devices, lab.options, write_cache)
        return Child(index, pid, outputs)

    def said(self) -> str:
        return self.children[0].out()

    def origin(self) -> int | None:
        """The step that this start says it starts from; None before it says so."""
        found = re.search(rf"^{STARTING} (\d+) of {self.steps} from", self.said(), re.M)
        return int(found[1]) if found else None

    def until(self, condition) -> bool:
        """Waits for the condition; False where a process ended before. Failed, with dumps, after --limit."""
        while not condition():
            if any([child.poll() for child in self.children]):
                return False
            self._check_limit()
            time.sleep(0.004)
        return True

    def ended(self) -> list[int]:
        """The exit codes of all processes."""
        while not all([child.poll() for child in self.children]):
            self._check_limit()
            time.sleep(0.004)
        return [child.code for child in self.children]

    def _check_limit(self) -> None:
        if time.monotonic() - self.began > self.limit:
            dumps = [dump(child) for child in self.children if not child.poll()]
            self.end()
            raise Failed(f"HANG: {len(dumps)} processes still there after {self.limit} s; see {dumps}")

    def end(self) -> None:
        """Ends what is left of it."""
        for child in self.children:
            child.kill()
        while not all([child.poll() for child in self.children]):
            time.sleep(0.01)


def _become(arguments, outputs, devices, options, write_cache) -> None:
    """Turns this forked process into train.py."""
    try:
        os.setpgid(0, 0)  # Ctrl-C is for the program that tests
        with contextlib.suppress(AttributeError):  # Linux: a tester that is killed leaves nobody behind
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        os.chdir(ROOT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(outputs.with_suffix(suffix), os.O_WRONLY), number)
        if options.fresh:
            os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
            if not write_cache:
                os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1e9"
            os.execv(sys.executable, [sys.executable, "train.py", *arguments])
        _configure(devices, write_cache)
        sys.argv = ["train.py", *arguments]
        runpy.run_path("train.py", run_name="__main__")
        sys.exit(0)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def _configure(devices: int, write_cache: bool) -> None:
    import jax
    from jax._src import compiler

    jax.config.update("jax_num_cpu_devices", devices)
    # Keys of compiled programs differ between processes on CPUs, but jax lets only process 0 write.
    compiler.distributed = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0, client=None))
    if not write_cache:  # a kill would leave half of an entry, which is never replaced
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)


def dump(child: Child) -> str:
    """The file with what py-spy sees of a process."""
    beside = pathlib.Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy") or "py-spy"
    path = child.outputs.with_suffix(".stacks")
    with path.open("w") as file, contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([program, "dump", "--pid", str(child.pid)], stdout=file, stderr=file, timeout=60)
    return str(path)


def newest(workdir) -> int:
    return max(checkpoints_of(workdir), default=0)


def saving(workdir) -> set[tuple[str, int]]:
    """(name, inode) of every folder of a save that is not complete."""
    found = set()
    for path in (workdir / "checkpoints").glob("*.saving*"):
        with contextlib.suppress(OSError):
            found.add((path.name, path.stat().st_ino))
    return found


def last_step(workdir) -> int:
    """The step of the last whole line of metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def summary(workdir) -> dict | None:
    path = workdir / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


class Lab:
    """The folder with corpus, configuration and references, in which the rounds take place."""

    def __init__(self, options, folder: pathlib.Path):
        self.options, self.folder = options, folder
        self.steps = SHORT_STEPS if options.short else STEPS
        self.place = Place(folder)
        self.validation = write_corpus(folder / "validation.txt", seed=1, words=12000)
        os.environ.update(self.place.environment)
        self.references: dict[int, Reference] = {}

    def load(self) -> None:
        """The imports, once for all processes."""
        import siamese_jax.evaluation.generation
        import siamese_jax.evaluation.perplexity
        import siamese_jax.training.loop  # noqa: F401

    def arguments(self, workdir, processes) -> list[str]:
        own = self.place.arguments(
            workdir, f"training.steps={self.steps}", f"checkpoint.every={EVERY}", f"eval.every={EVAL_EVERY}",
            f"eval.max_windows={64 if self.options.short else 0}", "eval.batch_size=4",
            f"data.validation_source={self.validation}",
        )  # fmt: skip
        if processes == 1:
            return own
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{sock.getsockname()[1]}"
        return [*own, f"--coordinator={address}", f"--processes={processes}", f"--start_timeout={START_TIMEOUT}"]

    def prepare(self, processes: int) -> None:
        """The reference of as many processes. All that the rounds compile is compiled here."""
        workdir = self.folder / f"undisturbed_{processes}"
        reference = self.references[processes] = self._undisturbed(workdir, processes)
        if not self.options.short:
            again = self._undisturbed(self.folder / f"again_{processes}", processes)
            reference.exact = again.records == reference.records and again.validation == reference.validation
            reference.first_step, reference.seconds = again.first_step, again.seconds
        continued = self.folder / f"continued_{processes}"
        shutil.copytree(workdir, continued)
        shutil.rmtree(continued / "checkpoints" / str(self.steps))
        (continued / "summary.json").unlink()
        self._undisturbed(continued, processes)
        compare(continued, reference, self.steps)

    def _undisturbed(self, workdir, processes) -> Reference:
        start = Start(self, workdir, processes, write_cache=True)
        try:
            start.until(lambda: last_step(workdir) > start.before)
            first_step = time.monotonic() - start.began
            codes = start.ended()
        finally:
            start.end()
        if any(codes) or summary(workdir) is None:
            raise Failed(f"an undisturbed run ended with {codes}: {last_words(start.children)}")
        seconds = time.monotonic() - start.began
        return Reference(records(workdir), summary(workdir)["validation"], first_step, seconds)

    def seconds(self, processes: int, origin: int) -> float:
        """How long a start from a step takes, roughly."""
        reference = self.references[processes]
        return reference.first_step + (reference.seconds - reference.first_step) * (1 - origin / self.steps)


def last_words(children) -> list[str]:
    return [" | ".join(child.err().strip().splitlines()[-3:])[-600:] for child in children]


def compare(workdir, reference: Reference, steps: int) -> None:
    """Failed unless each step is there once, with the losses and the final figures of the reference."""
    found = records(workdir)
    seen = [record["step"] for record in found]
    if seen != list(range(1, steps + 1)):
        raise Failed(f"metrics.jsonl has the steps {seen}")
    wrong = [a["step"] for a, b in zip(found, reference.records, strict=True) if not same(a, b, reference.exact)]
    if wrong:
        raise Failed(f"other losses or figures than undisturbed at steps {wrong}", wrong=len(wrong))
    if not same(summary(workdir)["validation"], reference.validation, reference.exact):
        raise Failed(f"the final validation is {summary(workdir)['validation']}, not {reference.validation}")
    if newest(workdir) != steps or saving(workdir):
        raise Failed(f"checkpoints at the end: {sorted(os.listdir(workdir / 'checkpoints'))}")


def same(found: dict, wanted: dict, exact: bool) -> bool:
    if exact or found.keys() != wanted.keys():
        return found == wanted
    return all(math.isclose(found[key], wanted[key], rel_tol=1e-6) for key in wanted)


class Round:
    """One run from its first start to its summary, disturbed as planned."""

    def __init__(self, lab: Lab, plan: Plan):
        self.lab, self.plan, self.workdir = lab, plan, lab.folder / plan.name
        self.hits: list[Hit] = []
        self.steps = lab.steps
        self.starts, self.expected, self.wrong = 0, 0, 0

    def go(self) -> None:
        """Failed where anything is not as it must be."""
        for fault in self.plan.faults:
            if summary(self.workdir) is None:
                self._with_start(lambda start, fault=fault: self._disturb(start, fault))
        if summary(self.workdir) is None:
            self._with_start(self._finish)
        if summary(self.workdir) is None:
            raise Failed("all processes ended with 0, but there is no summary.json")
        compare(self.workdir, self.lab.references[self.plan.processes], self.steps)

    def _with_start(self, work) -> None:
        start = Start(self.lab, self.workdir, self.plan.processes)
        self.starts += 1
        try:
            work(start)
            self._check_origin(start)
        finally:
            start.end()

    def _check_origin(self, start: Start) -> None:
        origin = start.origin()
        if origin not in (None, self.expected):
            raise Failed(f"started at step {origin}, where the newest checkpoint was {self.expected}")
        self.expected = newest(self.workdir)

    def _finish(self, start: Start) -> None:
        codes = start.ended()
        if any(codes):
            raise Failed(f"undisturbed, the processes ended with {codes}: {last_words(start.children)}")

    def _disturb(self, start: Start, fault: Fault) -> None:
        if not start.until(self._moment(start, fault)):
            self._finish(start)  # it was complete before the moment came
            return
        time.sleep(fault.delay)
        target = start.children[fault.process]
        hit = Hit(NAMES[fault.number], fault.process, phase(start), last_step(self.workdir))
        joined = has_joined(start, target)
        sent = time.monotonic()
        target.kill(fault.number)
        start.ended()
        self.hits.append(hit)
        hit.others = max([child.end - sent for child in start.children if child is not target], default=0.0)
        if fault.number == signal.SIGKILL:
            self._after_kill(start, target, hit, joined)
        else:
            self._after_term(start, target, hit, joined)

    def _moment(self, start: Start, fault: Fault):
        """A function that tells whether the moment has come."""
        workdir, threshold = self.workdir, max(start.before, int(fault.at * self.steps))
        evaluations = [step for step in range(EVAL_EVERY, self.steps, EVAL_EVERY) if step > threshold + 1]
        if fault.moment == "any":
            due = start.began + fault.at * self.lab.seconds(self.plan.processes, start.before)
            return lambda: time.monotonic() >= due
        if fault.moment == "save":
            last = max(0, min(threshold, self.steps - EVERY))
            return lambda: any(step_of(name) > last for name, _ in saving(workdir) - start.stale)
        if fault.moment == "validation" and evaluations:
            return lambda: phase(start) == "validation" and last_step(workdir) + 1 >= evaluations[0]
        if fault.moment == "training":
            return lambda: phase(start) == "training" and last_step(workdir) > threshold
        return lambda: FINAL in start.said()

    def _after_kill(self, start, target, hit, joined) -> None:
        if summary(self.workdir) is not None:
            hit.kind = "after the end"
            if {child.code for child in start.children if child is not target} - {0, 1}:
                raise Failed(f"{hit}: exit codes {[child.code for child in start.children]}")
            return
        hit.lost = max(0, last_step(self.workdir) - newest(self.workdir))
        hit.saving = bool(saving(self.workdir))  # by the time all have ended it may be complete instead
        if hit.lost > EVERY * (1 + hit.saving):
            raise Failed(f"{hit}: only {EVERY * (1 + hit.saving)} steps may be lost")
        self._check_survivors(start, target, hit, joined)

    def _check_survivors(self, start, target, hit, joined) -> None:
        for child in start.children:
            if child is target:
                continue
            said = last_words([child])[0]
            waited = not joined and ("did not start" in said or "cannot be reached" in said)
            hit.kind = "before all were there" if waited else hit.kind
            named = re.search(rf"\bprocess {target.index}\b", said)
            allowed = START_TIMEOUT + SURVIVE if waited else SURVIVE
            if child.code != 1 or not named or child.end - target.end > allowed:
                raise Failed(
                    f"{hit}: process {child.index} ended with {child.code} after {child.end - target.end:.1f} s: "
                    f"{said or 'without a word'}"
                )

    def _after_term(self, start, target, hit, joined) -> None:
        codes = [child.code for child in start.children]
        if target.code == -signal.SIGTERM and (not joined or summary(self.workdir) is not None):
            self._ended_at_once(start, target, hit, joined)
            return
        if any(codes):
            raise Failed(f"{hit}: the processes ended with {codes}: {last_words(start.children)}")
        stopped = re.search(rf"^stopped at step (\d+) of {self.steps}", start.said(), re.M)
        if stopped is None:
            if summary(self.workdir) is None:
                raise Failed(f"{hit}: exit codes 0, but neither stopped nor complete")
            hit.kind = "after the end"
        elif int(stopped[1]) != newest(self.workdir) or summary(self.workdir) is not None:
            raise Failed(f"{hit}: stopped at step {stopped[1]}, the newest checkpoint is {newest(self.workdir)}")
        elif last_step(self.workdir) not in (int(stopped[1]), int(stopped[1]) - 1):  # a line may be owed
            raise Failed(f"{hit}: stopped at step {stopped[1]}, the last line is {last_step(self.workdir)}")
        hit.kind = hit.kind or f"stopped at {stopped[1]}"

    def _ended_at_once(self, start, target, hit, joined) -> None:
        """SIGTERM where nothing hears it yet, or no longer."""
        if summary(self.workdir) is not None:
            hit.kind = "after the end"
            return
        if newest(self.workdir) != start.before:
            raise Failed(f"{hit}: the newest checkpoint was {start.before} and is {newest(self.workdir)}")
        self._check_survivors(start, target, hit, joined)
        hit.kind = hit.kind or "before training"


def has_joined(start: Start, target: Child) -> bool:
    """Whether signals are heard by the run for sure, by what this process has written."""
    return ("[Gloo]" if len(start.children) > 1 else "devices:") in target.out()


def step_of(name: str) -> int:
    return int(name.partition(".")[0])


def phase(start: Start) -> str:
    """What the run is doing now."""
    said, origin, last = start.said(), start.origin(), last_step(start.workdir)
    if summary(start.workdir) is not None:
        return "the end"
    if FINAL in said:
        return "final evaluation"
    if origin is None or last == origin or "compiled the step" not in said:
        return "owed validation" if origin == last + 1 else "start-up"
    if (last + 1) % EVAL_EVERY == 0 and last + 1 < start.steps:
        return "validation"
    return "save" if saving(start.workdir) - start.stale else "training"


def random_plan(number: int, options) -> Plan:
    """A round from (seed, number) alone, so that it can be repeated by itself."""
    draw = random.Random(f"{options.seed}-{number}")
    processes = 1 if number % 5 == 0 else options.processes
    count = draw.choice((1, 1, 2, 2, 3))
    faults = []
    for i in range(count):
        moment = draw.choice(("any", "save", draw.choice(("validation", "final evaluation"))))
        number_ = draw.choice((signal.SIGKILL, signal.SIGTERM))
        at = draw.random() if moment == "any" else (i + draw.random()) / count
        delay = draw.random() * DELAYS.get(moment, 0)
        faults.append(Fault(number_, draw.randrange(processes), moment, at, delay))
    return Plan(f"round_{number}", processes, tuple(faults))


def short_plans(processes: int) -> list[Plan]:
    """One signal each, at the moments that ask most of the run."""
    faults = (
        Fault(signal.SIGKILL, processes - 1, "save", 0.3),
        Fault(signal.SIGTERM, processes - 1, "final evaluation", 0.9, 0.1),
        Fault(signal.SIGKILL, 0, "training", 0.6),
    )
    return [Plan(f"round_{i}", processes, (fault,)) for i, fault in enumerate(faults, start=1)]


def report(rounds: list[Round], failures: dict[str, str], seconds: float) -> dict:
    """What is counted over all rounds."""
    hits = [hit for each in rounds for hit in each.hits]
    kills = [hit for hit in hits if hit.signal == "SIGKILL" and hit.kind != "after the end"]
    noticed = [hit.others for hit in kills if hit.kind != "before all were there"]
    return {
        "rounds": len(rounds),
        "failed": failures,
        "starts": sum(each.starts for each in rounds),
        "signals": {
            f"{name} {moment}": times
            for (name, moment), times in sorted(collections.Counter((h.signal, h.moment) for h in hits).items())
        },
        "kinds": dict(collections.Counter(re.sub(r" \d+", "", hit.kind) for hit in hits if hit.kind)),
        "came_too_late": sum(len(each.plan.faults) for each in rounds) - len(hits),
        "max_steps_lost": max([hit.lost for hit in kills if not hit.saving], default=0),
        "max_steps_lost_during_save": max([hit.lost for hit in kills if hit.saving], default=0),
        "wrong_losses": sum(each.wrong for each in rounds),
        "max_seconds_until_others_ended": round(max(noticed, default=0.0), 2),
        "exact": all(reference.exact for each in rounds for reference in each.lab.references.values()),
        "seconds": round(seconds),
    }


def as_text(result: dict) -> str:
    lines = [f"{'signal, and what it met':<32}times"]
    lines += [f"{name:<32}{times:>5}" for name, times in result["signals"].items()]
    lines += [f"  of them {kind}: {times}" for kind, times in result["kinds"].items()]
    lines += [f"FAILED {name}: {why}" for name, why in result["failed"].items()]
    lines.append(
        f"{result['rounds']} rounds, {len(result['failed'])} failed; {sum(result['signals'].values())} signals in "
        f"{result['starts']} starts, {result['came_too_late']} came too late; wrong losses "
        f"{result['wrong_losses']} ({'bit for bit' if result['exact'] else 'within 1e-6: runs do not repeat'}); "
        f"most steps lost {result['max_steps_lost']}, {result['max_steps_lost_during_save']} during a save "
        f"(a checkpoint every {EVERY}); others ended within {result['max_seconds_until_others_ended']} s; "
        f"{result['seconds']} s"
    )
    return "\n".join(lines)


def go_through(lab: Lab, plans: list[Plan], say) -> dict:
    """The references, then round after round; the report."""
    began, rounds, failures = time.monotonic(), [], {}
    lab.load()
    try:
        for processes in sorted({plan.processes for plan in plans}):
            lab.prepare(processes)
            exact = "bit for bit" if lab.references[processes].exact else "NOT bit for bit"
            say(f"reference of {processes} process(es), {exact}, after {time.monotonic() - began:.0f} s")
    except Failed as failure:  # nothing to compare the rounds with
        result = report([], {"undisturbed": str(failure)}, time.monotonic() - began)
        return result | {"wrong_losses": failure.wrong}
    for plan in plans:
        rounds.append(Round(lab, plan))
        started = time.monotonic()
        why = go(rounds[-1])
        if why:
            failures[plan.name] = why
        told = "; ".join(map(str, rounds[-1].hits)) or "no signal came in time"
        spent = f"{time.monotonic() - started:.0f} s"
        verdict = f"FAILED: {why}" if why else "ok"
        say(f"{plan.name} of {len(plans)}, {plan.processes} process(es): {told}: {spent}: {verdict}")
    return report(rounds, failures, time.monotonic() - began)


def go(each: Round) -> str:
    """Why a round failed; '' and a clean folder where it did not."""
    try:
        each.go()
    except Failed as failure:
        each.wrong = failure.wrong
        return str(failure)
    except Exception:  # of this program itself; the other rounds are still worth having
        return traceback.format_exc()
    shutil.rmtree(each.workdir)
    for path in each.workdir.parent.glob(f"{each.workdir.name}.*"):
        path.unlink()
    return ""


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.faults", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=30, help="rounds (default 30)")
    parser.add_argument("--processes", type=int, default=2, help="processes of a run (default 2)")
    parser.add_argument("--devices", type=int, default=2, help="CPU devices of each process (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    parser.add_argument("--only", type=int, default=0, help="this round alone, from 1")
    parser.add_argument("--short", action="store_true", help="three chosen rounds instead of random ones")
    parser.add_argument("--fresh", action="store_true", help="start `python train.py` from scratch each time")
    parser.add_argument("--limit", type=int, default=240, help="seconds one start may take (default 240)")
    parser.add_argument("--folder", type=pathlib.Path, help="where to work, kept; default: a temporary folder")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, progress on stderr")
    options = parser.parse_args()
    if min(options.runs, options.processes, options.devices, options.limit) < 1:
        parser.error("--runs, --processes, --devices and --limit must be 1 or more")
    if not 0 <= options.only <= options.runs:
        parser.error(f"--only {options.only}: use 1 to --runs {options.runs}")
    return options


def main() -> int:
    options = read_options()
    chosen = [options.only] if options.only else range(1, options.runs + 1)
    plans = short_plans(options.processes) if options.short else [random_plan(number, options) for number in chosen]
    folder = (options.folder or pathlib.Path(tempfile.mkdtemp(prefix="faults_"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    result = go_through(
        Lab(options, folder), plans, lambda line: print(line, file=sys.stderr if options.json else None, flush=True)
    )
    print(json.dumps(result) if options.json else as_text(result))
    if result["failed"]:
        print(f"what they left is in {folder}", file=sys.stderr)
    elif options.folder is None:
        shutil.rmtree(folder)
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
