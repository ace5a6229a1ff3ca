"""Whether all processes of a run see one run folder."""

import pathlib
import time
import uuid

import jax

from siamese_jax.checkpoint import vote
from siamese_jax.errors import InputError

PATIENCE = 10.0  # seconds until a network file system shows a new file on another host


def check_shared_folder(workdir: str) -> None:
    """InputError, on every process, unless all see the `workdir` that process 0 sees. Leaves nothing behind."""
    if jax.process_count() == 1:
        return
    # A name that all know: process 0 draws it, the first word of a vote counts.
    is_main = jax.process_index() == 0
    name = vote(f".shared.{uuid.uuid4().hex}" if is_main else None)
    folder = pathlib.Path(workdir)
    made = [path for path in (folder, *folder.parents) if not path.exists()] if is_main else []
    problem = _touch(folder, name) if is_main else None
    problem = vote(problem) or vote(None if is_main or _appears(folder / name) else f"{jax.process_index()}")
    if is_main:
        (folder / name).unlink(missing_ok=True)
        for path in made:
            if path.exists():
                path.rmdir()
    if problem:
        raise InputError(
            problem
            if not problem.isdecimal()
            else f"--workdir {workdir} is not shared: process {problem} does not see what process 0 writes there: "
            "name a folder on a file system that all hosts mount"
        )


def _touch(folder: pathlib.Path, name: str) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    except OSError as error:
        return f"cannot write to --workdir {folder}: {error.strerror}: choose another folder"
    return None


def _appears(path: pathlib.Path) -> bool:
    """Whether the file shows within PATIENCE seconds; listing its folder refreshes a network file system's view."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if path.parent.is_dir() and path.name in {found.name for found in path.parent.iterdir()}:
            return True
        time.sleep(0.2)
    return False
