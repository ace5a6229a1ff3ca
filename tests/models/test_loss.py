"""The sliced loss: the same numbers as the whole one, and no array of the size of the whole logits."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.models.loss import logits_of, token_losses, weighted_sums

BATCH, LENGTH, WIDTH, ROWS, VOCAB = 2, 10, 5, 12, 11
random = np.random.default_rng(0)
HIDDEN = random.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
KERNEL = random.normal(size=(WIDTH, ROWS)).astype(np.float32)
TARGETS = random.integers(VOCAB, size=(BATCH, LENGTH)).astype(np.int32)
WEIGHTS = random.uniform(size=(BATCH, LENGTH)).astype(np.float32)
WEIGHTS[0, 3:7] = 0


def objective(hidden, kernel, slice_length, z_loss=0.1):
    losses = token_losses(hidden, kernel, TARGETS, vocab_size=VOCAB, slice_length=slice_length)
    return weighted_sums(losses, WEIGHTS, z_loss)[0]


def test_whole_loss_is_that_of_numpy():
    logits = (HIDDEN @ KERNEL)[..., :VOCAB].astype(np.float64)
    partition = np.log(np.exp(logits).sum(axis=-1))
    expected = partition - np.take_along_axis(logits, TARGETS[..., None], axis=-1)[..., 0]
    losses, log_partition = token_losses(HIDDEN, KERNEL, TARGETS, vocab_size=VOCAB, slice_length=0)
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(log_partition, partition, rtol=1e-4)

    totals = weighted_sums((losses, log_partition), WEIGHTS, 0.25)
    cross_entropy = np.sum(expected * WEIGHTS)
    z_loss = 0.25 * np.sum(partition**2 * WEIGHTS)
    np.testing.assert_allclose(totals, [cross_entropy + z_loss, cross_entropy, WEIGHTS.sum()], rtol=1e-5)
    objective, cross_entropy, _ = weighted_sums((losses, log_partition), WEIGHTS)
    assert objective == cross_entropy


@pytest.mark.parametrize("slice_length", [1, 4, 5, 9, 128])
def test_sliced_is_whole_in_values_and_gradients(slice_length):
    whole = jax.jit(jax.value_and_grad(functools.partial(objective, slice_length=0), argnums=(0, 1)))
    sliced = jax.jit(jax.value_and_grad(functools.partial(objective, slice_length=slice_length), argnums=(0, 1)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        sliced(HIDDEN, KERNEL),
        whole(HIDDEN, KERNEL),
    )


def test_sliced_losses_stand_at_their_positions():
    whole, sliced = (
        token_losses(HIDDEN, KERNEL, TARGETS, vocab_size=VOCAB, slice_length=n) for n in (0, 4)
    )  # fmt: skip
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), sliced, whole)


def test_positions_without_weight_have_no_gradient():
    gradient = jax.grad(objective)(HIDDEN, KERNEL, 3)
    np.testing.assert_array_equal(gradient[0, 3:7], 0.0)
    assert (np.abs(gradient[0, :3]).max(axis=-1) > 0).all()


def test_logits_and_losses_of_bfloat16_are_float32():
    hidden = jnp.asarray(HIDDEN, jnp.bfloat16)
    assert logits_of(hidden, KERNEL, VOCAB).dtype == jnp.float32
    losses, log_partition = token_losses(hidden, KERNEL, TARGETS, vocab_size=VOCAB, slice_length=4)
    assert losses.dtype == log_partition.dtype == jnp.float32
    gradient = jax.grad(objective, argnums=1)(hidden, KERNEL, 4)
    assert gradient.dtype == jnp.float32


LONG, WIDE, ROWS_LONG, SLICE = (2, 128), 8, 4096, 16


@functools.lru_cache
def compiled_loss(slice_length, tied):
    """The compiled loss and gradients of an embedding and a head alone; whole logits would dwarf them."""

    def loss(params, tokens):
        kernel = params["table"].T if tied else params["kernel"]
        hidden = jnp.sin(params["table"][tokens])
        losses = token_losses(hidden, kernel, tokens, vocab_size=ROWS_LONG - 3, slice_length=slice_length)
        return weighted_sums(losses, jnp.ones(LONG))[0]

    return jax.jit(jax.value_and_grad(loss)).lower(*loss_inputs(tied)).compile()


def loss_inputs(tied):
    random = np.random.default_rng(2)
    params = {"table": random.normal(size=(ROWS_LONG, WIDE)).astype(np.float32)}
    if not tied:
        params["kernel"] = random.normal(size=(WIDE, ROWS_LONG)).astype(np.float32)
    return params, random.integers(ROWS_LONG - 3, size=LONG).astype(np.int32)


def largest_array(text):
    """Elements of the largest array type in an HLO text."""
    return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_no_array_of_the_size_of_the_whole_logits_exists(tied):
    whole_logits, one_slice = math.prod(LONG) * ROWS_LONG, LONG[0] * SLICE * ROWS_LONG
    sliced, whole = compiled_loss(SLICE, tied), compiled_loss(0, tied)
    assert largest_array(whole.as_text()) >= whole_logits
    assert whole.memory_analysis().temp_size_in_bytes >= 4 * whole_logits
    # Nor a copy of the kernel for every slice: nothing is larger than the logits of one slice.
    assert largest_array(sliced.as_text()) == one_slice
    assert sliced.memory_analysis().temp_size_in_bytes < 4 * whole_logits / 2


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sliced_is_whole_when_the_kernel_is_the_table(tied):
    value, gradient = compiled_loss(SLICE, tied)(*loss_inputs(tied))
    expected_value, expected = compiled_loss(0, tied)(*loss_inputs(tied))
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for name, leaf in expected.items():
        limit = 1e-6 * np.abs(leaf).max()
        np.testing.assert_allclose(gradient[name], leaf, rtol=1e-5, atol=limit, err_msg=name)


def test_rows_that_pad_the_vocabulary_count_for_nothing():
    padded, plain = (
        jax.value_and_grad(
            lambda h, k: weighted_sums(token_losses(h, k, TARGETS, vocab_size=VOCAB, slice_length=4), WEIGHTS, 0.1)[
                0
            ],
            argnums=(0, 1),
        )(HIDDEN, kernel)
        for kernel in (KERNEL, KERNEL[:, :VOCAB])
    )
    np.testing.assert_allclose(padded[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(padded[1][0], plain[1][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(padded[1][1][:, :VOCAB], plain[1][1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(padded[1][1][:, VOCAB:], 0.0)
    logits = logits_of(HIDDEN, KERNEL, VOCAB)
    assert np.isneginf(logits[..., VOCAB:]).all() and np.isfinite(logits[..., :VOCAB]).all()
