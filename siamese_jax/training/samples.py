"""samples.jsonl: what a language model wrote after the prompts of eval.prompt, step by step of its training.

One JSON object a line, with step, prompt and text, in the order of the steps; the lines of a step are together.
"""

import json
import os
import pathlib
from collections.abc import Sequence

from siamese_jax.errors import FaultError

SAMPLES = "samples.jsonl"


def write_samples(workdir: str | os.PathLike, step: int, samples: Sequence[dict]) -> None:
    """The lines of a step behind those of earlier steps; what a killed run left of this step and later ones goes.

    The file changes as a whole, so that no reader meets half a line. samples: {prompt, text} each; none: only the
    later steps go. From one process. FaultError where the disk does not take it.
    """
    path = pathlib.Path(workdir) / SAMPLES
    beside = path.with_name(f".{SAMPLES}.{os.getpid()}")
    try:
        kept = [line for line in _lines(path) if _step(line) < step]
        if not samples and not path.exists():
            return
        kept += [json.dumps({"step": step, **sample}) + "\n" for sample in samples]
        with open(beside, "w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise FaultError(f"cannot write {path} at step {step}: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)


def _lines(path: pathlib.Path) -> list[str]:
    if not path.exists():
        return []
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        return [line for line in file if line.endswith("\n")]


def _step(line: str) -> float:
    """The step of a line; infinity where it is none of ours, so that it is not kept."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")
