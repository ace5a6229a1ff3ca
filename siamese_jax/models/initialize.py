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

from siamese_jax.models.language import LanguageConfig, LanguageModel
from siamese_jax.models.stack import segment_name

TRUNCATION = 3.0  # in standard deviations, as OLMo
# Standard deviation of a normal truncated at 3 sigma; OLMo truncates without correcting for it, as we do.


def _stds(config: LanguageConfig) -> dict[str, float]:
    """Path ending -> standard deviation, as OLMo v1 names its initialisers.

    mitchell also divides `DEPTH_SCALED` by sqrt(i + 1).
    """
    width = config.width**-0.5
    if config.init == "mitchell":
        return {
            "embedding/table": width, "head/kernel": width, "attention/qkv/kernel": width,
            "attention/out/kernel": width / math.sqrt(2), "mlp/up/kernel": width,
            "mlp/down/kernel": (2 * config.mlp_hidden) ** -0.5,
        }  # fmt: skip
    std = config.init_std
    out = std / math.sqrt(2 * config.num_layers) if config.init == "full_megatron" else std
    head = width if config.init == "full_megatron" else std
    return {
        "embedding/table": std, "head/kernel": head, "attention/qkv/kernel": std,
        "attention/out/kernel": out, "mlp/up/kernel": std, "mlp/down/kernel": out,
    }  # fmt: skip


DEPTH_SCALED = ("attention/out/kernel", "mlp/down/kernel")
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
    ending, std = next((ending, std) for ending, std in _stds(config).items() if name.endswith(ending))
    stds = np.full(len(layers), std)
    if config.init == "mitchell" and ending in DEPTH_SCALED:
        stds = stds / np.sqrt(np.asarray(layers) + 1)
    drawn = jax.vmap(lambda layer: _draw(key, name, shape, layer))(jnp.asarray(layers))
    # One constant: two would be multiplied together, or not, as the compiler sees fit in either layout.
    stds = stds.reshape(-1, *(1,) * len(shape)) * _branch_factor(ending, shape, gain)
    return drawn * stds.astype(np.float32)


def _rows(config: LanguageConfig) -> dict[str, tuple[range, float]]:
    """Top-level name of every group of layers -> (its layers, DeepNorm's beta)."""
    rows, first = {}, 0
    segments = config.segments()
    for make_residual, count in segments:
        gain = make_residual.scheme.branch_gain(config.num_layers)
        layers = range(first, first + count)
        if config.scan:
            rows[segment_name(segments, first)] = (layers, gain)
        else:
            rows |= {f"layer_{i}": (range(i, i + 1), gain) for i in layers}
        first += count
    return rows


def _initial_leaf(config, key, rows, path: str, shape) -> jax.Array:
    ending = path.rsplit("/", 1)[-1]
    if ending in CONSTANTS:
        return jnp.full(shape, CONSTANTS[ending], jnp.float32)
    if not any(path.endswith(name) for name in _stds(config)):
        raise ValueError(f"no initialisation rule for parameter {path!r} of shape {shape}")
    top, _, name = path.partition("/")
    if top not in rows:
        return _stds(config)[path] * _draw(key, path, shape, 0)
    layers, gain = rows[top]
    inner = shape[1:] if config.scan else shape
    return _draw_layers(config, key, name, inner, layers, gain).reshape(shape)


def parameter_shapes(config: LanguageConfig) -> dict:
    """The parameter tree as ShapeDtypeStructs, without computing anything."""
    model = LanguageModel(config)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


def initial_parameters(config: LanguageConfig, key: jax.Array) -> dict:
    """The parameter tree, float32: a pure function of (config, key), to be jitted with output shardings."""
    rows = _rows(config)
    flat = flax.traverse_util.flatten_dict(parameter_shapes(config), sep="/")
    drawn = {path: _initial_leaf(config, key, rows, path, leaf.shape) for path, leaf in flat.items()}
    return flax.traverse_util.unflatten_dict(drawn, sep="/")


def count_parameters(params: Mapping) -> int:
    """Number of parameters of a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
