"""log p(continuation | context) of many choices under a language model, in batches of like length.

Context and continuation are turned into tokens each by itself, without special tokens, and put together, as OLMo's
evaluation does. What is too long for the window is cut off the context's left; nothing is left out.

Legend: B batch, L length, C tokens of continuations, S slice of them, D width, V padded vocabulary, P pieces.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from siamese_jax.errors import InputError
from siamese_jax.evaluation.classification import compiled_on_mesh
from siamese_jax.layers.activations import on_own_rows
from siamese_jax.models.language import LanguageModel
from siamese_jax.models.loss import logits_of
from siamese_jax.parallel.mesh import batch_parts, batch_sharding

Choice = tuple[str, str]  # context, continuation
ENCODED_AT_ONCE = 10_000  # texts
WIDTHS = [32 * 8**i for i in range(12)]


class Piece(NamedTuple):
    """Tokens that go through the model, and the next ones of the last of them, which are scored."""

    inputs: np.ndarray  # [at most the window]
    targets: np.ndarray  # [at most as many]


class Encoded(NamedTuple):
    """A choice in tokens. cut: tokens of its context that do not fit; pieces: several of a long continuation."""

    pieces: list[Piece]
    tokens: int  # of the continuation
    cut: int


class Score(NamedTuple):
    """log_prob: of the continuation, in nats; greedy: whether every token of it is the likeliest; rest: Encoded."""

    log_prob: float
    greedy: bool
    tokens: int
    cut: int
    pieces: int


def encode(context: np.ndarray, continuation: np.ndarray, end_of_text: int, window: int) -> Encoded:
    """What is given to the model for one choice.

    An empty context becomes an end of text, so that the first token is scored too. A continuation that is longer
    than the window is scored in pieces, each token once, after at least half a window of what precedes it.
    """
    context = context if len(context) else np.array([end_of_text], np.int32)
    whole, length = np.concatenate([context, continuation]), len(continuation)
    # The last token is never an input.
    stride = length if length <= window else -(-window // 2)
    pieces = []
    for first in range(0, length, stride):
        end = len(context) + min(first + stride, length)
        inputs = whole[max(0, end - 1 - window) : end - 1]
        pieces.append(Piece(inputs, whole[len(context) + first : end]))
    return Encoded(pieces, length, max(0, len(context) - (len(pieces[0].inputs) + 1 - len(pieces[0].targets))))


def encode_choices(choices: Sequence[Choice], tokenizer, window: int) -> dict[Choice, Encoded]:
    """Every choice once; equal ones have equal scores, to the last bit. InputError where one has no tokens."""
    texts = list(dict.fromkeys(text for choice in choices for text in choice))
    ids = {}
    for first in range(0, len(texts), ENCODED_AT_ONCE):
        some = texts[first : first + ENCODED_AT_ONCE]
        ids |= zip(some, tokenizer.encode_batch(some), strict=True)
    for _, continuation in choices:
        if not len(ids[continuation]):
            raise InputError(f"the run's tokenizer makes no tokens of {continuation!r:.60}: it cannot be scored")
    end_of_text = tokenizer.end_of_text
    return {(a, b): encode(ids[a], ids[b], end_of_text, window) for a, b in dict.fromkeys(choices)}


def bucket_of(length: int, window: int, least: int = 32) -> int:
    """The next of 32, 48, 64, 96, 128, 192, ..., but at most the window: few programs, little padding."""
    power = least
    while power < length:
        if 3 * power // 2 >= length:
            return min(3 * power // 2, window)
        power *= 2
    return min(power, window)


def slice_of(length: int, window: int, loss_slice: int) -> int:
    """Tokens of a row whose logits exist at a time: of shorter rows, of which there are more, as many fewer."""
    return loss_slice and max(1, loss_slice * length // window)


def _continuation_scores(model: LanguageModel, inputs_BL, targets_BC, starts_B, *, window: int):
    """(nats, whether it is the likeliest) [B, C] of the tokens that follow the inputs from `starts` on."""
    hidden_BLD, _ = model.hidden(inputs_BL)
    slice_length = slice_of(inputs_BL.shape[1], window, model.config.loss_slice)
    score = functools.partial(_own_scores, vocab_size=model.config.vocab_size, slice_length=slice_length)
    return on_own_rows(score, (hidden_BLD, targets_BC, starts_B), model.kernel_DV())


def _own_scores(rows, kernel_DV, *, vocab_size: int, slice_length: int):
    """Of the rows of one device. Logits exist for `slice_length` tokens of a row at a time (0 = all)."""
    hidden_BLD, targets_BC, starts_B = rows
    batch, count = targets_BC.shape
    slice_length = min(slice_length or count, count)
    padding = -count % slice_length
    targets = jnp.pad(targets_BC, ((0, 0), (0, padding)))
    positions = starts_B[:, None] + jnp.arange(count + padding)
    positions = jnp.minimum(positions, hidden_BLD.shape[1] - 1)

    def one_slice(part):
        positions_BS, targets_BS = part
        hidden_BSD = jnp.take_along_axis(hidden_BLD, positions_BS[..., None], axis=1)
        logits_BSV = logits_of(hidden_BSD, kernel_DV, vocab_size)
        own = jnp.take_along_axis(logits_BSV, targets_BS[..., None], axis=-1)
        nats = jax.nn.logsumexp(logits_BSV, axis=-1) - own[..., 0]
        # Of equal logits the smaller token is the likelier one, as in argmax; NaN is ahead of nothing.
        smaller = jnp.arange(logits_BSV.shape[-1]) < targets_BS[..., None]
        ahead = jnp.any((logits_BSV > own) | ((logits_BSV == own) & smaller), axis=-1)
        return nats, ~ahead & jnp.isfinite(nats)

    parts = [jnp.moveaxis(x.reshape(batch, -1, slice_length), 1, 0) for x in (positions, targets)]
    scores = jax.lax.map(one_slice, tuple(parts))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :count], scores)


class TaskScorer:
    """Scores pieces in batches of like length, for one model; the batches matter to rounding alone.

    window: inputs that go through the model at most. batch_size: pieces of a whole window at a time, rounded up to
    the parts that the mesh splits a batch into; of shorter ones as many more.
    """

    def __init__(self, model: LanguageModel, mesh: Mesh, *, window: int, batch_size: int):
        self.mesh, self.window, self.tokens = mesh, window, window * batch_size

        def score(params, batch):
            return model.apply(
                {"params": params}, batch["inputs"], batch["targets"], batch["starts"], window=window,
                method=_continuation_scores,
            )  # fmt: skip

        self._score = compiled_on_mesh(score, model, mesh)

    def __call__(self, params, pieces: Sequence[Piece], progress: Callable[[int], None] | None = None):
        """(log-probability of each piece's targets, float64 [P]; whether all are the likeliest, bool [P])."""
        log_probs, greedy, done = np.zeros(len(pieces)), np.zeros(len(pieces), bool), 0
        for numbers, (nats_BC, likeliest_BC) in self._scored(params, pieces):
            for row, number in enumerate(numbers):
                count = len(pieces[number].targets)
                log_probs[number] = -np.sum(nats_BC[row, :count], dtype=np.float64)
                greedy[number] = np.all(likeliest_BC[row, :count])
            done += len(numbers)
            if progress:
                progress(done)
        return log_probs, greedy

    def batches(self, pieces: Sequence[Piece]) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """(numbers of the pieces, their batch), the longest first, so that memory fails at once or not at all."""
        lengths = np.array([bucket_of(len(piece.inputs), self.window) for piece in pieces])
        counts = np.array([len(piece.targets) for piece in pieces])
        order = np.lexsort((counts, lengths))[::-1]
        parts = batch_parts(self.mesh)
        while len(order):
            length = int(lengths[order[0]])
            rows = -(-self.tokens // (length * parts)) * parts
            taken, order = order[:rows], order[rows:]
            most = int(counts[taken].max())
            # Few programs: 32, 256, ... tokens of the continuations, and always the same number of rows.
            width = min(next(width for width in WIDTHS if width >= most), length)
            yield taken, _padded([pieces[i] for i in taken], rows, length, width)

    def _scored(self, params, pieces: Sequence[Piece]):
        """(numbers, scores on the host), fetched when the device works on the next batch already."""
        pending = None
        for numbers, batch in self.batches(pieces):
            scored = numbers, self._score(params, self._put(batch))
            if pending:
                yield pending[0], jax.tree.map(np.asarray, pending[1])
            pending = scored
        if pending:
            yield pending[0], jax.tree.map(np.asarray, pending[1])

    def _put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Every process has the batch whole and gives its devices their rows."""
        sharding = batch_sharding(self.mesh)
        return {
            name: jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)
            for name, rows in batch.items()
        }


def _padded(pieces: Sequence[Piece], rows: int, length: int, width: int) -> dict[str, np.ndarray]:
    """Padding stands at the right, where causal attention does not see it."""
    inputs, targets = np.zeros((rows, length), np.int32), np.zeros((rows, width), np.int32)
    starts = np.zeros(rows, np.int32)
    for row, piece in enumerate(pieces):
        inputs[row, : len(piece.inputs)] = piece.inputs
        targets[row, : len(piece.targets)] = piece.targets
        starts[row] = len(piece.inputs) - len(piece.targets)
    return {"inputs": inputs, "targets": targets, "starts": starts}


def score_choices(
    scorer: TaskScorer, params, encoded: dict[Choice, Encoded], progress: Callable[[int], None] | None = None
) -> dict[Choice, Score]:
    """The score of every choice."""
    pieces = [piece for one in encoded.values() for piece in one.pieces]
    log_probs, greedy = scorer(params, pieces, progress)
    scores, first = {}, 0
    for choice, one in encoded.items():
        own = slice(first, first := first + len(one.pieces))
        log_prob = float(log_probs[own].sum())
        scores[choice] = Score(log_prob, bool(greedy[own].all()), one.tokens, one.cut, len(one.pieces))
    return scores
