"""The folder of a run: its configuration, and whether a program may write or continue there."""

import json
import os
import pathlib

import ml_collections

from siamese_jax.checkpoint import available_steps
from siamese_jax.config import differences, from_resolved, resolved
from siamese_jax.errors import InputError

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"


def read_config(workdir: str) -> ml_collections.ConfigDict:
    """The configuration stored in a run folder; InputError where there is none or it is broken."""
    path = pathlib.Path(workdir) / CONFIG
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{workdir} is not a run folder: it has no {CONFIG}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    return from_resolved(plain, str(path))


def open_run_folder(workdir: str, config: ml_collections.ConfigDict) -> None:
    """Makes the folder ready for this run, or InputError: not writable, or it holds another run."""
    folder = pathlib.Path(workdir)
    plain = resolved(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stored = folder / CONFIG
        if stored.exists():
            changed = differences(json.loads(stored.read_text(encoding="utf-8")), plain)
            if changed:
                raise InputError(
                    f"{workdir} holds another run ({'; '.join(changed)}): "
                    "use its values, or another --workdir"
                )
        elif available_steps(folder / CHECKPOINTS):
            raise InputError(f"{workdir} has checkpoints but no {CONFIG}: use another --workdir")
        beside = folder / f".{CONFIG}.{os.getpid()}"
        beside.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        beside.replace(stored)
    except json.JSONDecodeError as error:
        raise InputError(f"{stored} is broken ({error}): use another --workdir") from error
    except OSError as error:
        raise InputError(f"cannot write to --workdir {workdir}: {error.strerror}: choose another folder") from error
