"""Where every array of a run lies: its partition, and what one device holds of it."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections

from siamese_jax.names import path_name
from siamese_jax.training.parts import plan_here
from siamese_jax.training.plan import Plan, batch_shapes


def sharding_of(config: ml_collections.ConfigDict) -> dict:
    """The arrays of the training state and of a batch on the devices that are here; nothing is allocated."""
    return table_of(plan_here(config))


def table_of(plan: Plan) -> dict:
    """{mesh, arrays: [{name, shape, dtype, partition, bytes, bytes_per_device}], bytes, bytes_per_device}."""
    trees = {"": plan.state_shapes, "batch/": batch_shapes(plan)}
    rows = [
        _row(prefix + path_name(path), leaf)
        for prefix, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return {
        "mesh": dict(plan.mesh.shape),
        "devices": plan.mesh.size,
        "arrays": rows,
        **{key: sum(row[key] for row in rows) for key in ("bytes", "bytes_per_device")},
    }


def _row(name: str, leaf: jax.ShapeDtypeStruct) -> dict[str, Any]:
    item = leaf.dtype.itemsize
    spec = [list(axes) if isinstance(axes, tuple) else axes for axes in leaf.sharding.spec]
    return {
        "name": name,
        "dtype": str(leaf.dtype),
        "shape": list(leaf.shape),
        "partition": spec,
        "bytes": item * math.prod(leaf.shape),
        "bytes_per_device": item * math.prod(leaf.sharding.shard_shape(leaf.shape)),
    }


def format_sharding(result: Mapping) -> str:
    """The table for the reader, the totals last."""
    rows = [
        (row["name"], f"{row['dtype']}{row['shape']}", _spell(row), f"{row['bytes_per_device']:,}")
        for row in result["arrays"]
    ]
    head = ("array", "shape", "partition", "bytes per device")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(4)]
    line = f"{{:<{widths[0]}}}  {{:<{widths[1]}}}  {{:<{widths[2]}}}  {{:>{widths[3]}}}".format
    lines = [line(*row) for row in [head, *rows]]
    mesh = " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items())
    lines.append(
        f"{result['devices']} device(s), {mesh}: {result['bytes']:,} bytes in all, "
        f"{result['bytes_per_device']:,} on each device before activations"
    )
    lines.append("Nothing was trained: leave --show_sharding out to train.")
    return "\n".join(lines)


def _spell(row: Mapping) -> str:
    names = (axis if isinstance(axis, list) else [axis or "-"] for axis in row["partition"])
    axes = ["+".join(name) for name in names]
    return "(" + ", ".join(axes) + ")" if any(axis != "-" for axis in axes) else "on every device"
