"""Does it compute what PyTorch computes? Golden files, or a PyTorch model side by side, against this library.

    python -m siamese_jax.interop.parity FILE.npz [MORE.npz ...]
    python -m siamese_jax.interop.parity --dtype=float64 --atol=1e-10 --rtol=1e-10 FILE_f64.npz
    python -m siamese_jax.interop.parity --live --residual=siamese_hybrid --out=parity

FILE.npz holds the weights, inputs, outputs, stream states and gradients of a PyTorch model (format: README).
Its table is worst first, difference over limit:
  max abs   largest absolute difference; --atol is the limit for outputs, states and the loss
  max rel   the same over the largest recorded value; --rtol is the limit for gradients
Limits unless given: 2e-5 and 1e-5, or 1e-10 where both sides are float64. Rotary tables that a file records are
compared and then used, so that float64 can be reached.

--live needs PyTorch (pip install torch), no files: a small model in plain PyTorch gets the same weights and
batches as ours. Compared one by one are forward, gradients, clipping, schedule, decay groups, one update, a
training run of --steps AdamW updates, initialisation and bfloat16; --out gets a plot and the figures.

Exit codes: 0 everything within its limit, 1 something is not, 2 wrong input.
"""

import json
import pathlib
import sys
from collections.abc import Sequence

import jax
from absl import flags
from tqdm import tqdm

from siamese_jax import program
from siamese_jax.errors import InputError
from siamese_jax.interop.golden import compare_golden, format_golden, verdict_line
from siamese_jax.interop.live import (
    MODELS,
    compare_initialisation,
    compare_live,
    format_initialisation,
    format_live,
    plot_live,
    require_torch,
)
from siamese_jax.interop.recorded import TOLERANCES, read_golden
from siamese_jax.run_folder import write_json

flags.DEFINE_enum(
    "dtype", None, sorted(TOLERANCES), "Compute type here; that of the file (live: both) unless given."
)
flags.DEFINE_float("atol", None, "Limit of the absolute difference of outputs, states and the loss.")
flags.DEFINE_float("rtol", None, "Limit of the difference of a gradient, relative to its largest value.")
flags.DEFINE_bool("live", False, "Compare with a PyTorch model in this process.")
flags.DEFINE_multi_string("residual", [], "Live: scheme; may be repeated. siamese_hybrid unless given.")
flags.DEFINE_integer("steps", 100, "Live: AdamW updates of the training run.")
flags.DEFINE_integer("seed", 0, "Live: of weights and batches.")
flags.DEFINE_string("out", None, "Live: folder for the plot and the figures.")
program.define_json_flag()
LIVE_ONLY = ("residual", "steps", "seed", "out")


def main(files: Sequence[str]) -> None:
    given = flags.FLAGS
    for name in ("atol", "rtol"):
        if given[name].value is not None and not given[name].value >= 0:
            raise InputError(f"--{name} is {given[name].value}: it must be 0 or more")
    if given.live == bool(files):
        raise InputError("give golden files (.npz) or --live, one of both (see --help)")
    ok = _live() if given.live else _golden(files)
    sys.exit(program.OK if ok else program.FAULT)


def _golden(files: Sequence[str]) -> bool:
    """Whether everything in the files is within its limit."""
    given, results = flags.FLAGS, []
    for name in LIVE_ONLY:
        if given[name].present:
            raise InputError(f"--{name} is for --live: leave it out with golden files")
    goldens = [read_golden(path) for path in files]  # a wrong file ends here, before the others are computed
    for golden in tqdm(goldens, unit="file", delay=2, leave=False, dynamic_ncols=True):
        jax.config.update("jax_enable_x64", (given.dtype or golden.dtype) == "float64")
        results.append(compare_golden(golden, dtype=given.dtype, atol=given.atol, rtol=given.rtol))
        if not given.json:
            tqdm.write(format_golden(results[-1]) + "\n", file=sys.stdout)
    ok = all(result["ok"] for result in results)
    if given.json:
        print(json.dumps({"ok": ok, "files": program.json_values(results)}))
    elif len(results) > 1:
        width = max(len(result["case"]) for result in results)
        program.say("\n".join(f"{result['case']:{width}}  {verdict_line(result)}" for result in results))
    return ok


def _live() -> bool:
    """Whether every part of every scheme asked for is within its limit."""
    given = flags.FLAGS
    for name in ("atol", "rtol"):
        if given[name].value is not None:
            raise InputError(f"--{name} is for golden files; --live has limits of its own, which its table shows")
    require_torch()
    if not 0 <= given.seed < 2**31:
        raise InputError(f"--seed is {given.seed}: it must be 0 or more, and below 2^31")
    if given.steps < 2:
        raise InputError(f"--steps is {given.steps}: it must be at least 2")
    for residual in given.residual:
        if residual not in MODELS:
            raise InputError(f"--residual is {residual!r}: the PyTorch side has {', '.join(MODELS)}")
    out = pathlib.Path(given.out) if given.out else None
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {out} cannot be made a folder ({error.strerror}): name another one") from error
    results = []
    jax.config.update("jax_enable_x64", False)
    initial = [row.plain() for row in compare_initialisation(say=program.say)]
    for residual in given.residual or ["siamese_hybrid"]:
        for dtype in [given.dtype] if given.dtype else sorted(TOLERANCES, reverse=True):
            jax.config.update("jax_enable_x64", dtype == "float64")
            results.append(compare_live(residual, dtype, given.steps, given.seed, program.say))
            program.say(format_live(results[-1]) + "\n")
    program.say(format_initialisation(initial))
    ok = all(row["ok"] for row in initial) and all(result["ok"] for result in results)
    report = program.json_values({"ok": ok, "runs": results, "initialisation": initial})
    if out is not None:
        plot_live(results, out / "parity.png")
        write_json(out / "parity.json", report)
        program.say(f"plot: {out / 'parity.png'}, figures: {out / 'parity.json'}")
    if given.json:
        print(json.dumps(report))
    return ok


if __name__ == "__main__":
    program.run(main, takes_files=True)
