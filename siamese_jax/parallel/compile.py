"""Compiles the full training step for accelerators that are not here, on this CPU, and says what it needs there.

    python -m siamese_jax.parallel.compile --config=configs/lm_1b.py --topology=v5e:16x16
    python -m siamese_jax.parallel.compile --config=configs/lm_1b.py --topology=v5e:4x4 --compare=pre
    python -m siamese_jax.parallel.compile --config=configs/lm_1b.py --topology=v6e:8x8 --search --json

An out-of-memory error found here costs a minute; found on the pod it costs the pod. --config.KEY=VALUE changes the
configuration as for train.py: mesh.data, mesh.fsdp and mesh.tensor divide the chips, training.batch_size over
training.accumulation (or training.sequences_per_device) is what they hold at once, model.remat and
model.offload_streams say what is kept for the backward pass.

TPUs need libtpu (pip install 'jax[tpu]==VERSION'), GPUs jax's CUDA plugin; neither needs the hardware. Topologies:
v4:2x2x4, v5p:4x4x4, v5e:4x4, v6e:16x16 (chips), h100:2x8, h200:1x8 (hosts x GPUs).

How to read it:
  memory     what one device holds at the worst moment; "activations" is all that is not parameters, optimiser state
             or batch: kept values, gradients, gathered layers, scratch. Host memory holds what is offloaded.
  FLOPs      of one update on all devices: of the model (6 a matrix parameter and token, the whole attention
             square, though a kernel may leave its masked half out), and as executed, recomputation included.
  step time  each part at the vendor's peak. A real step takes longer than the largest part; if nothing overlapped
             it would take their sum. These are bounds, not measurements.
Exit codes: 0 done (also where it does not fit: see "fits"), 2 wrong configuration or input, 1 anything else.
"""

import itertools
import math
from collections.abc import Iterator

import ml_collections
from absl import flags
from tqdm import tqdm

from siamese_jax import program
from siamese_jax.config import base_config
from siamese_jax.errors import InputError
from siamese_jax.models.stack import REMAT_POLICIES
from siamese_jax.parallel.mesh import AXES, mesh_shape
from siamese_jax.parallel.topology import Topology, find_topology
from siamese_jax.residual.scheme import known_schemes
from siamese_jax.training.ahead import plan_for, predict
from siamese_jax.training.metrics import format_count, format_duration

Config = ml_collections.ConfigDict
GIB = 2**30


def define_flags() -> None:
    """The options of the program."""
    program.define_config_flag()
    flags.DEFINE_string("topology", None, "What to compile for, such as v5e:16x16 or h200:1x8.")
    flags.DEFINE_list("compare", [], "Residual schemes to compile beside the configuration's, such as pre.")
    flags.DEFINE_bool("search", False, "Try meshes, remat policies and micro-batches; list what fits, best first.")
    flags.DEFINE_list("search_meshes", [], "fsdpxtensor pairs to try, such as 16x1,8x2; data takes what is left.")
    flags.DEFINE_list("search_remats", ["none", "inputs", "branches", "full"], "Values of model.remat to try.")
    flags.DEFINE_list("search_sequences", ["1", "2", "4", "8", "16"], "Sequences on a device at once to try.")
    program.define_json_flag()


def other_scheme(config: Config, scheme: str) -> Config:
    """The configuration with another residual scheme, its options at their defaults."""
    if scheme not in known_schemes():
        raise InputError(f"--compare names {scheme!r}: the known schemes are {', '.join(known_schemes())}")
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.model.residual = scheme
        config.model.residual_options = base_config().model.residual_options
        config.model.residual_overrides = ""
    return config


def compare(config: Config, topology: Topology, schemes: list[str]) -> dict:
    """The row of the configuration; under `compare` those of the schemes, with the ratio of peak memory to each."""
    plans = [plan_for(each, topology) for each in [config, *(other_scheme(config, scheme) for scheme in schemes)]]
    rows = []
    with tqdm(total=len(plans), disable=None, unit="program", leave=False, dynamic_ncols=True) as bar:
        for plan in plans:
            bar.set_description(f"compiling {plan.config.model.residual} for {topology.name}")
            rows.append(predict(plan, topology))
            bar.update()
    own, *others = rows
    for other in others:
        both = own["peak_bytes_per_device"], other["peak_bytes_per_device"]
        other["peak_ratio"] = both[0] / both[1] if all(both) else None
    return own | ({"compare": others} if others else {})


def meshes_to_try(config: Config, num_devices: int, given: list[str]) -> list[tuple[int, int, int]]:
    """(data, fsdp, tensor): those given, or parameters over all devices or parts of them, and tensor 2 and 4."""
    pairs = [_pair(text) for text in given]
    if not pairs:
        sizes = [num_devices // parts for parts in (1, 4, 16) if num_devices % parts == 0]
        pairs = [(fsdp, 1) for fsdp in sizes] + [
            (num_devices // tensor, tensor) for tensor in (2, 4) if num_devices % tensor == 0
        ]
    return [
        mesh_shape({"data": -1, "fsdp": fsdp, "tensor": tensor}, num_devices)
        for fsdp, tensor in dict.fromkeys(pairs)
    ]


def _pair(text: str) -> tuple[int, int]:
    fsdp, _, tensor = text.partition("x")
    if not (fsdp.isdecimal() and tensor.isdecimal()):
        raise InputError(f"--search_meshes has {text!r}: write FSDPxTENSOR, such as 16x1")
    return int(fsdp), int(tensor)


def candidates(config: Config, topology: Topology) -> Iterator[list[Config]]:
    """Groups of configurations that differ in the micro-batch only, smallest first.

    After one that does not fit none does. All make the same update: training.batch_size stays.
    """
    given = flags.FLAGS
    meshes = meshes_to_try(config, len(topology.devices), given.search_meshes)
    for remat in given.search_remats:
        if remat not in REMAT_POLICIES:
            raise InputError(f"--search_remats has {remat!r}: use {', '.join(REMAT_POLICIES)}")
    if not all(text.isdecimal() and int(text) for text in given.search_sequences):
        raise InputError(f"--search_sequences is {','.join(given.search_sequences)}: use whole numbers above 0")
    for mesh, remat in itertools.product(meshes, given.search_remats):
        for offload in (False, True) if remat != "none" else (False,):
            group = []
            for sequences in sorted(map(int, given.search_sequences)):
                if config.training.batch_size % (sequences * mesh[0] * mesh[1]):
                    continue
                each = config.copy_and_resolve_references()
                each.mesh.update(dict(zip(AXES, mesh, strict=True)))
                each.model.remat, each.model.offload_streams = remat, offload
                each.training.accumulation, each.training.sequences_per_device = 1, sequences
                group.append(each)
            yield group


def search(config: Config, topology: Topology) -> dict:
    """All that was tried, under `rows`: what fits first, the fastest first; `skipped` says what was not and why."""
    groups = list(candidates(config, topology))
    rows, skipped = [], []
    with tqdm(total=sum(map(len, groups)), disable=None, unit="program", leave=False, dynamic_ncols=True) as bar:
        for group in groups:
            for done, each in enumerate(group):
                try:
                    plan = plan_for(each, topology)
                except InputError as error:
                    skipped.append({"mesh": dict(each.mesh.items()), "reason": str(error)})
                    bar.update(len(group) - done)
                    break
                bar.set_description(f"{_mesh_text(plan.mesh.shape)}, remat {each.model.remat}")
                row = predict(plan, topology)
                rows.append(row)
                bar.update()
                if not row["fits"]:
                    bar.update(len(group) - done - 1)
                    break
    rows.sort(key=lambda row: (not row["fits"], row.get("step_seconds_serial", math.inf)))
    return {"topology": topology.name, "residual": config.model.residual, "rows": rows, "skipped": skipped}


def _mesh_text(mesh) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one device"


def _size(size: int | None) -> str:
    if size is None:
        return "?"
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def format_row(row: dict) -> str:
    """One program for the reader."""
    kept = f"remat {row['remat']}" + (", streams on the host" if row["offload_streams"] else "")
    lines = [
        f"{row['residual']} on {row['topology']}: {row['devices']} x {row['device']} ({_mesh_text(row['mesh'])}), "
        f"{row['batch_size']} sequences of {row['length']} an update, {row['sequences_per_device']} on a device at "
        f"once, {kept}",
        f"  fits       {'yes' if row['fits'] else 'NO'}: {_size(row['peak_bytes_per_device'])} of "
        f"{_size(row['memory_bytes_per_device'])} a device",
    ]
    if "seconds" not in row:
        return "\n".join(lines)
    seconds = row["seconds"]
    moved = ", ".join(
        f"{each['count']} {kind} {_size(each['bytes'])}"
        for kind, each in row["collectives"].items()
        if each["count"]
    )
    host = row["host_bytes_per_device"]
    lines += [
        f"  memory     parameters {_size(row['parameter_bytes_per_device'])}, optimiser "
        f"{_size(row['optimizer_bytes_per_device'])}, activations {_size(row['activation_bytes_per_device'])}"
        + (f", host {_size(host)}" if host else ""),
        f"  FLOPs      {format_count(row['model_flops_per_step'])} of the model, "
        f"{format_count(row['executed_flops_per_step'])} executed, an update",
        f"  moved      {moved or 'nothing'}, a device and update",
        f"  step time  compute {_time(seconds['compute'])}, memory {_time(seconds['memory'])}, network "
        f"{_time(seconds['network'])}: {_time(row['step_seconds_overlapped'])} if all overlap, "
        f"{_time(row['step_seconds_serial'])} if nothing does; MFU at most {row['mfu_overlapped']:.0%}",
        f"  compiled in {format_duration(row['compile_seconds'])}",
    ]
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return (
        f"{1000 * seconds:.3g} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
        if seconds < 10
        else format_duration(seconds)
    )


def format_comparison(result: dict) -> str:
    """The configuration's program and those beside it."""
    lines = [format_row(result)]
    for other in result.get("compare", []):
        lines.append(format_row(other))
        if other["peak_ratio"]:
            lines.append(f"peak memory of {result['residual']} over {other['residual']}: {other['peak_ratio']:.3f}")
    return "\n".join(lines)


def _search_cells(row: dict) -> list:
    size = _size(row["peak_bytes_per_device"]) + ("" if row["fits"] else " NO")
    cells = [_mesh_text(row["mesh"]), row["remat"], "yes" if row["offload_streams"] else "no"]
    cells += [row["sequences_per_device"], row["accumulation"], size]
    if "seconds" not in row:
        return [*cells, "", "", ""]
    times = _time(row["step_seconds_overlapped"]), _time(row["step_seconds_serial"])
    return [*cells, *times, f"{row['mfu_overlapped']:.0%}"]


def format_search(result: dict) -> str:
    """A table, best first."""
    line = "{:<28} {:<9} {:<8} {:>6} {:>6} {:>11} {:>10} {:>10} {:>6}".format
    head = ("mesh", "remat", "offload", "seqs", "accum", "memory", "overlapped", "serial", "MFU")
    lines = [line(*head)]
    for row in result["rows"]:
        lines.append(line(*_search_cells(row)).rstrip())
    lines += [f"not tried: {_mesh_text(each['mesh'])}: {each['reason']}" for each in result["skipped"]]
    best = next((row for row in result["rows"] if row["fits"]), None)
    if best:
        keys = [f"mesh.{axis}={size}" for axis, size in best["mesh"].items()]
        keys += [f"model.{name}={best[name]}" for name in ("remat", "offload_streams")]
        keys += ["training.accumulation=1", f"training.sequences_per_device={best['sequences_per_device']}"]
        lines.append("the first of these: " + " ".join(f"--config.{key}" for key in keys))
    return "\n".join(lines)


def main() -> None:
    config, given = flags.FLAGS.config, flags.FLAGS
    program.required("config")
    topology = find_topology(program.required("topology"))
    if given.search:
        program.answer(search(config, topology), format_search)
    else:
        program.answer(compare(config, topology, given.compare), format_comparison)


if __name__ == "__main__":
    define_flags()
    program.run(main)
