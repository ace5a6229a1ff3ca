"""The device mesh and where arrays lie on it: parameters on every device, the batch split along `data`."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from siamese_jax.errors import InputError

AXES = ("data",)


def make_mesh(config_mesh, batch_size: int, accumulation: int) -> Mesh:
    """The mesh of a configuration; InputError where it fits neither the devices nor the batch.

    config_mesh.data: devices along the batch, -1 for all.
    """
    available = jax.device_count()
    wanted = available if config_mesh.data == -1 else config_mesh.data
    if not 1 <= wanted <= available:
        raise InputError(
            f"mesh.data is {config_mesh.data}, but jax has {available} device(s): use 1 to {available} or -1"
        )
    micro = batch_size // accumulation
    if micro % wanted:
        raise InputError(
            f"mesh.data {wanted} does not divide the {micro} windows of a micro-batch "
            f"(training.batch_size {batch_size} / training.accumulation {accumulation}): change one of them"
        )
    return jax.make_mesh((wanted,), AXES, devices=jax.devices()[:wanted], axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading axis split over the devices."""
    return NamedSharding(mesh, PartitionSpec("data"))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows of a batch as global arrays."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
