"""Initial parameters by name: one table from path endings to standard deviations.

Every array is drawn from a key made of the seed, its name and its layer, so that scanned and unrolled
stacks, and any sharding, start from the same numbers. Legend: N layers, D width, F hidden width.
"""

import math
import zlib
from collections.abc import Mapping

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from siamese_jax.models.families import parameter_shapes
from siamese_jax.models.stack import segment_rows
from siamese_jax.models.transformer import TransformerConfig
from siamese_jax.names import ends_with

TRUNCATION = 3.0  # in standard deviations, as OLMo
# A model's table has the deviation before truncation; OLMo truncates without correcting for it, as we do.
CONSTANTS = {"scale": 1.0, "gain": 1.0, "bias": 0.0}


def _branch_factor(ending: str, shape: tuple[int, ...], gain: float) -> np.ndarray | float:
    """DeepNorm's beta on W_v, W_o and both MLP matrices; W_q and W_k keep theirs."""
    if ending in ("attention/out/kernel", "mlp/up/kernel", "mlp/down/kernel"):
        return gain
    if ending == "attention/qkv/kernel":
        factor = np.ones((shape[-2], 1), np.float32)
        factor[-1] = gain  # [D, J, G + 2, K]: the value is the last of its group
        return factor
    return 1.0


def _draw(key: jax.Array, name: str, shape: tuple[int, ...], layer: int | jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(name.encode())), layer)
    return jax.random.truncated_normal(key, -TRUNCATION, TRUNCATION, shape, jnp.float32)


def _draw_layers(config, key, name: str, shape, layers: range, gain: float) -> jax.Array:
    """[len(layers), *shape]: the kernel of each of these layers; equal to drawing them one by one."""
    stds_by_ending = config.initial_stds()
    ending, std = next((ending, std) for ending, std in stds_by_ending.items() if ends_with(name, ending))
    stds = np.full(len(layers), std)
    if ending in config.depth_scaled:
        stds = stds / np.sqrt(np.asarray(layers) + 1)
    drawn = jax.vmap(lambda layer: _draw(key, name, shape, layer))(jnp.asarray(layers))
    # One constant: two would be multiplied together, or not, as the compiler sees fit in either layout.
    stds = stds.reshape(-1, *(1,) * len(shape)) * _branch_factor(ending, shape, gain)
    return drawn * stds.astype(np.float32)


def _rows(config: TransformerConfig) -> dict[str, tuple[range, float]]:
    """Top-level name of every group of layers -> (its layers, DeepNorm's beta)."""
    rows, segments = {}, config.segments()
    for (make_residual, _), (name, first, count) in zip(segments, segment_rows(segments), strict=True):
        gain = make_residual.scheme.branch_gain(config.num_layers)
        if config.scan:
            rows[name] = (range(first, first + count), gain)
        else:
            rows |= {f"layer_{i}": (range(i, i + 1), gain) for i in range(first, first + count)}
    return rows


def _initial_leaf(config, key, rows, path: str, shape) -> jax.Array:
    ending = path.rsplit("/", 1)[-1]
    if ending in CONSTANTS:
        return jnp.full(shape, CONSTANTS[ending], jnp.float32)
    stds = config.initial_stds()
    if not any(ends_with(path, name) for name in stds):
        raise ValueError(f"no initialisation rule for parameter {path!r} of shape {shape}")
    top, _, name = path.partition("/")
    if top not in rows:
        return stds[path] * _draw(key, path, shape, 0)
    layers, gain = rows[top]
    inner = shape[1:] if config.scan else shape
    return _draw_layers(config, key, name, inner, layers, gain).reshape(shape)


def initial_parameters(config: TransformerConfig, key: jax.Array) -> dict:
    """The parameter tree, float32: a pure function of (config, key), to be jitted with output shardings."""
    rows = _rows(config)
    flat = flax.traverse_util.flatten_dict(parameter_shapes(config), sep="/")
    drawn = {path: _initial_leaf(config, key, rows, path, leaf.shape) for path, leaf in flat.items()}
    return flax.traverse_util.unflatten_dict(drawn, sep="/")


def count_kernels(shapes: Mapping) -> int:
    """Parameters of all matrices; a table that is looked up is none."""
    flat = jax.tree_util.tree_leaves_with_path(shapes)
    return sum(math.prod(leaf.shape) for path, leaf in flat if path[-1].key == "kernel")


def count_parameters(params: Mapping) -> int:
    """Number of parameters of a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
