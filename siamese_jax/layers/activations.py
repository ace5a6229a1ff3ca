"""Where activations lie on a device mesh: logical axes, through one helper that does nothing without a mesh.

A model says what an axis is; this table says which mesh axes it is split over. Legend: B batch, L length.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

# Logical axis -> mesh axes. Only the axes that the mesh in force has are used.
MESH_AXES = {
    "batch": ("data", "fsdp"),
    "gathered_batch": ("data",),  # where fsdp splits the width of the lookup instead
    "width": ("fsdp",),
    "heads": ("tensor",),  # key/value heads with their query heads
    "hidden": ("tensor",),  # of the MLP
    "vocab": ("tensor",),
}


def _sizes() -> dict[str, int]:
    """Axis -> size of the mesh in force, of the axes that the compiler places by itself; {} without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind == AxisType.Auto}


def mesh_axis_size(name: str) -> int:
    """Devices along a mesh axis; 1 without a mesh."""
    return _sizes().get(name, 1)


def mesh_is_known() -> bool:
    """Whether all axes of the mesh in force are those of MESH_AXES; of another program's nothing is known."""
    known = {axis for axes in MESH_AXES.values() for axis in axes}
    return all(size == 1 or name in known for name, size in _sizes().items())


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """x, laid out by the logical axes of its leading dimensions; the others are not split.

    An axis that does not divide its dimension is left out: a single row is on every device.
    """
    sizes = _sizes()
    if math.prod(sizes.values()) == 1:
        return x
    spec = []
    for name, size in zip(logical, x.shape, strict=False):
        axes = tuple(axis for axis in MESH_AXES.get(name, ()) if sizes.get(axis, 1) > 1)
        fits = size % math.prod(sizes[axis] for axis in axes) == 0
        spec.append(axes if axes and fits else None)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def on_own_blocks(function: Callable, arrays: Sequence[tuple], out: Sequence[str | None]) -> Any:
    """function(*arrays), on every device for its own part: for kernels that the compiler cannot divide by itself.

    arrays: (array, logical axes of its leading dimensions) each; out: those of the result. An axis that does not
    divide a dimension of any of them splits none: every device then computes the whole.
    """
    sizes = _sizes()
    if math.prod(sizes.values()) == 1:
        return function(*(x for x, *_ in arrays))
    named = [(name, size) for x, *logical in arrays for name, size in zip(logical, x.shape, strict=False) if name]
    split = {}
    for name, _ in named:
        axes = tuple(axis for axis in MESH_AXES[name] if sizes.get(axis, 1) > 1)
        parts = math.prod(sizes[axis] for axis in axes)
        fits = all(size % parts == 0 for other, size in named if other == name)
        split[name] = axes if axes and fits else None
    specs = [PartitionSpec(*(split.get(name) for name in logical)) for _, *logical in arrays]
    result = PartitionSpec(*(split.get(name) for name in out))
    local = jax.shard_map(function, in_specs=tuple(specs), out_specs=result, axis_names=set(sizes), check_vma=False)
    return local(*(x for x, *_ in arrays))


def on_own_rows(function: Callable, rows: Any, weight: jax.Array) -> Any:
    """function(rows, weight) -> rows, on every device for its own rows (leading axis) and the whole weight.

    A weight split along its leading axis is gathered once and its gradient summed over the devices once, whatever
    loop `function` runs over parts of its rows: the compiler left alone would do both for every part.
    """
    sizes = _sizes()
    axes = tuple(axis for axis in MESH_AXES["batch"] if sizes.get(axis, 1) > 1)
    parts = math.prod(sizes[axis] for axis in axes)
    if parts == 1 or any(x.shape[0] % parts for x in jax.tree.leaves(rows)):
        return function(rows, weight)
    (split,) = MESH_AXES["width"]
    # With a tensor axis the compiler would undo that one's split in a gather by hand; it gathers well itself, but
    # sums gradients whole.
    is_split = split in axes and weight.shape[0] % sizes[split] == 0 and sizes.get("tensor", 1) == 1

    def local(rows, weight):
        return function(rows, jax.lax.all_gather(weight, split, tiled=True) if is_split else weight)

    specs = PartitionSpec(axes), PartitionSpec(split if is_split else None)
    return jax.shard_map(local, in_specs=specs, out_specs=specs[0], axis_names=set(axes), check_vma=False)(
        rows, weight
    )
