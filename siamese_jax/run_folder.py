"""The folder of a run: its configuration, and whether a program may write or continue there."""

import json
import os
import pathlib

import ml_collections

from siamese_jax.checkpoint import available_steps
from siamese_jax.config import differences, from_resolved, resolved
from siamese_jax.errors import FaultError, InputError

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
SUMMARY = "summary.json"


def read_config(workdir: str) -> ml_collections.ConfigDict:
    """The configuration stored in a run folder; InputError where there is none or it is broken."""
    path = pathlib.Path(workdir) / CONFIG
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{workdir} is not a run folder: it has no {CONFIG}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(plain, dict):
        raise InputError(f"{path} is a {type(plain).__name__}, not a configuration: name another folder")
    return from_resolved(plain, str(path))


def check_run_folder(workdir: str, config: ml_collections.ConfigDict) -> None:
    """InputError where the folder holds another run; only looks."""
    folder = pathlib.Path(workdir)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--workdir {workdir} is a file: name a folder")
    if (folder / CONFIG).exists():
        changed = differences(resolved(read_config(workdir)), resolved(config))
        if changed:
            raise InputError(
                f"{workdir} holds another run ({'; '.join(changed)}): use its values, or another --workdir"
            )
    elif available_steps(folder / CHECKPOINTS):
        raise InputError(f"{workdir} has checkpoints but no {CONFIG}: use another --workdir")


def open_run_folder(workdir: str, config: ml_collections.ConfigDict) -> None:
    """Makes the folder and writes the configuration; InputError where that cannot be done."""
    folder = pathlib.Path(workdir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, resolved(config))
    except OSError as error:
        raise InputError(
            f"cannot write to --workdir {workdir}: {error.strerror}: free space or choose another folder"
        ) from error


def read_summary(workdir: str) -> dict | None:
    """The summary of a finished run; None where the run is not finished."""
    path = pathlib.Path(workdir) / SUMMARY
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): remove it, then the run goes on") from error


def write_summary(workdir: str, summary: dict) -> None:
    """Marks the run as finished; FaultError where the disk does not take it."""
    path = pathlib.Path(workdir) / SUMMARY
    try:
        write_json(path, summary)
    except OSError as error:
        raise FaultError(f"cannot write {path}: {error.strerror}: free space, then start again") from error


def write_json(path: pathlib.Path, plain: dict) -> None:
    """Writes the file whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
