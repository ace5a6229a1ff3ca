"""How the next token is drawn: temperature, the likeliest few, and a key for every token of every row.

Legend: B rows, V padded vocabulary.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from siamese_jax.errors import InputError

MOST_SEED = 2**32 - 1  # random keys are made of 32 bits where jax has no wider integers


@dataclasses.dataclass(frozen=True)
class TokenSampling:
    """How tokens are drawn.

    temperature: 0 takes the likeliest. top_k: only from the so many likeliest, 0 = all. top_p: only from the
    likeliest that together have this probability, after top_k. What is as likely as the last one kept is kept too.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self, vocab_size: int) -> None:
        """InputError for the first value that has no meaning."""
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature}: it must be 0 (the likeliest token) or above")
        if not 0 <= self.top_k <= vocab_size:
            raise InputError(
                f"top_k is {self.top_k}: it must lie from 0 (all) to the vocabulary's size, {vocab_size}"
            )
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}: a probability, it must be above 0 and at most 1")
        if not 0 <= self.seed <= MOST_SEED:
            raise InputError(f"seed is {self.seed}: it must lie from 0 to {MOST_SEED}")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn; a temperature that float32 flushes to 0 is one of 0."""
        return self.temperature < np.finfo(np.float32).tiny

    @property
    def filtered(self) -> bool:
        """Whether tokens are left out, for which they have to be sorted."""
        return bool(self.top_k or self.top_p < 1) and not self.greedy


class Dials(NamedTuple):
    """The values of a TokenSampling as a program takes them, so that others need no other program."""

    seed: Any
    temperature: Any
    top_k: Any
    top_p: Any

    @classmethod
    def of(cls, sampling: TokenSampling) -> "Dials":
        """As numpy scalars."""
        temperature, top_p = np.float32(sampling.temperature), np.float32(sampling.top_p)
        return cls(np.uint32(sampling.seed), temperature, np.int32(sampling.top_k), top_p)


def keep_likely(logits_BV: jax.Array, top_k, top_p) -> jax.Array:
    """The logits with minus infinity for what top_k and top_p (see TokenSampling) leave out."""
    ordered = jnp.sort(logits_BV, axis=-1, descending=True)
    ranks = jnp.arange(ordered.shape[-1])
    within = (top_k == 0) | (ranks < top_k)
    weights = jax.nn.softmax(jnp.where(within, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    kept = within & ((before < top_p) | (ranks == 0) | (top_p >= 1))
    least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_BV >= least, logits_BV, -jnp.inf)


def pick(logits_BV, numbers_B, index, dials: Dials, greedy: bool, filtered: bool) -> jax.Array:
    """Token `index` of the rows with these numbers, int32 [B]: drawn with a key of seed, number and index alone."""
    if greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    # Below the likeliest one: at a low temperature the logits themselves would overflow.
    logits_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / dials.temperature
    if filtered:
        logits_BV = keep_likely(logits_BV, dials.top_k, dials.top_p)
    seed = jax.random.key(dials.seed)
    keys = jax.vmap(lambda number: jax.random.fold_in(jax.random.fold_in(seed, number), index))(numbers_B)
    return jax.vmap(jax.random.categorical)(keys, logits_BV).astype(jnp.int32)
