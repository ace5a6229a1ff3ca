"""Sampling a continuation by running the whole window for every token.

Legend: L window length.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from siamese_jax.layers.activations import constrain
from siamese_jax.models.language import LanguageModel
from siamese_jax.models.loss import logits_of


@functools.partial(jax.jit, static_argnames=("model", "num_tokens", "temperature"))
def _continue(model, params, window_L, filled, seed, *, num_tokens: int, temperature: float):
    """num_tokens ids after the first `filled` ones of the window; a full window slides on by one."""

    def one(carry, key):
        window, filled = carry
        hidden, _ = model.apply({"params": params}, window[None], method="hidden")
        last = jax.lax.dynamic_slice_in_dim(hidden, filled - 1, 1, axis=1)
        kernel = model.apply({"params": params}, method="kernel_DV")
        logits = logits_of(last, kernel, model.config.vocab_size)[0, 0]
        if temperature > 0:
            token = jax.random.categorical(key, logits / temperature).astype(window.dtype)
        else:
            token = jnp.argmax(logits).astype(window.dtype)
        full = filled == window.shape[0]
        window = jnp.where(full, jnp.roll(window, -1), window)
        filled = jnp.where(full, filled, filled + 1)
        return (window.at[filled - 1].set(token), filled), token

    tokens = jax.lax.scan(one, (window_L, filled), jax.random.split(jax.random.key(seed), num_tokens))[1]
    return constrain(tokens, None)  # whole on every device, so that every process can read it


def sample(
    model: LanguageModel,
    params,
    tokenizer,
    prompt: str,
    *,
    length: int,
    num_tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """The text that the model puts after `prompt`; temperature 0 takes the likeliest token.

    The context is the last `length` tokens, an end of text in front of the prompt included.
    """  # fmt: skip
    start = [tokenizer.end_of_text, *tokenizer.encode_batch([prompt])[0].tolist()][-length:]
    window = np.full(length, tokenizer.end_of_text, np.int32)  # a jax array would be one process's own
    window[: len(start)] = start
    ids = _continue(
        model, params, window, np.int32(len(start)), seed, num_tokens=num_tokens, temperature=temperature
    )
    return tokenizer.decode(np.asarray(ids).tolist())
