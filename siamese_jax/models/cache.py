"""The cache of a language model that makes text: keys and values of every layer, as a Flax collection.

Both residual streams of a token end with its last layer; what later tokens read of it are its keys and values, so
whatever the scheme, this is all that is kept. Legend: N layers, B rows, S positions, J key/value heads, K head dim.
"""

import jax
import jax.numpy as jnp

from siamese_jax.layers.activations import constrain
from siamese_jax.models.language import LanguageConfig
from siamese_jax.models.stack import segment_rows

Cache = dict[str, dict]
_AXES = ("batch", None, "heads")


def _constrained(leaf: jax.Array) -> jax.Array:
    """[B, S, J, K], or [N, B, S, J, K] of scanned layers, on its place of the mesh."""
    return constrain(leaf, *(None,) * (leaf.ndim - 4), *_AXES)


def empty_cache(config: LanguageConfig, num_rows: int, length: int) -> Cache:
    """A collection `cache` for so many rows and positions: keys and values of every layer, of the compute type."""

    def layers(*stacked: int) -> dict:
        shape = (*stacked, num_rows, length, config.kv_heads, config.key_dim)
        return {"attention": {name: _constrained(jnp.zeros(shape, config.dtype)) for name in ("keys", "values")}}

    cache = {}
    for name, first, count in segment_rows(config.segments()):
        if config.scan:
            cache[name] = layers(count)
        else:
            cache |= {f"layer_{depth}": layers() for depth in range(first, first + count)}
    return cache


def put_rows(cache: Cache, rows_R: jax.Array, filled: Cache) -> Cache:
    """The cache with `filled`, a cache of R rows and at most as many positions, at the front of its rows `rows`."""

    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        length = part.shape[-3]
        put_at = whole.at[:, rows_R, :length] if whole.ndim == 5 else whole.at[rows_R, :length]
        return _constrained(put_at.set(part))

    return jax.tree.map(put, cache, filled)
