"""The device mesh, and the batch on it: axes data, fsdp and tensor.

data: copies of the model, each with rows of its own. fsdp: rows of its own too, but the parameters are split
and gathered layer by layer. tensor: heads, hidden and vocabulary are split, the rows are the same.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from siamese_jax.errors import InputError

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")


def mesh_shape(config_mesh: Mapping[str, int], num_devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) with the -1 filled in; InputError where the product is not the number of devices."""
    sizes = {axis: config_mesh[axis] for axis in AXES}
    spelled = " x ".join(f"mesh.{axis} {size}" for axis, size in sizes.items())
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise InputError(f"the mesh is {spelled}: sizes are 1 or more, and at most one is -1 (what is left over)")
    given = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and num_devices % given == 0:
        sizes[open_axes[0]] = num_devices // given
    if math.prod(sizes.values()) != num_devices:
        raise InputError(
            f"the mesh {spelled} does not make the {num_devices} device(s) that jax has: "
            "change a size, or set one to -1"
        )
    return tuple(sizes.values())


def make_mesh(config_mesh: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a configuration over the devices, all of jax's unless given; InputError where it does not fit."""
    devices = list(jax.devices() if devices is None else devices)
    shape = mesh_shape(config_mesh, len(devices))
    # GPUs have an index of that name too, their host's; a network between hosts is one that fsdp can cross.
    slices = {getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"}
    if len(slices) > 1:
        grid = _over_slices(shape, devices, len(slices))
    elif devices[0].platform == "cpu":
        grid = np.array(devices).reshape(shape)
    else:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _over_slices(shape: tuple[int, int, int], devices: list, num_slices: int) -> np.ndarray:
    """Several TPU slices: only the data axis may cross the slow network between them."""
    data, fsdp, tensor = shape
    if data % num_slices:
        raise InputError(
            f"mesh.data {data} is not a multiple of the {num_slices} slices: parameters are not split across slices"
        )
    inner = (data // num_slices, fsdp, tensor)
    return mesh_utils.create_hybrid_device_mesh(inner, (num_slices, 1, 1), devices, allow_split_physical_axes=True)


def micro_batches(config_training: Any, mesh: Mesh) -> int:
    """Micro-batches of an update: training.accumulation, or as few as training.sequences_per_device allows.

    InputError where the axes that split the batch do not divide a micro-batch.
    """
    batch, given, parts = config_training.batch_size, config_training.accumulation, batch_parts(mesh)
    if batch // given % parts:
        raise InputError(
            f"mesh.data {mesh.shape['data']} x mesh.fsdp {mesh.shape['fsdp']} = {parts} does not divide the "
            f"{batch // given} windows of a micro-batch (training.batch_size {batch} / training.accumulation "
            f"{given}): change one of them"
        )
    own, most = batch // parts, config_training.sequences_per_device
    if not most:
        return given
    return next(count for count in range(1, own + 1) if own % count == 0 and own // count <= most)


def batch_parts(mesh: Mesh) -> int:
    """Parts that a batch is split into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading axis split over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def own_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """The rows of a batch that the devices of this process hold, ascending: int64."""
    places = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    rows = {row for (part,) in places.values() for row in range(batch_size)[part]}
    return np.array(sorted(rows), np.int64)


def put_batch(
    batch: Mapping[str, np.ndarray], mesh: Mesh, rows: np.ndarray, batch_size: int
) -> dict[str, jax.Array]:
    """Global arrays [batch_size, ...] of which this process gives `rows`, those of `own_rows`."""
    sharding = batch_sharding(mesh)
    place = {int(row): i for i, row in enumerate(rows)}  # the rows of one device are neighbours here too

    def put(own: np.ndarray) -> jax.Array:
        def part(index):
            wanted = range(batch_size)[index[0]]
            first = place[wanted[0]]
            return own[first : first + len(wanted)][:, *index[1:]]

        return jax.make_array_from_callback((batch_size, *own.shape[1:]), sharding, part)

    return {name: put(own) for name, own in batch.items()}
