"""Cross-entropy over slices of the sequence, so that no [B, L, V] array exists.

Legend: B batch, L length, S slice length, D width, V padded vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from siamese_jax.layers.activations import on_own_rows
from siamese_jax.layers.norms import statistics_type

Array = jax.Array


def logits_of(hidden_BLD: Array, kernel_DV: Array, vocab_size: int) -> Array:
    """Logits [B, L, V] in float32 or wider; rows that only pad the vocabulary are minus infinity."""
    wide = statistics_type(hidden_BLD.dtype)
    kernel = kernel_DV.astype(hidden_BLD.dtype)
    logits = jnp.einsum("bld,dv->blv", hidden_BLD, kernel, preferred_element_type=wide)
    if vocab_size == kernel_DV.shape[1]:
        return logits
    return jnp.where(jnp.arange(kernel_DV.shape[1]) < vocab_size, logits, -jnp.inf)


def _slice_losses(hidden_BSD: Array, kernel_DV: Array, targets_BS: Array, vocab_size: int):
    logits = logits_of(hidden_BSD, kernel_DV, vocab_size)
    log_partition_BS = jax.nn.logsumexp(logits, axis=-1)
    target_logit_BS = jnp.take_along_axis(logits, targets_BS[..., None], axis=-1)[..., 0]
    return log_partition_BS - target_logit_BS, log_partition_BS


def token_losses(
    hidden_BLD: Array, kernel_DV: Array, targets_BL: Array, *, vocab_size: int, slice_length: int
) -> tuple[Array, Array]:
    """(cross-entropy [B, L], log partition [B, L]) in nats, float32 or wider.

    Logits exist for `slice_length` positions at a time (0 = all at once) and are computed again in the
    backward pass. A length that the slice does not divide is padded. On a mesh every device takes its own rows,
    so that the kernel is gathered and its gradient summed over devices once, not for every slice.
    """
    losses = functools.partial(_sliced_losses, vocab_size=vocab_size, slice_length=slice_length)
    return on_own_rows(losses, (hidden_BLD, targets_BL), kernel_DV)


def _sliced_losses(rows, kernel_DV: Array, *, vocab_size: int, slice_length: int) -> tuple[Array, Array]:
    hidden_BLD, targets_BL = rows
    batch, length, width = hidden_BLD.shape
    if slice_length <= 0 or slice_length >= length:
        return _slice_losses(hidden_BLD, kernel_DV, targets_BL, vocab_size)
    num_slices = -(-length // slice_length)
    padding = num_slices * slice_length - length
    hidden = jnp.pad(hidden_BLD, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets_BL, ((0, 0), (0, padding)))
    hidden = jnp.moveaxis(hidden.reshape(batch, num_slices, slice_length, width), 1, 0)
    targets = jnp.moveaxis(targets.reshape(batch, num_slices, slice_length), 1, 0)

    one_slice = jax.checkpoint(functools.partial(_slice_losses, vocab_size=vocab_size))

    def body(_, one):
        # The kernel is a constant of the loop: as a carry, a copy of it would be kept for every slice.
        return None, one_slice(one[0], kernel_DV, one[1])

    _, losses = jax.lax.scan(body, None, (hidden, targets))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length], losses)


def weighted_sums(
    losses: tuple[Array, Array], weights_BL: Array, z_loss: float = 0.0
) -> tuple[Array, Array, Array]:
    """(objective sum, cross-entropy sum, weight sum); the division by the weight comes last of all.

    z_loss adds z_loss * log_partition^2 to the objective of every token (PaLM, arXiv 2204.02311).
    """
    cross_entropy_BL, log_partition_BL = losses
    cross_entropy = jnp.sum(cross_entropy_BL * weights_BL)
    objective = cross_entropy
    if z_loss:
        objective = objective + z_loss * jnp.sum(jnp.square(log_partition_BL) * weights_BL)
    return objective, cross_entropy, jnp.sum(weights_BL)
