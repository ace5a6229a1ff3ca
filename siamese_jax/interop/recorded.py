"""What a golden file records, in memory, and the rows that a comparison with it consists of.

A file is a .npz with `config` and `meta` (JSON), `param/NAME`, `in/*`, `out/*`, `state/*`, `grad/NAME` and
perhaps `rope/*` and `buffer/*`.
"""

import dataclasses
import json
import pathlib
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from siamese_jax.errors import InputError

# (absolute, of outputs, states and the loss; relative to a tensor's maximum, of gradients)
TOLERANCES = {"float32": (2e-5, 1e-5), "float64": (1e-10, 1e-10)}
KINDS = ("param", "buffer", "in", "out", "state", "grad", "rope")
STREAMS = {"x": ("post", "stream"), "y": ("pre",)}  # theirs -> ours, the one that the model has


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: largest absolute difference, the same over the largest value of theirs, which is judged."""

    name: str
    max_abs: float
    max_rel: float
    by: str  # abs or rel: what `limit` is for
    limit: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is within the limit; NaN is not."""
        return bool(self.judged <= self.limit)

    @property
    def judged(self) -> float:
        """The difference that the limit is for."""
        return self.max_rel if self.by == "rel" else self.max_abs

    @property
    def badness(self) -> float:
        """The difference in units of its limit; NaN is worst of all."""
        ratio = self.judged / self.limit if self.limit else np.inf if self.judged else 0.0
        return np.inf if np.isnan(ratio) else ratio

    def plain(self) -> dict[str, Any]:
        """As a dict that JSON can hold."""
        return dataclasses.asdict(self) | {"ok": self.ok}


def difference(name: str, ours, theirs, by: str, limit: float, note: str = "") -> Row:
    """The row of two arrays; InputError where their shapes differ."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        raise InputError(f"{name} has shape {theirs.shape} there, {ours.shape} here")
    max_abs = float(np.max(np.abs(ours - theirs), initial=0.0))
    scale = float(np.max(np.abs(theirs), initial=0.0))
    max_rel = max_abs / scale if scale else (0.0 if max_abs == 0 else np.inf)
    return Row(name, max_abs, max_rel, by, limit, note)


@dataclasses.dataclass(frozen=True)
class Golden:
    """A golden file in memory."""

    path: str
    case: str
    dtype: str  # that it was recorded in
    config: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def group(self, kind: str) -> dict[str, np.ndarray]:
        """{name without `kind/`: array}."""
        return {name[len(kind) + 1 :]: a for name, a in self.arrays.items() if name.startswith(f"{kind}/")}


def read_golden(path: str) -> Golden:
    """InputError where the file is not of this format."""
    if not pathlib.Path(path).is_file():
        raise InputError(f"there is no golden file {path}")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        config, meta = (json.loads(str(arrays.pop(name))) for name in ("config", "meta"))
    except KeyError as error:
        raise InputError(f"{path} is not a golden file: it has no {error.args[0]!r}") from error
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"{path} is not a golden file (.npz of arrays): {reason}") from error
    if not isinstance(config, dict) or not isinstance(meta, dict) or str(meta.get("dtype")) not in TOLERANCES:
        raise InputError(f"{path} is not a golden file: config or meta (with a dtype) is not what it must be")
    for name, array in arrays.items():
        kind = name.partition("/")[0]
        if kind not in KINDS:
            raise InputError(f"{path} is a golden file of another format: it has {name!r}")
        if kind not in ("in", "buffer") and str(array.dtype) not in TOLERANCES:
            raise InputError(f"{path}: {name} is {array.dtype}; it must be {' or '.join(TOLERANCES)}")
    return Golden(path, str(meta.get("case", pathlib.Path(path).stem)), meta["dtype"], config, arrays)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a file is compared; see `compare_golden`."""

    dtype: str
    atol: float
    rtol: float
    scan: bool


def stream_states(first: Mapping[str, Any], rest: Any) -> dict[str, np.ndarray]:
    """{x_0: ..., y_1: ...}: the streams entering layer 0 and, of every layer, those that `watch` saw leaving it."""
    segments = rest if isinstance(rest, list) else [rest]
    streams = {
        name: np.concatenate([np.asarray(first[name])[None], *(np.asarray(seen[name]) for seen in segments)])
        for name in first
    }
    states = {}
    for short, names in STREAMS.items():
        found = next((streams[name] for name in names if name in streams), [])
        states |= {f"{short}_{i}": state for i, state in enumerate(found)}
    return states


def output_rows(golden: Golden, outputs: Mapping[str, Any], states: Mapping[str, Any], atol: float) -> list[Row]:
    """A row for every output and state that is recorded; InputError for one that the model does not give."""
    ours = {f"out/{name}": array for name, array in outputs.items()}
    ours |= {f"state/{name}": array for name, array in states.items()}
    rows = []
    for name, theirs in golden.arrays.items():
        if name.startswith(("out/", "state/")):
            if name not in ours:
                raise InputError(f"{golden.path} records {name}, which this model does not give")
            rows.append(difference(name.removeprefix("out/"), ours[name], theirs, "abs", atol))
    return rows


def gradient_rows(golden: Golden, ours: Mapping[str, Any], rtol: float) -> list[Row]:
    """A row for every recorded gradient."""
    rows = []
    for name, gradient in golden.group("grad").items():
        if name not in ours:
            raise InputError(f"{golden.path} records a gradient of {name}, which is no parameter of the model")
        rows.append(difference(f"grad/{name}", ours[name], gradient, "rel", rtol))
    return rows


def opened_by(embed: Callable[[Any, Any], Any]) -> Callable[[Any, Any], dict[str, Any]]:
    """(model, inputs) -> the streams that enter layer 0; embed: (model, inputs) -> [B, L, D]. For `apply`."""

    def opened(model, inputs):
        residual = model.residual_open
        return residual.named_streams(residual.open(embed(model, inputs)))

    return opened


def inputs_of(golden: Golden, needed: set[str], known: set[str]) -> dict[str, np.ndarray]:
    """The recorded inputs; InputError where a needed one is missing or one is unknown."""
    inputs = golden.group("in")
    if not needed <= set(inputs) <= known:
        raise InputError(
            f"{golden.path} has the inputs {', '.join(sorted(inputs)) or 'none'}, not {', '.join(sorted(needed))}"
        )
    return inputs


def check_numbers(golden: Golden, name: str, array: np.ndarray, shape: tuple[int | None, ...]) -> None:
    """InputError unless an input has numbers of this shape (None: any size)."""
    fits = len(array.shape) == len(shape) and all(w in (None, s) for s, w in zip(array.shape, shape, strict=True))
    if not fits or not np.issubdtype(array.dtype, np.floating):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        found = f"{array.dtype} of shape {array.shape}"
        raise InputError(f"{golden.path}: {name} is {found}, not numbers of ({wanted})")


def check_whole(golden: Golden, name: str, array: np.ndarray, length: int, most: int) -> None:
    """InputError unless an input has `length` whole numbers from 0 to `most`."""
    if array.shape != (length,) or not np.issubdtype(array.dtype, np.integer):
        found = f"{array.dtype} of shape {array.shape}"
        raise InputError(f"{golden.path}: {name} is {found}, not {length} whole numbers")
    if not length:
        raise InputError(f"{golden.path}: {name} is empty: record at least one example")
    if array.min() < 0 or array.max() > most:
        raise InputError(f"{golden.path}: {name} from {array.min()} to {array.max()} lie outside 0 to {most}")
