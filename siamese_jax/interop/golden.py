"""Golden files: outputs, stream states and gradients that a PyTorch model gave, held against ours.

A file is a .npz with `config` and `meta` (JSON), `param/NAME`, `in/*`, `out/*`, `state/*`, `grad/NAME` and
perhaps `rope/*` and `buffer/*`. Legend: B batch, L length, D width, K head dim.
"""

import dataclasses
import functools
import json
import pathlib
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from siamese_jax.errors import InputError
from siamese_jax.interop import reference
from siamese_jax.interop.layout import join_all, split_all
from siamese_jax.layers.rotary import rotary_tables
from siamese_jax.models.language import LanguageConfig, LanguageModel, check_model

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


def compare_golden(
    path: str | Golden,
    *,
    dtype: str | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    scan: bool = True,
) -> dict[str, Any]:
    """Everything that a file, or one that was read, records against ours, as a dict that JSON can hold.

    Its rows are worst first. dtype: float32 or float64, in which ours is computed; that of the file unless
    given. float64 needs jax_enable_x64. atol, rtol: as in TOLERANCES, of the coarser of the two types unless
    given. scan: whether the layers are scanned or unrolled.
    """
    golden = path if isinstance(path, Golden) else read_golden(path)
    dtype = dtype or golden.dtype
    coarser = "float32" if "float32" in (dtype, golden.dtype) else "float64"
    atol, rtol = (
        given if given is not None else t for given, t in zip((atol, rtol), TOLERANCES[coarser], strict=True)
    )
    with jax.default_matmul_precision("highest"):
        model, rows = _family_of(golden)(golden, Settings(dtype, atol, rtol, scan))
    rows = sorted(rows, key=lambda row: -row.badness)
    return {
        "file": golden.path, "case": golden.case, "model": model, "recorded": golden.dtype, "dtype": dtype,
        "atol": atol, "rtol": rtol, "ok": all(row.ok for row in rows),
        "rows": [row.plain() for row in rows],
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a file is compared; see `compare_golden`."""

    dtype: str
    atol: float
    rtol: float
    scan: bool


Comparison = Callable[[Golden, Settings], tuple[str, list[Row]]]


def _family_of(golden: Golden) -> Comparison:
    """What compares this file's kind of model, known by a key of its configuration."""
    for mark, compare in FAMILIES.items():
        if mark in golden.config:
            return compare
    raise InputError(
        f"{golden.path} records a model that this version does not have "
        f"(keys of its configuration: {', '.join(sorted(golden.config)[:5])}, ...)"
    )


def compare_language(golden: Golden, settings: Settings) -> tuple[str, list[Row]]:
    """(what the model is, rows) of a language model's file."""
    dtype, atol, rtol = settings.dtype, settings.atol, settings.rtol
    weights, recorded = golden.group("param"), golden.arrays
    config = reference.language_config(golden.config, reference.shapes_of(weights))
    config = dataclasses.replace(config, dtype=dtype, scan=settings.scan)
    check_model(config)
    layout = reference.layout(config)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), join_all(layout, config, weights))
    tokens = _tokens(golden, config)
    rows, tables = [], golden.group("rope")
    rotary = ours = rotary_tables(jnp.arange(tokens.shape[1]), config.key_dim, config.rope_theta)
    if tables:
        if set(tables) != {"sin", "cos"}:
            raise InputError(f"{golden.path} has the tables rope/{', rope/'.join(sorted(tables))}, not sin and cos")
        rotary = tables["sin"], tables["cos"]
        limit = tokens.shape[1] * 2.0**-23  # one rounding of the largest angle, in float32
        rows += [
            difference(f"rope/{name}", *both, "abs", limit)
            for name, *both in zip(("sin", "cos"), ours, rotary, strict=True)
        ]
    outputs = language_outputs(config, params, tokens, rotary)
    known = {"out/logits", "out/loss"} | {f"state/{name}" for name in outputs["states"]}
    for name in recorded:
        if name.startswith(("out/", "state/")) and name not in known:
            raise InputError(f"{golden.path} records {name}, which this model does not give")
    for name in ("logits", "loss"):
        if f"out/{name}" in recorded:
            rows.append(difference(name, outputs[name], recorded[f"out/{name}"], "abs", atol))
    for name, state in golden.group("state").items():
        rows.append(difference(f"state/{name}", outputs["states"][name], state, "abs", atol))
    gradients = golden.group("grad")
    ours = split_all(layout, config, outputs["gradients"]) if gradients else {}
    for name, gradient in gradients.items():
        if name not in ours:
            raise InputError(f"{golden.path} records a gradient of {name}, which is no parameter of the model")
        rows.append(difference(f"grad/{name}", ours[name], gradient, "rel", rtol))
    if not any(not row.name.startswith("rope/") for row in rows):
        raise InputError(f"{golden.path} records no output, state or gradient: there is nothing to compare")
    return f"language model, {config.residual}", rows


def _tokens(golden: Golden, config: LanguageConfig) -> jax.Array:
    inputs = golden.group("in")
    if set(inputs) != {"input_ids"}:
        raise InputError(f"{golden.path} has the inputs {', '.join(sorted(inputs)) or 'none'}, not input_ids alone")
    tokens = inputs["input_ids"]
    if (
        tokens.ndim != 2
        or not np.issubdtype(tokens.dtype, np.integer)
        or min(tokens.shape) < 1
        or tokens.shape[1] < 2
    ):
        raise InputError(
            f"{golden.path}: input_ids are {tokens.dtype} of shape {tokens.shape}; they must be whole numbers of "
            "shape (batch, length) with at least two of them"
        )
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise InputError(
            f"{golden.path}: input_ids from {tokens.min()} to {tokens.max()} do not fit a vocabulary of "
            f"{config.vocab_size}"
        )
    return jnp.asarray(tokens, jnp.int32)


@functools.partial(jax.jit, static_argnums=0)  # files of one configuration share one compilation
def _compute(config: LanguageConfig, params, tokens_BL, rotary):
    """(logits, streams entering layer 0, streams leaving the layers, loss, gradients)."""
    model, variables = LanguageModel(config), {"params": params}

    def opened(model: LanguageModel, tokens):
        residual = model.residual_open
        return residual.named_streams(residual.open(model.embedding(tokens)))

    def mean_loss(params):
        losses, _ = model.apply(
            {"params": params}, tokens_BL[:, :-1], tokens_BL[:, 1:],
            rotary=tuple(table[:-1] for table in rotary), method="losses",
        )  # fmt: skip
        return losses.mean()

    logits = model.apply(variables, tokens_BL, rotary=rotary)
    first = model.apply(variables, tokens_BL, method=opened)
    _, rest = model.apply(variables, tokens_BL, rotary=rotary, watch=lambda streams: streams, method="hidden")
    return logits, first, rest, *jax.value_and_grad(mean_loss)(params)


def language_outputs(config: LanguageConfig, params, tokens_BL, rotary) -> dict[str, Any]:
    """logits, states by the file's names, loss (mean over the L - 1 next tokens) and gradients of ours."""
    rotary = tuple(jnp.asarray(table) for table in rotary)
    logits, first, rest, loss, gradients = _compute(config, params, tokens_BL, rotary)
    segments = rest if isinstance(rest, list) else [rest]
    streams = {
        name: np.concatenate([np.asarray(first[name])[None], *(np.asarray(seen[name]) for seen in segments)])
        for name in first
    }
    states = {}
    for short, names in STREAMS.items():
        found = next((streams[name] for name in names if name in streams), [])
        states |= {f"{short}_{i}": state for i, state in enumerate(found)}
    return {"logits": logits, "states": states, "loss": loss, "gradients": gradients}


# A key that only this family's configuration has -> what compares its files.
FAMILIES: Mapping[str, Comparison] = {"d_model": compare_language}


def format_golden(result: Mapping[str, Any]) -> str:
    """The table of one file, worst first, with the verdict."""
    title = f"{result['case']}: {result['model']}, recorded in {result['recorded']}, computed in {result['dtype']}"
    return "\n".join([title, format_rows(result["rows"]), "  " + verdict_line(result)])


def format_rows(rows: list[Mapping[str, Any]]) -> str:
    """A table of rows, in their order."""
    width = max(len(row["name"]) for row in rows)
    lines = [f"  {'':{width}}  {'max abs':>9}  {'max rel':>9}  {'limit':>13}"]
    for row in rows:
        limit = f"{row['by']} {row['limit']:9.2e}"
        verdict = "" if row["ok"] else "  FAILS"
        note = f"  {row['note']}" if row["note"] else ""
        lines.append(
            f"  {row['name']:{width}}  {row['max_abs']:9.2e}  {row['max_rel']:9.2e}  {limit}{verdict}{note}"
        )
    return "\n".join(lines)


def verdict_line(result: Mapping[str, Any]) -> str:
    """How many of the comparisons hold."""
    failed = sum(not row["ok"] for row in result["rows"])
    total = len(result["rows"])
    worst = (
        f"logits, states and loss within {result['atol']:g}, gradients within {result['rtol']:g} of their maximum"
    )
    return f"all {total} agree: {worst}" if not failed else f"{failed} of {total} FAIL ({worst} asked for)"
