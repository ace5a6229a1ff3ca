"""Attention on TPUs that never holds the scores in main memory: jax's splash kernel, on every device by itself.

Legend: B batch, L length, J key/value heads, G query heads of one key/value head, K head dim.
"""

import jax
import jax.numpy as jnp

from siamese_jax.layers.activations import on_own_blocks

Array = jax.Array
LANES = 128  # of a TPU's vector registers: what a block's rows and a head's width are multiples of
BLOCKS = (512, 384, 256, 128)  # rows of queries and of keys that are on the chip at a time


def fits_splash(platform: str, dtype, length: int, head_dim: int) -> bool:
    """Whether the kernel is the better choice. Half a register's width is padded; less would waste too much."""
    return platform == "tpu" and jnp.dtype(dtype).itemsize == 2 and length % LANES == 0 and head_dim % 64 == 0


def splash_attention(
    q_BLJGK: Array,
    k_BLJK: Array,
    v_BLJK: Array,
    *,
    causal: bool,
    segments_BL: Array | None,
    name: str,
    interpret: bool = False,
) -> Array:
    """softmax(q k^T / sqrt(K)) v -> [B, L, J, G, K]; scores and softmax in float32.

    L must be a multiple of 128. name: under which rematerialisation knows the result and the softmax's sums, which
    the backward pass needs. interpret: compute as the kernel would, on any platform.
    """

    def local(q, k, v, *segments):
        return _on_one_device(q, k, v, segments[0] if segments else None, causal, name, interpret)

    blocks = [(q_BLJGK, "batch", None, "heads"), (k_BLJK, "batch", None, "heads"), (v_BLJK, "batch", None, "heads")]
    if segments_BL is not None:
        blocks.append((segments_BL, "batch"))
    return on_own_blocks(local, blocks, ("batch", None, "heads"))


def _on_one_device(q, k, v, segments, causal: bool, name: str, interpret: bool) -> Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    batch, length, kv_heads, groups, head_dim = q.shape
    one_head = (splash.CausalMask if causal else splash.FullMask)((length, length))
    block = next(rows for rows in BLOCKS if length % rows == 0)
    rows = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), block)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([one_head] * (kv_heads * groups)),
        block_sizes=splash.BlockSizes(**rows), residual_checkpoint_name=name, interpret=interpret,
    )  # fmt: skip
    q = jnp.einsum("bljgk->bjglk", q * head_dim**-0.5).reshape(batch, kv_heads * groups, length, head_dim)
    k, v = (jnp.einsum("bljk->bjlk", x) for x in (k, v))
    spare = [(0, 0)] * 3 + [(0, -head_dim % LANES)]
    q, k, v = (jnp.pad(x, spare) for x in (q, k, v))
    if segments is None:
        context = jax.vmap(kernel)(q, k, v)
    else:
        context = jax.vmap(kernel)(q, k, v, splash.SegmentIds(segments, segments))
    context = context[..., :head_dim].reshape(batch, kv_heads, groups, length, head_dim)
    return jnp.einsum("bjglk->bljgk", context)
