"""Golden files: outputs, stream states and gradients that a PyTorch model gave, held against ours.

Which family a file is of stands in a key of its configuration.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from siamese_jax.errors import InputError
from siamese_jax.interop.golden_images import compare_diffusion, compare_vision
from siamese_jax.interop.golden_language import compare_language
from siamese_jax.interop.recorded import TOLERANCES, Golden, Row, Settings, read_golden

Comparison = Callable[[Golden, Settings], tuple[str, list[Row]]]
# A key that only this family's configuration has -> what compares its files.
FAMILIES: Mapping[str, Comparison] = {
    "d_model": compare_language,
    "img_size": compare_vision,
    "input_size": compare_diffusion,
}


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
    if not golden.group("out") and not golden.group("state") and not golden.group("grad"):
        raise InputError(f"{golden.path} records no output, state or gradient: there is nothing to compare")
    rows = sorted(rows, key=lambda row: -row.badness)
    return {
        "file": golden.path, "case": golden.case, "model": model, "recorded": golden.dtype, "dtype": dtype,
        "atol": atol, "rtol": rtol, "ok": all(row.ok for row in rows),
        "rows": [row.plain() for row in rows],
    }  # fmt: skip


def _family_of(golden: Golden) -> Comparison:
    """What compares this file's kind of model, known by a key of its configuration."""
    for mark, compare in FAMILIES.items():
        if mark in golden.config:
            return compare
    raise InputError(
        f"{golden.path} records a model that this version does not have "
        f"(keys of its configuration: {', '.join(sorted(golden.config)[:5])}, ...)"
    )


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
