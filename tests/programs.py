"""Runs the programs as a user does, on a tiny corpus and model; what the tests of programs share.

`Place.run` forks a program from one process that has done the imports, which saves seconds each time;
`Place.start` runs it from scratch, to be watched and killed. Compiled steps are shared through JAX's cache.
"""

import atexit
import dataclasses
import json
import os
import pathlib
import random
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
Folder = str | os.PathLike
SPEED = {"tokens_per_second", "images_per_second", "step_seconds", "eta_seconds", "mfu"}  # differ from run to run
SAMPLE = ("eval.prompt=abc", "eval.sample_tokens=5")
CONFIG = """
from siamese_jax.config import base_config


def get_config():
    config = base_config()
    config.model.width = 16
    config.model.num_layers = 2
    config.model.num_heads = 2
    config.model.mlp_hidden = 32
    config.data.source = SOURCE
    config.data.length = 32
    config.training.steps = 30
    config.training.batch_size = 4
    config.schedule.warmup_steps = 2
    config.checkpoint.every = 3
    config.eval.every = 10
    config.logging.every = 1
    config.logging.streams_every = 7
    return config
"""


def write_corpus(path: pathlib.Path, seed: int = 0, words: int = 2500) -> pathlib.Path:
    """A text of random words, about 5 bytes each."""
    draw = random.Random(seed)
    text = " ".join("".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(words))
    path.write_text(text, encoding="utf-8")
    return path


@dataclasses.dataclass
class Ended:
    """What a program left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


class Started:
    """A running program whose output goes to files beside its run folder."""

    def __init__(self, command, environment, outputs: pathlib.Path, at: Folder):
        outputs.parent.mkdir(parents=True, exist_ok=True)
        self.paths = [outputs.with_name(f"{outputs.name}.{name}") for name in ("out", "err")]
        with self.paths[0].open("w") as out, self.paths[1].open("w") as err:
            self.process = subprocess.Popen(
                command, cwd=at, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def until(self, condition, seconds: float = 240) -> bool:
        """Waits until condition() holds; False where the program ended before."""
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                return condition()
            assert time.monotonic() < end, f"waited in vain: {self.text()}"
            time.sleep(0.001)
        return True

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> Ended:
        code = self.process.wait(240)
        return Ended(code, *self.text())

    def text(self) -> list[str]:
        return [path.read_text(encoding="utf-8") for path in self.paths]


class Place:
    """A folder with a corpus and a configuration, and the programs running in it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.corpus = write_corpus(folder / "text.txt")
        self.config = self.write_config("tiny.py", CONFIG)
        self.environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "SIAMESE_JAX_CACHE": str(folder / "stores"),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self._server, self.undisturbed = None, None

    def write_config(self, name: str, text: str) -> pathlib.Path:
        path = self.folder / name
        path.write_text(text.replace("SOURCE", repr(str(self.corpus))), encoding="utf-8")
        return path

    def arguments(self, workdir, *overrides: str) -> list[str]:
        """--config=... --workdir=... --config.KEY=VALUE ..."""
        keys = [f"--config.{override}" for override in overrides]
        return [f"--config={self.config}", f"--workdir={workdir}", *keys]

    def read_config(self, *overrides: str):
        """The configuration for use in this process; overrides of text and whole numbers only."""
        config = runpy.run_path(str(self.config))["get_config"]()
        for override in overrides:
            key, _, value = override.partition("=")
            config.update_from_flattened_dict({key: int(value) if value.isdecimal() else value})
        return config

    def start(
        self,
        *arguments: str,
        program: str = "train.py",
        environment: dict | None = None,
        at: Folder = "",
    ) -> Started:
        """Starts a program in a process of its own; at: in this folder."""
        outputs = self.folder / "outputs" / str(time.monotonic_ns())
        command = [sys.executable, program, *arguments]
        return Started(command, self.environment | (environment or {}), outputs, at or ROOT)

    def run(self, *arguments: str, program: str = "train.py", file_bytes: int = 0, at: Folder = "") -> Ended:
        """Runs a program to its end; file_bytes: no file may become larger (0 = no limit); at: in this folder."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, __file__], cwd=ROOT, env=self.environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        out, err = (self.folder / f"forked.{name}" for name in ("out", "err"))
        order = {
            "program": program, "argv": arguments, "at": str(at or ROOT), "limit": file_bytes,
            "out": str(out), "err": str(err),
        }  # fmt: skip
        print(json.dumps(order), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        return Ended(code, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8"))

    def close(self) -> None:
        if self._server is not None:
            self._server.stdin.close()
            self._server.wait(30)


_PLACES: list[Place] = []


def shared_place(tmp_path_factory=None) -> Place:
    """The place that all tests of a session share; each module wraps it in a fixture, which makes it."""
    if not _PLACES:
        _PLACES.append(Place(tmp_path_factory.mktemp("place")))
        atexit.register(_PLACES[0].close)
    return _PLACES[0]


def undisturbed(place: Place) -> tuple[pathlib.Path, Ended]:
    """(run folder, how it ended) of a run that nobody disturbed; made once."""
    workdir = place.folder / "undisturbed"
    if place.undisturbed is None:
        place.undisturbed = place.run(*place.arguments(workdir, *SAMPLE))
    return workdir, place.undisturbed


def records(workdir) -> list[dict]:
    """metrics.jsonl without what differs from run to run."""
    lines = (pathlib.Path(workdir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in SPEED} for line in lines]


def steps_written(workdir) -> int:
    """Lines of metrics.jsonl by now."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def checkpoints_of(workdir) -> list[int]:
    """Steps of the complete checkpoints."""
    folder = pathlib.Path(workdir) / "checkpoints"
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def snapshot(folder: pathlib.Path) -> dict:
    """{path: (size, time of change)} of all that is in a folder; {} where there is none."""
    paths = [folder, *folder.rglob("*")] if folder.exists() else []
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def _serve() -> None:
    """Answers every order on stdin with the exit code of a forked program."""
    sys.path.insert(0, str(ROOT))
    import siamese_jax.evaluation.generation
    import siamese_jax.evaluation.perplexity
    import siamese_jax.training.loop  # noqa: F401

    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(order: dict) -> None:
    """Turns this forked process into the program, as `python PROGRAM ARGUMENTS` would."""
    signal.alarm(240)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    if order["limit"]:
        import jax

        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # no half of an entry in the cache
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit"], order["limit"]))
    os.chdir(order["at"])
    program = order["program"] if order["at"] == str(ROOT) else str(ROOT / order["program"])  # as one would type it
    sys.argv = [order["program"], *order["argv"]]
    code = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    # As at the end of the interpreter, but for taking it apart, which takes a second in a fork.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
