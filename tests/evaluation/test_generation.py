"""Sampling against a plain loop, past the end of the window too, and its seeds."""

import functools

import jax
import numpy as np
import pytest

from siamese_jax.data.tokenizer import ByteTokenizer
from siamese_jax.evaluation.generation import sample


class Ids(ByteTokenizer):
    """Bytes, but 'decoded' to the ids themselves, so that nothing is lost."""

    def decode(self, ids):
        return list(ids)


def plain_greedy(model, params, prompt: str, length: int, num_tokens: int) -> list[int]:
    """The likeliest token after the last `length` ones, again and again; nothing is padded or slid."""
    forward = jax.jit(lambda tokens: model.apply({"params": params}, tokens))  # compiled for each length
    tokens = [256, *prompt.encode()]
    for _ in range(num_tokens):
        logits = forward(np.array([tokens[-length:]], np.int32))
        tokens.append(int(np.argmax(logits[0, -1])))
    return tokens[len(prompt.encode()) + 1 :]


@pytest.fixture
def draw(model, params):
    return functools.partial(sample, model, params, Ids())


@pytest.mark.parametrize(("prompt", "num_tokens"), [("ab", 12), ("longer than it", 4)])
def test_greedy_is_a_loop_of_full_forward_passes(model, params, draw, prompt, num_tokens):
    """First within the window of 6, then sliding on; and with a prompt that the window cuts."""
    found = draw(prompt, length=6, num_tokens=num_tokens, temperature=0)
    assert found == plain_greedy(model, params, prompt, 6, num_tokens)
    assert len(set(found)) > 2


def test_a_seed_gives_one_text_and_seeds_differ(draw):
    texts = [draw("ab", length=6, num_tokens=10, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert all(0 <= token < 257 for text in texts for token in text)


def test_a_low_temperature_is_greedy(draw):
    greedy = draw("ab", length=6, num_tokens=6, temperature=0)
    assert draw("ab", length=6, num_tokens=6, temperature=1e-4, seed=7) == greedy


def test_no_tokens_are_no_text(model, params):
    assert sample(model, params, ByteTokenizer(), "ab", length=6, num_tokens=0) == ""
