"""Step time of residual schemes side by side: forward, backward and optimiser, as training compiles them.

    python -m siamese_jax.training.benchmark --config=configs/quickstart.py
    python -m siamese_jax.training.benchmark --config=configs/quickstart.py --schemes=pre,siamese --rounds=20
    python -m siamese_jax.training.benchmark --config=configs/quickstart.py --schemes=pre,pre --json

All schemes run in this process on the same shapes and the same random examples, so no data are needed, and
take turns: A B C, A B C, ... Each turn is --steps updates. The scheme of the configuration keeps its options,
the others have their defaults; attention, MLP and optimiser are those of the configuration for all.

How to read it:
  ratio    step time over that of the first scheme in the same round: what slows the machine for a while slows
           both. The median counts; the range says how far to trust it. --schemes=pre,pre shows what chance
           alone does on this machine: a difference of that size is none.
  ms/step  median over the rounds. MFU counts 6 FLOPs a matrix parameter and the whole attention square, over
           the peak of the devices (--json says which); norms and residual additions count as nothing.
  temp     what the compiler sets aside for activations and scratch on one device; peak: with parameters,
           optimiser state and batch. Computed by the compiler, not measured.
The states of all schemes are in memory together: name fewer schemes where that is too much.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
from absl import flags
from tqdm import tqdm

from siamese_jax import program
from siamese_jax.config import base_config
from siamese_jax.errors import InputError
from siamese_jax.models.initialize import count_parameters
from siamese_jax.parallel.mesh import own_rows, put_batch
from siamese_jax.residual.scheme import known_schemes
from siamese_jax.training.hardware import device_peak_flops
from siamese_jax.training.metrics import format_count
from siamese_jax.training.parts import plan_here
from siamese_jax.training.plan import Plan, compile_step, fresh_state

WARM_UP_STEPS = 2


@dataclasses.dataclass
class Contender:
    """One scheme, compiled, with its state; seconds: of one step, round by round."""

    plan: Plan
    step: Callable
    state: Any
    compile_seconds: float
    seconds: list[float] = dataclasses.field(default_factory=list)

    def run(self, batch, num_steps: int) -> float:
        """Seconds of one of num_steps updates, the last one finished."""
        began = time.perf_counter()
        for _ in range(num_steps):
            self.state, metrics = self.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        return (time.perf_counter() - began) / num_steps


def scheme_config(config: ml_collections.ConfigDict, scheme: str) -> ml_collections.ConfigDict:
    """The configuration with another residual scheme, whose options have their defaults."""
    if scheme not in known_schemes():
        raise InputError(f"--schemes names {scheme!r}: the known schemes are {', '.join(known_schemes())}")
    config = config.copy_and_resolve_references()
    if scheme != config.model.residual:
        with config.unlocked():
            config.model.residual = scheme
            config.model.residual_options = base_config(config.family).model.residual_options
    return config


def _compile(plan: Plan, batch) -> Contender:
    state = fresh_state(plan)
    began = time.perf_counter()
    step = compile_step(plan)
    contender = Contender(plan, step, state, time.perf_counter() - began)
    contender.run(batch, WARM_UP_STEPS)
    return contender


def benchmark(config: ml_collections.ConfigDict, schemes: Sequence[str], rounds: int, steps: int) -> dict:
    """The figures as a dict that JSON can hold; `schemes` in it holds one row for each scheme, in order."""
    for name, value in (("schemes", len(schemes)), ("rounds", rounds), ("steps", steps)):
        if value < 1:
            raise InputError(f"the benchmark got {value} {name}: it needs at least 1")
    plans = [plan_here(scheme_config(config, scheme)) for scheme in schemes]
    peak, peak_source = device_peak_flops(plans[0].model_config.dtype)
    mesh, batch_size = plans[0].mesh, config.training.batch_size
    rows = own_rows(mesh, batch_size)
    noise = plans[0].task.random_batch(config, plans[0].model_config)
    batch = {name: values[rows] for name, values in noise.items()}
    batch = put_batch(batch, mesh, rows, batch_size)
    contenders = []
    with tqdm(total=len(schemes) * (1 + rounds), unit="turn", leave=False, dynamic_ncols=True) as bar:
        for scheme, plan in zip(schemes, plans, strict=True):
            bar.set_description(f"compiling {scheme}", refresh=False)
            contenders.append(_compile(plan, batch))
            bar.update()
        for i in range(rounds):
            bar.set_description(f"round {i + 1} of {rounds}", refresh=False)
            for contender in contenders:
                contender.seconds.append(contender.run(batch, steps))
                bar.update()
    return {
        "device": jax.devices()[0].device_kind,
        "devices": mesh.size,
        "batch_size": config.training.batch_size,
        "length": plans[0].task.positions(config, plans[0].model_config),
        "unit": plans[0].task.unit,
        "rounds": rounds,
        "steps": steps,
        "peak_flops": peak and peak * mesh.size,
        "peak_flops_source": peak_source,
        "schemes": [_row(contender, contenders[0].seconds, peak) for contender in contenders],
    }


def _row(contender: Contender, first_seconds: list[float], peak: float | None) -> dict:
    plan, seconds = contender.plan, statistics.median(contender.seconds)
    model = plan.model_config
    ratios = [own / first for own, first in zip(contender.seconds, first_seconds, strict=True)]
    rate, flops, unit = plan.units_per_step / seconds, plan.flops_per_unit, plan.task.unit
    return {
        "scheme": model.residual,
        "residual_options": dict(model.residual_options),
        "parameters": count_parameters(plan.state_shapes.params),
        "step_seconds": seconds,
        "step_seconds_by_round": contender.seconds,
        f"{unit}s_per_second": rate,
        f"flops_per_{unit}": flops,
        "mfu": rate * flops / (peak * plan.mesh.size) if peak else None,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "compile_seconds": contender.compile_seconds,
        **_memory(contender.step),
    }


def _memory(compiled) -> dict[str, int | None]:
    """The compiler's plan for one device; None where a backend has none."""
    plan = compiled.memory_analysis()
    if plan is None:
        return {"temp_bytes": None, "peak_bytes": None}
    # Not plan.peak_memory_in_bytes: on a CPU that leaves the temporaries out. Donated arguments count once.
    held = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return {"temp_bytes": plan.temp_size_in_bytes, "peak_bytes": held + plan.temp_size_in_bytes}


def format_table(result: dict) -> str:
    """The figures as a table, a line for each scheme."""
    line = "{:<15} {:>10} {:>9} {:>7} {:>6} {:>13} {:>9} {:>9} {:>9} {:>11}".format
    unit = f"{result['unit']}s"
    names = ("ms/step", f"{unit}/s", "MFU", "ratio", "(range)", "compile", "temp", "peak", "parameters")
    lines = [line("scheme", *names)]
    for row in result["schemes"]:
        ratio = row["ratio"]
        lines.append(line(
            row["scheme"], f"{1000 * row['step_seconds']:.1f}", format_count(row[f"{unit}_per_second"]),
            "?" if row["mfu"] is None else f"{row['mfu']:.1%}", f"{ratio['median']:.3f}",
            f"({ratio['min']:.3f}-{ratio['max']:.3f})", f"{row['compile_seconds']:.1f}s",
            _format_bytes(row["temp_bytes"]), _format_bytes(row["peak_bytes"]), f"{row['parameters']:,}",
        ))  # fmt: skip
    return "\n".join(lines)


def _format_bytes(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**20:,.1f}Mi"


def define_flags() -> None:
    """The options of the program."""
    program.define_config_flag()
    flags.DEFINE_list("schemes", ["pre", "siamese", "siamese_hybrid"], "Residual schemes; ratios to the first.")
    flags.DEFINE_integer("rounds", 10, "Turns of each scheme.")
    flags.DEFINE_integer("steps", 3, "Updates of a turn.")
    program.define_json_flag()


def main() -> None:
    program.required("config")
    given = flags.FLAGS
    result = benchmark(given.config, given.schemes, given.rounds, given.steps)
    if given.json:
        print(json.dumps(result, allow_nan=False))
        return
    program.say(
        "{devices} x {device}, {batch_size} examples of {length} tokens, {rounds} rounds of {steps} updates; "
        "peak: {peak_flops_source}".format(**result)
    )
    program.say(format_table(result))


if __name__ == "__main__":
    define_flags()
    program.run(main)
