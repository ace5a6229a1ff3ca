"""Log-probabilities of choices: against a plain scorer, one request at a time, and what does not fit the window."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.data.tokenizer import ByteTokenizer
from siamese_jax.errors import InputError
from siamese_jax.evaluation.task_scoring import (
    Piece,
    TaskScorer,
    _continuation_scores,
    bucket_of,
    encode,
    encode_choices,
    score_choices,
    slice_of,
)
from siamese_jax.models.families import parameter_shapes
from siamese_jax.models.language import LanguageConfig, LanguageModel

END = ByteTokenizer.end_of_text
WINDOW = 40
# 12 or 40 inputs each, so that the plain scorer compiles twice.
CHOICES = [
    ("", " first words"),
    ("Question", " left"),
    ("Question", " down"),
    ("Who?", " somebody"),
    ("A context that is far too long for the window of the model.", " end"),
    ("A context that is far too long for the window of the model.", " some thirty tokens at the end"),
    ("A short context", " a continuation that is longer than the whole window"),
]


SMALL = {"num_layers": 2, "width": 16, "num_heads": 2, "mlp_hidden": 16, "vocab_multiple": 8}
# Schemes of one and two streams; scanned or not; slices of the logits, a padded vocabulary.
MODELS = [
    LanguageConfig(residual="siamese_hybrid", loss_slice=4, **SMALL),
    LanguageConfig(residual="siamese", loss_slice=0, scan=False, **SMALL),
    LanguageConfig(residual="pre", loss_slice=7, tie_embedding=True, num_kv_heads=1, **SMALL),
]


def parameters(config):
    """Sharper than initial ones, so that tokens differ in probability."""
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: draw.normal(0, 0.5, leaf.shape).astype(np.float32), parameter_shapes(config))


@functools.cache
def _logits(model):
    return jax.jit(lambda params, tokens: model.apply({"params": params}, tokens))


def plain(model, params, choice, window):
    """(sum of log p of the continuation's tokens, all likeliest): one request, whole softmax, float64."""
    context, continuation = (list(ids) for ids in ByteTokenizer().encode_batch(choice))
    context = context or [END]
    whole, log_prob, greedy = context + continuation, 0.0, True
    stride = len(continuation) if len(continuation) <= window else window // 2
    for first in range(0, len(continuation), stride):
        end = min(len(context) + first + stride, len(whole))
        inputs = whole[:end][-window - 1 :][:-1]
        logits = np.asarray(_logits(model)(params, jnp.array([inputs], jnp.int32))[0], np.float64)
        targets = whole[len(context) + first : end]
        for row, target in zip(logits[-len(targets) :], targets, strict=True):
            log_prob += row[target] - row.max() - np.log(np.sum(np.exp(row - row.max())))
            greedy &= bool(np.argmax(row) == target)
    return log_prob, greedy


def scored(model, params, mesh, choices, window=WINDOW, batch_size=2):
    scorer = TaskScorer(model, mesh, window=window, batch_size=batch_size)
    return score_choices(scorer, params, encode_choices(choices, ByteTokenizer(), window))


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.residual)
def test_batches_equal_one_request_at_a_time(config, mesh):
    model, params = LanguageModel(config), parameters(config)
    scores = scored(model, params, mesh, CHOICES)
    for choice, score in scores.items():
        log_prob, greedy = plain(model, params, choice, WINDOW)
        assert score.log_prob == pytest.approx(log_prob, rel=2e-6, abs=2e-5), choice
        assert score.greedy == greedy


def test_the_size_of_the_batches_does_not_matter(model, params, mesh):
    few, many = (scored(model, params, mesh, CHOICES, batch_size=size) for size in (1, 5))
    for choice in CHOICES:
        assert few[choice].log_prob == pytest.approx(many[choice].log_prob, rel=1e-6)


def test_the_likeliest_continuation_is_greedy(model, params, mesh):
    """What the model itself goes on with, and the same with another last token."""
    text = "abc"
    params = params | {"head": {"kernel": params["head"]["kernel"].at[:, :97].set(0).at[:, 123:].set(0) * 9}}
    for _ in range(2):
        logits = _logits(model)(params, jnp.array([list(text.encode())], jnp.int32))[0, -1]
        text += chr(int(np.argmax(logits)))
    other = text[3:-1] + ("a" if text[-1] != "a" else "b")
    scores = scored(model, params, mesh, [("abc", text[3:]), ("abc", other)])
    assert text.isalpha() and [score.greedy for score in scores.values()] == [True, False]


def test_equal_logits_are_greedy_for_one_token_only_and_nan_for_none(model, params, mesh):
    nothing = jax.tree.map(jnp.zeros_like, params)
    tokens = [("a", chr(i)) for i in range(128)]
    scores = scored(model, nothing, mesh, tokens, window=8)
    assert [choice[1] for choice, score in scores.items() if score.greedy] == ["\0"]  # as argmax has it
    assert {score.log_prob for score in scores.values()} == {scores[tokens[0]].log_prob}
    assert scores[tokens[0]].log_prob == pytest.approx(-np.log(257), rel=1e-6)
    broken = jax.tree.map(lambda x: x * np.nan, params)
    scores = scored(model, broken, mesh, tokens[:2], window=8)
    assert not any(score.greedy for score in scores.values())
    assert all(np.isnan(score.log_prob) for score in scores.values())


def lengths(context, continuation, window=10):
    one = encode(np.arange(context), 100 + np.arange(continuation), END, window)
    return one, [(len(piece.inputs), len(piece.targets)) for piece in one.pieces]


def test_what_fits_is_whole_and_the_last_token_is_no_input():
    one, sizes = lengths(7, 4)
    assert sizes == [(10, 4)] and one.cut == 0 and one.tokens == 4
    assert one.pieces[0].inputs.tolist() == [0, 1, 2, 3, 4, 5, 6, 100, 101, 102]
    assert one.pieces[0].targets.tolist() == [100, 101, 102, 103]


def test_a_long_context_loses_its_left():
    one, sizes = lengths(9, 4)
    assert sizes == [(10, 4)] and one.cut == 2 and one.pieces[0].inputs[0] == 2
    one, sizes = lengths(5, 10)
    assert sizes == [(10, 10)] and one.cut == 4 and one.pieces[0].inputs.tolist() == [4, *range(100, 109)]


def test_an_empty_context_becomes_an_end_of_text():
    one, sizes = lengths(0, 3)
    assert sizes == [(3, 3)] and one.cut == 0 and one.pieces[0].inputs.tolist() == [END, 100, 101]


def test_a_long_continuation_is_scored_once_token_by_token():
    one, sizes = lengths(12, 23)
    assert sizes == [(10, 5), (10, 5), (10, 5), (10, 5), (10, 3)] and one.cut == 6 and one.tokens == 23
    assert np.concatenate([piece.targets for piece in one.pieces]).tolist() == [100 + i for i in range(23)]
    for piece in one.pieces:  # the token before each target is an input
        assert piece.inputs[-1] == piece.targets[-1] - 1
    one, sizes = lengths(1, 5, window=1)
    assert sizes == [(1, 1)] * 5


def test_buckets_are_few_and_hold_the_length():
    found = [bucket_of(length, 200) for length in range(1, 201)]
    assert sorted(set(found)) == [32, 48, 64, 96, 128, 192, 200]
    assert all(bucket >= length for length, bucket in enumerate(found, start=1))
    assert bucket_of(3, 16) == 16 == bucket_of(16, 16)


def test_batches_hold_every_piece_once_the_longest_first(model, mesh):
    draw = np.random.default_rng(0)
    sizes = [(int(draw.integers(1, 60)), int(draw.integers(1, 40))) for _ in range(50)]
    pieces = [encode(np.arange(a), np.arange(b), END, 64).pieces[0] for a, b in sizes]
    scorer = TaskScorer(model, mesh, window=64, batch_size=2)
    found = list(scorer.batches(pieces))
    assert sorted(np.concatenate([numbers for numbers, _ in found])) == list(range(50))
    shapes = [batch["inputs"].shape for _, batch in found]
    assert shapes == sorted(shapes, key=lambda shape: -shape[1]) and all(a * b <= 128 + b for a, b in shapes)
    assert {batch["targets"].shape[1] for _, batch in found} <= {32, 48, 64}


def test_logits_of_many_short_rows_are_no_larger_than_those_of_a_few_long_ones(mesh):
    """Nothing has the size of batch x length x vocabulary, whatever the lengths of the requests."""
    config = LanguageConfig(**SMALL | {"num_layers": 1}, vocab_size=4096, loss_slice=16)
    model, window, rows = LanguageModel(config), 256, 2
    params = parameter_shapes(config)
    for length in (256, 32):
        scorer = TaskScorer(model, mesh, window=window, batch_size=rows)
        (_, batch), *_ = scorer.batches([Piece(np.zeros(length, np.int32), np.zeros(length, np.int32))] * 16)
        assert batch["inputs"].size == rows * window
        score = functools.partial(model.apply, window=window, method=_continuation_scores)
        with jax.set_mesh(mesh):
            text = (
                jax.jit(score)
                .lower({"params": params}, batch["inputs"], batch["targets"], batch["starts"])
                .as_text()
            )
        sizes = [math.prod(map(int, dims.split("x"))) for dims in re.findall(r"tensor<((?:\d+x)+4096)xf32>", text)]
        assert max(sizes) == rows * config.loss_slice * 4096
    assert [slice_of(length, 256, 16) for length in (256, 128, 32, 8, 1)] == [16, 8, 2, 1, 1]
    assert slice_of(32, 256, 0) == 0


def test_a_continuation_without_tokens_cannot_be_scored():
    class Deaf(ByteTokenizer):
        def encode_batch(self, texts):
            return [ids[:0] if bytes(ids.tolist()) == b" mute" else ids for ids in super().encode_batch(texts)]

    with pytest.raises(InputError, match="makes no tokens of ' mute'"):
        encode_choices([("a", " b"), ("a", " mute")], Deaf(), 8)
