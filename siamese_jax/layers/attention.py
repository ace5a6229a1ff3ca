"""Multi-head attention with grouped queries, rotary positions and norms on q, k, v and the context.

By option with a cache of keys and values, for text that is made token by token.

Legend: B batch, L length, S length of keys, D width, H query heads, J key/value heads, G = H / J query heads
of one key/value head, K head dim. Query head j * G + g reads key/value head j.
"""

import functools
import logging
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from siamese_jax.layers.activations import constrain, mesh_axis_size, mesh_is_known
from siamese_jax.layers.dense import Dense
from siamese_jax.layers.norms import RMSNorm, statistics_type
from siamese_jax.layers.platform import target_platform
from siamese_jax.layers.rotary import rotate
from siamese_jax.layers.splash import LANES, fits_splash, splash_attention

Array = jax.Array
IMPLEMENTATIONS = ("auto", "plain", "cudnn", "splash")
NEEDS = {"cudnn": "gpu", "splash": "tpu"}  # platform of an implementation that runs on one only
NORM_PLACES = ("none", "head", "full")
_logged: set[str] = set()


def attention_mask(length: int, causal: bool, segments_BL: Array | None) -> Array | None:
    """True where a query may read a key: [1 or B, L, L], or None when everything may be read.

    With segments, a position reads only positions of its own segment (document).
    """
    mask = jnp.tril(jnp.ones((1, length, length), bool)) if causal else None
    if segments_BL is not None:
        same = segments_BL[:, :, None] == segments_BL[:, None, :]
        mask = same if mask is None else mask & same
    return mask


def _weights_and_sums(scores: Array, mask: Array | None) -> tuple[Array, Array]:
    """exp(scores - max) and its sum over keys; the division waits until after the value product."""
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - highest)
    return weights, jnp.sum(weights, axis=-1, keepdims=True)


def _grouped(q_BLJGK: Array, k_BSJK: Array, v_BSJK: Array, mask: Array | None) -> Array:
    """softmax(q k^T / sqrt(K)) v with every axis kept, so that batch and heads can be sharded."""
    wide = statistics_type(q_BLJGK.dtype)
    scores = jnp.einsum("bljgk,bsjk->bjgls", q_BLJGK, k_BSJK, preferred_element_type=wide)
    mask = None if mask is None else mask[:, None, None]
    weights, sums = _weights_and_sums(scores * q_BLJGK.shape[-1] ** -0.5, mask)
    context = jnp.einsum("bjgls,bsjk->bjglk", weights.astype(v_BSJK.dtype), v_BSJK, preferred_element_type=wide)
    return jnp.einsum("bjglk->bljgk", (context / sums).astype(v_BSJK.dtype))


def _merged(q_BLJGK: Array, k_BSJK: Array, v_BSJK: Array, mask: Array | None) -> Array:
    """The same as one batched matrix product over merged batch and head axes: twice as fast on XLA:CPU."""
    wide = statistics_type(q_BLJGK.dtype)
    batch, length, kv_heads, groups, head_dim = q_BLJGK.shape
    keys = k_BSJK.shape[1]
    q = jnp.einsum("bljgk->bjglk", q_BLJGK).reshape(batch * kv_heads, groups * length, head_dim)
    k = jnp.einsum("bsjk->bjsk", k_BSJK).reshape(batch * kv_heads, keys, head_dim)
    v = jnp.einsum("bsjk->bjsk", v_BSJK).reshape(batch * kv_heads, keys, head_dim)
    scores = jnp.einsum("nqk,nsk->nqs", q, k, preferred_element_type=wide) * head_dim**-0.5
    scores = scores.reshape(batch, kv_heads * groups, length, keys)
    weights, sums = _weights_and_sums(scores, None if mask is None else mask[:, None])
    weights = weights.astype(v.dtype).reshape(batch * kv_heads, groups * length, keys)
    context = jnp.einsum("nqs,nsk->nqk", weights, v, preferred_element_type=wide)
    context = context / sums.reshape(batch * kv_heads, groups * length, 1)
    context = context.astype(v.dtype).reshape(batch, kv_heads, groups, length, head_dim)
    return jnp.einsum("bjglk->bljgk", context)


def _plain_form(platform: str) -> str:
    # Merged batch and head axes cannot both be split.
    return "merged" if platform == "cpu" and mesh_axis_size("tensor") == 1 else "grouped"


def choose_implementation(wanted: str, platform: str, dtype, length: int, head_dim: int, masked: bool) -> str:
    """'merged', 'grouped', 'cudnn' or 'splash' for this platform, type and shape; the choice is logged once."""
    fits_cudnn = platform == "gpu" and jnp.dtype(dtype).itemsize == 2 and head_dim % 8 == 0 and head_dim <= 128
    if wanted == "cudnn" or (wanted == "auto" and fits_cudnn and not masked):
        choice = "cudnn"
    elif (wanted == "splash" and length % LANES == 0) or (
        wanted == "auto" and fits_splash(platform, dtype, length, head_dim) and mesh_is_known()
    ):
        choice = "splash"
    else:
        choice = _plain_form(platform)
    if choice not in _logged:
        _logged.add(choice)
        logging.getLogger("siamese_jax").debug(
            "attention: %s (%s, %s, head dim %d)", choice, platform, dtype, head_dim
        )
    return choice


def dot_product_attention(
    q_BLJGK: Array,
    k_BSJK: Array,
    v_BSJK: Array,
    *,
    causal: bool,
    segments_BL: Array | None,
    implementation: str,
) -> Array:
    """softmax(q k^T / sqrt(K)) v -> [B, L, J, G, K], for rematerialisation named 'context'.

    Scores and softmax in float32 or wider.
    """
    batch, length, kv_heads, groups, head_dim = q_BLJGK.shape
    masked = segments_BL is not None
    choice = choose_implementation(implementation, target_platform(), q_BLJGK.dtype, length, head_dim, masked)
    if choice == "splash":
        return splash_attention(
            q_BLJGK, k_BSJK, v_BSJK, causal=causal, segments_BL=segments_BL, name="context",
            interpret=target_platform() == "cpu",
        )  # fmt: skip
    if choice == "cudnn":
        mask = None if segments_BL is None else attention_mask(length, False, segments_BL)[:, None]
        q = q_BLJGK.reshape(batch, length, kv_heads * groups, head_dim)
        context = jax.nn.dot_product_attention(
            q, k_BSJK, v_BSJK, mask=mask, is_causal=causal, implementation="cudnn"
        )
        context = context.reshape(q_BLJGK.shape)
    else:
        form = _merged if choice == "merged" else _grouped
        context = form(q_BLJGK, k_BSJK, v_BSJK, attention_mask(length, causal, segments_BL))
    return _named(constrain(context, "batch", None, "heads"), "context")


def cached_attention(q_BLJGK: Array, k_BSJK: Array, v_BSJK: Array, starts_B: Array) -> Array:
    """Attention of a few new positions over cached ones -> [B, L, J, G, K].

    The new positions of row b are starts[b], starts[b] + 1, ...: their own keys and values are in the cache, and
    what lies behind them there is not read.
    """
    last_BL = starts_B[:, None] + jnp.arange(q_BLJGK.shape[1])
    mask_BLS = jnp.arange(k_BSJK.shape[1]) <= last_BL[..., None]
    form = _merged if _plain_form(target_platform()) == "merged" else _grouped
    return constrain(form(q_BLJGK, k_BSJK, v_BSJK, mask_BLS), "batch", None, "heads")


def _named(x: Array, name: str) -> Array:
    """x [B, L, heads...] under a name for rematerialisation; flat, or a TPU copies the stack of all layers."""
    return checkpoint_name(x.reshape(*x.shape[:2], -1), name).reshape(x.shape)


class Attention(nn.Module):
    """Self-attention [B, L, D] -> [B, L, D]: a branch that knows nothing of residual streams.

    One kernel `qkv` [D, J, G + 2, K] holds, for every key/value head, its G query heads, its key and its
    value: one product instead of three, and axis J can be sharded without moving data. A norm place is
    'none', 'head' (a gain [K] shared by the heads) or 'full' (a gain over all heads of q, k, v or the
    context). Norms come before the rotation.

    Where a collection `cache` is given, with `keys` and `values` [B, S, J, K] of the compute type, both are written
    there, after norm and rotation: see `__call__`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = True
    query_norm: str = "none"
    key_norm: str = "none"
    value_norm: str = "none"
    context_norm: str = "none"
    norm: Callable[..., nn.Module] = RMSNorm
    use_bias: bool = False
    dtype: str = "float32"
    implementation: str = "auto"

    def _normalise(self, place: str, name: str, x: Array) -> Array:
        """Norm of x [B, L, heads..., K] per head or over all heads."""
        if place == "none":
            return x
        if place == "head":
            return self.norm(name=name)(x)
        flat = x.reshape(*x.shape[:2], -1)
        return self.norm(name=name)(flat).reshape(x.shape)

    def _remember(self, name: str, x_BLJK: Array, starts_B: Array | None) -> Array:
        """The cached array, with x written to it from each row's start on."""
        whole = self.get_variable("cache", name)
        if starts_B is None:
            whole = jax.lax.dynamic_update_slice_in_dim(whole, x_BLJK, 0, axis=1)
        else:
            write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
            whole = jax.vmap(write)(whole, x_BLJK, starts_B)
        whole = constrain(whole, "batch", None, "heads")
        self.put_variable("cache", name, whole)
        return whole

    @nn.compact
    def __call__(self, x_BLD, rotary=None, segments_BL=None, starts_B=None):
        """rotary: (sin, cos) tables [L, K] or [B, L, K]; segments: document numbers, None = one document.

        starts: only with a cache, the position of each row's first token: it and those after it see what the cache
        holds of the positions before, which must be one document. None: x is what the cache is filled with from
        its front, and all that x sees.
        """
        groups = self.num_heads // self.num_kv_heads
        features = (self.num_kv_heads, groups + 2, self.head_dim)
        qkv = Dense(features, self.use_bias, self.dtype, name="qkv")(x_BLD)
        qkv = _named(constrain(qkv, "batch", None, "heads"), "qkv")
        q, k, v = qkv[..., :groups, :], qkv[..., groups, :], qkv[..., groups + 1, :]
        q = self._normalise(self.query_norm, "query_norm", q)
        k = self._normalise(self.key_norm, "key_norm", k)
        v = self._normalise(self.value_norm, "value_norm", v)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if self.has_variable("cache", "keys"):
            cached = self._remember("keys", k, starts_B), self._remember("values", v, starts_B)
        if starts_B is None:
            context = dot_product_attention(
                q, k, v, causal=self.causal, segments_BL=segments_BL, implementation=self.implementation
            )
        else:
            context = cached_attention(q, *cached, starts_B)
        context = self._normalise(self.context_norm, "context_norm", context)
        context = context.reshape(*x_BLD.shape[:-1], self.num_heads * self.head_dim)
        out = Dense(x_BLD.shape[-1], self.use_bias, self.dtype, name="out")(context)
        return checkpoint_name(constrain(out, "batch"), "attention_out")
