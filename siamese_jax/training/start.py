"""Where a run starts: its own newest sound checkpoint, the weights of another run, or initial parameters."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from siamese_jax.checkpoint import Checkpoints
from siamese_jax.errors import InputError
from siamese_jax.run_folder import CHECKPOINTS
from siamese_jax.training.parts import Parts
from siamese_jax.training.plan import fresh_state
from siamese_jax.training.state import TrainState


@dataclasses.dataclass
class Start:
    """Where a run starts: its own state, or only weights, or neither; the last three as in `_about`."""

    origin: str
    state: TrainState | None = None
    weights: Any = None
    metrics: dict = dataclasses.field(default_factory=dict)
    owed: dict | None = None
    converted: dict | None = None


def find_start(parts: Parts, checkpoints: Checkpoints, say: Callable) -> Start:
    """In this order: the run's own newest sound checkpoint, the weights of training.init_from, a fresh start.

    Compiles and writes nothing, so that an InputError leaves no trace.
    """
    restored = checkpoints.restore(parts.state_shapes)
    if restored is not None:
        step, state, about = restored
        _check_same_data(parts, step, about["data"]["fingerprint"])
        told = {"metrics": about.get("metrics", {}), "owed": about.get("owed"), "converted": about.get("converted")}
        return Start(f"checkpoint {step}", state, **told)
    source = parts.config.training.init_from
    if not source:
        return Start("initial parameters")
    step, weights, about = _weights_of(source, parts.state_shapes.params, say)
    origin = f"the weights of {source}, checkpoint {step}"
    return Start(origin, weights=weights, converted=about.get("converted"))


def _check_same_data(parts: Parts, step: int, stored: str) -> None:
    now = parts.data.fingerprint
    if stored != now:
        raise InputError(
            f"the training data changed: checkpoint {step} was trained on data {stored}, "
            f"{parts.config.data.source} is {now} now: restore the data or use another --workdir"
        )


def _weights_of(source: str, shapes: Any, say: Callable) -> tuple[int, Any, dict]:
    """(step, parameters, what it tells beside them) of the newest sound checkpoint of another run."""
    try:
        with Checkpoints(pathlib.Path(source) / CHECKPOINTS, log=say) as checkpoints:
            found = checkpoints.restore({"params": shapes}, partial=True)
    except InputError as error:
        raise InputError(f"training.init_from {source}: {error}") from error
    if found is None:
        raise InputError(f"training.init_from {source}: there is no checkpoint in {source}/{CHECKPOINTS}")
    return found[0], found[1]["params"], found[2]


def make_state(parts: Parts, start: Start) -> TrainState:
    """The state of the first update."""
    if start.state is not None:
        return start.state
    state = fresh_state(parts)
    return state if start.weights is None else state.replace(params=start.weights)
