"""One table from parameter names to partitions of the mesh, for the parameters and for all that mirrors them.

Every parameter is matched by exactly one row. Shapes as in the optimiser's table of groups: N stacked layers,
D width, P side of a patch, C channels, H query heads, KV key heads, G = H / KV, K head dim, F hidden, V vocabulary.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from siamese_jax.errors import InputError
from siamese_jax.names import is_stacked, map_paths, one_row, path_name

# Path ending -> the mesh axis of each dimension of ONE layer; `...` stands for dimensions that are not split.
# fsdp splits the width: a layer is gathered when it is used. tensor splits heads, hidden and vocabulary.
PARTITIONS = (
    ("embedding/table", (None, "fsdp")),  # [V, D]
    ("head/kernel", ("fsdp", "tensor")),  # [D, V]
    ("attention/qkv/kernel", ("fsdp", "tensor", ...)),  # [(N,) D, KV, G + 2, K]
    ("attention/qkv/bias", ("tensor", ...)),  # [(N,) KV, G + 2, K]
    ("attention/out/kernel", ("tensor", "fsdp")),  # [(N,) H * K, D]
    ("attention/out/bias", (...,)),
    ("attention/*_norm/scale", (...,)),  # query, key, value, context
    ("attention/*_norm/bias", (...,)),
    ("mlp/up/kernel", ("fsdp", ..., "tensor")),  # [(N,) D, 2, F] gated, [(N,) D, F] plain
    ("mlp/up/bias", (..., "tensor")),
    ("mlp/down/kernel", ("tensor", "fsdp")),  # [(N,) F, D]
    ("mlp/down/bias", (...,)),
    ("patches/kernel", (None, "fsdp")),  # [P * P * C, D]
    ("patches/bias", (...,)),
    ("tokens/*", (...,)),  # [D]
    ("positions/table", (None, "fsdp")),  # [L, D]
    ("classifier/kernel", ("fsdp", None)),  # [D, classes]: small, and any number
    ("classifier/bias", (...,)),
    ("distillation_classifier/kernel", ("fsdp", None)),
    ("distillation_classifier/bias", (...,)),
    ("time/up/kernel", (None, "fsdp")),  # [features, D]
    ("time/up/bias", (...,)),
    ("time/down/kernel", ("fsdp", None)),  # [D, D]
    ("time/down/bias", (...,)),
    ("labels/table", (None, "fsdp")),  # [classes + 1, D]
    ("modulation/linear/kernel", ("fsdp", ...)),  # [(N,) D, 6, D]
    ("modulation/linear/bias", (...,)),
    ("output_modulation/linear/kernel", ("fsdp", ...)),  # [D, 2, D]
    ("output_modulation/linear/bias", (...,)),
    ("output/kernel", ("fsdp", None)),  # [D, P * P * C or twice that]
    ("output/bias", (...,)),
    ("residual/*/scale", (...,)),
    ("residual/*/bias", (...,)),
    ("residual/*/gain", (...,)),
)
# State that mirrors no parameter (counts, keys, coefficients) is on every device. It is small, or a mistake.
MOST_REPLICATED = 1024


def partition_of(path: str, num_dims: int) -> PartitionSpec:
    """The partition of a parameter with `num_dims` dimensions; InputError unless exactly one row matches."""
    row = one_row(path, PARTITIONS, "PARTITIONS in siamese_jax/parallel/rules.py")
    own = num_dims - is_stacked(path)
    if ... in row:
        place = row.index(...)
        row = (*row[:place], *[None] * (own - len(row) + 1), *row[place + 1 :])
    if len(row) != own:
        raise InputError(f"parameter {path} has {own} dimensions a layer, its row in PARTITIONS has {len(row)}")
    spec = (None, *row) if is_stacked(path) else row
    return PartitionSpec(*spec) if any(spec) else PartitionSpec()


def parameter_shardings(shapes: Any, mesh: Mesh) -> Any:
    """The tree of shardings of a parameter tree; InputError for a dimension that its axis does not divide."""
    return map_paths(lambda path, leaf: _sharding(path, leaf, mesh), shapes)


def state_shardings(state: Any, params: Any, mesh: Mesh) -> Any:
    """The shardings of a tree that holds parameters and mirrors of them (moments, averages).

    A leaf lies as the parameter whose path its own ends with; others are small and on every device.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    known = {path_name(path): leaf for path, leaf in leaves}

    def place(path, leaf):
        parts = path.split("/")
        endings = ("/".join(parts[i:]) for i in range(len(parts)))
        twin = next((name for name in endings if name in known and known[name].shape == leaf.shape), None)
        if twin is not None:
            return _sharding(twin, leaf, mesh)
        if math.prod(leaf.shape) > MOST_REPLICATED:
            raise InputError(f"{path} {list(leaf.shape)} mirrors no parameter, so it would be on every device")
        return NamedSharding(mesh, PartitionSpec())

    return map_paths(place, state)


def widest_fsdp(shapes: Any, num_devices: int) -> int:
    """The largest divisor of the number of devices that divides every dimension which fsdp splits."""
    sizes = [num_devices]
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        spec = partition_of(path_name(path), len(leaf.shape))
        sizes += [size for size, axis in zip(leaf.shape, spec, strict=False) if axis == "fsdp"]
    return math.gcd(*sizes)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """The same shapes, each with its sharding: what a checkpoint is restored into, or a program compiled for."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


def _sharding(path: str, leaf: Any, mesh: Mesh) -> NamedSharding:
    spec = partition_of(path, len(leaf.shape))
    for size, axis in zip(leaf.shape, spec, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise InputError(
                f"mesh.{axis} {mesh.shape[axis]} does not divide the {size} of parameter {path} "
                f"{list(leaf.shape)}: change mesh.{axis} or the model's shape"
            )
    return NamedSharding(mesh, spec)
