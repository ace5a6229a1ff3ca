"""The training step compiled for devices that are elsewhere: whether it fits, and what a step of it costs.

Memory is the compiler's own plan. Seconds are what arithmetic, memory and links would take at the vendor's peak;
a real step lies above the largest of the three.
"""

import math
import re
import time
from typing import Any

import jax
import ml_collections

from siamese_jax.layers.platform import compiling_for
from siamese_jax.parallel.flops import program_flops
from siamese_jax.parallel.mesh import BATCH_AXES, make_mesh
from siamese_jax.parallel.program_text import collectives, memory_traffic
from siamese_jax.parallel.topology import Topology
from siamese_jax.training.hardware import known_peak_flops
from siamese_jax.training.plan import Plan, batch_shapes, jit_step, make_plan

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def plan_for(config: ml_collections.ConfigDict, topology: Topology) -> Plan:
    """The plan of a configuration on a topology; InputError for what cannot work there."""
    return make_plan(config, make_mesh(config.mesh, topology.devices))


def predict(plan: Plan, topology: Topology) -> dict[str, Any]:
    """What the compiled step needs, as plain figures that JSON can hold; `fits` and the peak where it is too big.

    Bytes are those of one device, FLOPs those of one update on all devices together.
    """
    began = time.monotonic()
    try:
        compiled, executed_flops = _compile(plan, topology)
    except Exception as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        needed = _needed_bytes(str(error))
        return _settings(plan, topology) | {"fits": False, "peak_bytes_per_device": needed}
    memory = _memory(plan, compiled, topology)
    row = _settings(plan, topology) | memory | {"compile_seconds": time.monotonic() - began}
    return row | _costs(plan, topology, compiled.as_text(), executed_flops)


def _compile(plan: Plan, topology: Topology) -> tuple[Any, int]:
    """(compiled step, FLOPs that it executes over all devices, recomputation included)."""
    platform = topology.chip.platform
    config = plan.config.copy_and_resolve_references()
    config.model.attention = "plain"  # the kernels for GPUs and TPUs hide what they compute
    plain = make_plan(config, plan.mesh)
    with jax.set_mesh(plan.mesh), compiling_for("tpu" if platform == "tpu" else "gpu"):
        compiled = _trace(plan).lower(lowering_platforms=(platform,)).compile()
        return compiled, program_flops(_trace(plain).jaxpr)


def _trace(plan: Plan) -> Any:
    return jit_step(plan).trace(plan.state_shapes, batch_shapes(plan))


def _needed_bytes(message: str) -> int | None:
    """From 'the total memory required ... (300.00G) exceeds ...' or 'Used 24.50G of 15.75G hbm'."""
    match = re.search(r"required[^(]*\(([\d.]+)([KMG])\)|Used ([\d.]+)([KMG]) of", message)
    if match is None:
        return None
    number, unit = (part for part in match.groups() if part)
    return int(float(number) * {"K": 2**10, "M": 2**20, "G": 2**30}[unit])


def _settings(plan: Plan, topology: Topology) -> dict[str, Any]:
    config, parts = plan.config, math.prod(plan.mesh.shape[axis] for axis in BATCH_AXES)
    return {
        "topology": topology.name,
        "device": topology.devices[0].device_kind,
        "devices": plan.mesh.size,
        "mesh": dict(plan.mesh.shape),
        "residual": config.model.residual,
        "remat": config.model.remat,
        "offload_streams": config.model.offload_streams,
        "batch_size": config.training.batch_size,
        "accumulation": plan.accumulation,
        "length": plan.task.positions(config, plan.model_config),
        "sequences_per_device": config.training.batch_size // plan.accumulation // parts,
        "memory_bytes_per_device": topology.chip.memory_bytes,
    }


def _memory(plan: Plan, compiled: Any, topology: Topology) -> dict[str, Any]:
    plan_bytes = compiled.memory_analysis()
    state = plan.state_shapes
    held = plan_bytes.argument_size_in_bytes + plan_bytes.output_size_in_bytes - plan_bytes.alias_size_in_bytes
    # A GPU's figure leaves out what is only read; a TPU's compiler tracks the real peak.
    is_tpu = topology.chip.platform == "tpu"
    peak = plan_bytes.peak_memory_in_bytes if is_tpu else held + plan_bytes.temp_size_in_bytes
    parameters, batch = bytes_per_device(state.params), bytes_per_device(batch_shapes(plan))
    optimizer = bytes_per_device((state.opt_state, state.ema))
    return {
        "fits": peak <= topology.chip.memory_bytes,
        "peak_bytes_per_device": peak,
        "parameter_bytes_per_device": parameters,
        "optimizer_bytes_per_device": optimizer,
        "batch_bytes_per_device": batch,
        "activation_bytes_per_device": peak - parameters - optimizer - batch,
        "host_bytes_per_device": plan_bytes.host_temp_size_in_bytes,
    }


def bytes_per_device(shapes: Any) -> int:
    """What one device holds of a tree of ShapeDtypeStructs with shardings."""
    leaves = jax.tree.leaves(shapes)
    return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)


def _costs(plan: Plan, topology: Topology, text: str, executed_flops: int) -> dict[str, Any]:
    config, chip = plan.config, topology.chip
    peak, source = known_peak_flops(topology.devices[0].device_kind, config.model.dtype)
    units, unit = plan.units_per_step, plan.task.unit
    model_flops = plan.flops_per_unit * units
    moved, traffic = collectives(text), memory_traffic(text)
    network = sum(kind["bytes"] for kind in moved.values())
    seconds = {
        "compute": executed_flops / plan.mesh.size / peak,
        "memory": traffic / chip.memory_bandwidth,
        "network": network / chip.link_bandwidth,
    }
    least, most = max(seconds.values()), sum(seconds.values())
    return {
        f"{unit}s_per_step": units,
        "model_flops_per_step": model_flops,
        "executed_flops_per_step": executed_flops,
        "peak_flops_per_device": peak,
        "peak_flops_source": source,
        "memory_traffic_bytes_per_device": traffic,
        "collectives": moved,
        "seconds": seconds,
        "step_seconds_overlapped": least,
        "step_seconds_serial": most,
        "mfu_overlapped": model_flops / plan.mesh.size / peak / least,
        f"{unit}s_per_second_overlapped": units / least,
    }
