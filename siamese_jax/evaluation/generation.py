"""Text from a language model: prompts are read once, then every token costs one position.

Legend: B rows, P positions of a prompt, V padded vocabulary, R some of the rows. A row is one text; its context is
what the model reads to predict its next token, an end of text in front of the prompt included.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from siamese_jax.errors import InputError
from siamese_jax.evaluation.sampling import Dials, TokenSampling, pick
from siamese_jax.evaluation.text_stream import TextStream
from siamese_jax.layers.activations import constrain
from siamese_jax.models.cache import empty_cache, put_rows
from siamese_jax.models.language import LanguageModel

CHUNK = 16  # tokens of a row between two looks at them
SHORTEST = 16  # prompts are padded to this, or to the next power of two, so that few programs are compiled
CACHE_STEP = 64  # the positions of a cache are a multiple of this, for the same reason


_STATIC = ("model", "greedy", "filtered")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="cache")
def _read(model, params, cache, tokens_RP, last_R, rows_R, numbers_R, index, dials, *, greedy, filtered):
    """(cache, token `index` of each of the rows) after whole contexts; cache None: nothing is kept of them."""
    variables = {"params": params}
    if cache is None:
        logits_RV = model.apply(variables, tokens_RP, last_R, method="next_logits")
    else:
        variables["cache"] = empty_cache(model.config, *tokens_RP.shape)
        logits_RV, filled = model.apply(variables, tokens_RP, last_R, method="next_logits", mutable=["cache"])
        cache = put_rows(cache, rows_R, filled["cache"])
    tokens_R = pick(logits_RV, numbers_R, index, dials, greedy, filtered)
    return cache, constrain(tokens_R, None)  # whole on every device, so that every process can read it


@functools.partial(jax.jit, static_argnames=(*_STATIC, "most"), donate_argnames="cache")
def _advance(model, params, cache, tokens_B, starts_B, numbers_B, index, count, dials, *, greedy, filtered, most):
    """(cache, [B, most] of which the first `count` are the tokens from `index` on), one position at a time.

    tokens: the last of every row, not in the cache yet; starts: their positions.
    """
    first = jnp.zeros_like(tokens_B)

    def one(i, carry):
        cache, tokens_B, made = carry
        logits_BV, kept = model.apply(
            {"params": params, "cache": cache}, tokens_B[:, None], first, starts_B=starts_B + i,
            method="next_logits", mutable=["cache"],
        )  # fmt: skip
        tokens_B = pick(logits_BV, numbers_B, index + i, dials, greedy, filtered)
        return kept["cache"], tokens_B, made.at[:, i].set(tokens_B)

    made = jnp.zeros((len(tokens_B), most), jnp.int32)
    cache, _, made = jax.lax.fori_loop(0, count, one, (cache, tokens_B, made))
    return cache, constrain(made, None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty(config, num_rows, length):
    return empty_cache(config, num_rows, length)


class _Reader:
    """The model as the loop of `Generator` sees it: contexts in, tokens out.

    numbers: of the rows, which their random keys are made of. size: positions of the cache; None = there is none,
    and the whole window of `length` runs for every token.
    """

    def __init__(
        self, model, params, sampling: TokenSampling, numbers: Sequence[int], length: int, size: int | None
    ):
        self.model, self.params = model, params
        self.numbers_B = np.asarray(numbers, np.int32)
        self.size, self.length = size, length
        self.dials = Dials.of(sampling)
        self.forms = {"greedy": sampling.greedy, "filtered": sampling.filtered}
        self.cache = None if size is None else _empty(model.config, len(numbers), size)

    def read(self, rows: Sequence[int], contexts: Sequence[Sequence[int]], index: int) -> np.ndarray:
        """Token `index` of these rows, [R], after their contexts, which are what the cache then holds of them."""
        padded = self.length
        if self.size is not None:
            longest = max(SHORTEST, *map(len, contexts))
            padded = min(self.size, 1 << (longest - 1).bit_length())
        tokens_RP = np.zeros((len(rows), padded), np.int32)
        for row_P, context in zip(tokens_RP, contexts, strict=True):
            row_P[: len(context)] = context
        last_R = np.array([len(context) - 1 for context in contexts], np.int32)
        rows_R = np.asarray(rows, np.int32)
        self.cache, tokens_R = _read(
            self.model, self.params, self.cache, tokens_RP, last_R, rows_R, self.numbers_B[rows_R],
            np.int32(index), self.dials, **self.forms,
        )  # fmt: skip
        return np.asarray(tokens_R)

    def advance(self, contexts: Sequence[list[int]], count: int, index: int) -> np.ndarray:
        """The next `count` tokens of all rows, [B, count]; of each context the cache lacks the last token."""
        if self.size is None:
            return self._advance_whole(contexts, count, index)
        tokens_B = np.array([context[-1] for context in contexts], np.int32)
        # A row that has ended may stand anywhere: nothing reads what it writes.
        starts_B = np.array([min(len(context), self.size) - 1 for context in contexts], np.int32)
        self.cache, made = _advance(
            self.model, self.params, self.cache, tokens_B, starts_B, self.numbers_B, np.int32(index),
            np.int32(count), self.dials, **self.forms, most=CHUNK,
        )  # fmt: skip
        return np.asarray(made)[:, :count]

    def _advance_whole(self, contexts, count: int, index: int) -> np.ndarray:
        contexts, made, rows = [context[-self.length :] for context in contexts], [], range(len(contexts))
        for i in range(count):
            made.append(self.read(rows, contexts, index + i))
            for context, token in zip(contexts, made[-1].tolist(), strict=True):
                context.append(token)
                del context[: -self.length]  # only of a row that has ended: others have room
        return np.stack(made, axis=1)


@dataclasses.dataclass
class Made:
    """What a row got: token ids, without the end of text, and why it ended ('length' or 'end_of_text')."""

    ids: list[int]
    reason: str = "length"


class Generator:
    """Makes tokens after contexts, for any residual scheme.

    A context is at most `length` tokens. When it is full and there is more to make, its last length // 2 tokens
    (at least 1) become the context of what follows: they are read anew, from position 0 on, and older ones are
    forgotten. A text depends on its context, its number and the sampling, not on the rows beside it, nor on
    how many tokens are made at a time (as far as rounding allows: products of other shapes add in another order).

    Args:
        params: of the model, on the devices of `mesh` (None: those in force).
        length: of the longest context; that of training.
        cached: False runs the whole window for every token, to the same tokens.

    Attributes:
        prefill_seconds: of reading the contexts of the last call; 0 before there was one.
    """

    def __init__(self, model: LanguageModel, params, mesh=None, *, length: int, cached: bool = True):
        self.model, self.params, self.mesh = model, params, mesh
        self.length, self.cached, self.keep = length, cached, max(1, length // 2)
        self.prefill_seconds = 0.0

    def __call__(
        self,
        contexts: Sequence[Sequence[int]],
        sampling: TokenSampling,
        *,
        max_tokens: int,
        stop: int | None = None,
        numbers: Sequence[int] | None = None,
        watch: Callable[[int, list[int]], None] | None = None,
    ) -> list[Made]:
        """At most `max_tokens` after each context; fewer where the token `stop` comes first.

        numbers: of the rows, 0, 1, ... unless given. watch(row, new ids) is called as they come. InputError for a
        context that is too long, or empty, and for a sampling that has no meaning.
        """
        sampling.check(self.model.config.vocab_size)
        check_contexts(contexts, self.length)
        made = [Made([]) for _ in contexts]
        if not contexts or max_tokens < 1:
            return made
        numbers = range(len(contexts)) if numbers is None else numbers
        with self._on_mesh():
            reader = self._reader(contexts, sampling, numbers, max_tokens)
            self._run(reader, [list(context) for context in contexts], made, max_tokens, stop, watch)
        return made

    def warm_up(self, contexts: Sequence[Sequence[int]], sampling: TokenSampling, max_tokens: int) -> None:
        """Compiles what a call with these will run, so that its time is that of the tokens."""
        with self._on_mesh():
            rows = range(len(contexts))
            reader = self._reader(contexts, sampling, rows, max_tokens)
            reader.read(rows, contexts, 0)
            if self.cached:
                reader.advance([list(context) for context in contexts], 0, 0)
                if max(map(len, contexts)) + max_tokens - 1 > self.length:  # some row will be read anew
                    together = len({len(context) for context in contexts}) == 1
                    # Together where all that still go on are full at once, which may be the last one alone.
                    for again in {len(rows)} if together else {len(rows), 1}:
                        reader.read(rows[:again], [[0] * self.keep] * again, 0)

    def _on_mesh(self):
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def _reader(self, contexts, sampling, numbers, max_tokens: int) -> _Reader:
        size = None
        if self.cached:
            needed = max(map(len, contexts)) + max_tokens - 1
            size = min(self.length, -(-needed // CACHE_STEP) * CACHE_STEP)
        return _Reader(self.model, self.params, sampling, numbers, self.length, size)

    def _run(self, reader: _Reader, contexts, made: list[Made], max_tokens: int, stop, watch) -> None:
        """The loop. Rows go on together: all get token `index` in the same pass."""
        active, unread, index = list(range(len(contexts))), list(range(len(contexts))), 0
        while active and index < max_tokens:
            for row in active:
                if len(contexts[row]) > self.length:
                    contexts[row] = contexts[row][-self.keep :]
                    unread.append(row)
            count = 1
            if not unread:
                room = self.length + 1 - max(len(contexts[row]) for row in active)
                count = min(CHUNK, max_tokens - index, room)
            fresh = {}
            if len(unread) < len(active):
                fresh |= enumerate(reader.advance(contexts, count, index).tolist())
            fresh |= self._read_rows(reader, unread, contexts, len(unread) == len(active), index)
            active = [row for row in active if _take(row, fresh[row], contexts[row], made[row], stop, watch)]
            unread, index = [], index + count

    def _read_rows(self, reader: _Reader, unread, contexts, is_all: bool, index: int) -> dict[int, list[int]]:
        """{row: [token]} of the rows that have to be read: together where none goes on meanwhile."""
        began = time.perf_counter()
        groups = [list(range(len(contexts)))] if is_all else [[row] for row in unread]
        fresh = {}
        for rows in groups:
            # Of an ended row only the front, so that it asks for no other program.
            longest = max(len(contexts[row]) for row in unread)
            parts = [contexts[row][:longest] for row in rows]
            fresh |= zip(rows, reader.read(rows, parts, index)[:, None].tolist(), strict=True)
        if index == 0:
            self.prefill_seconds = time.perf_counter() - began
        return fresh


def _take(row: int, fresh: list[int], context: list[int], made: Made, stop, watch) -> bool:
    """Enters the new tokens of a row; whether it goes on."""
    ended = stop is not None and stop in fresh
    if ended:
        fresh, made.reason = fresh[: fresh.index(stop)], "end_of_text"
    context += fresh
    made.ids += fresh
    if watch is not None:
        watch(row, fresh)
    return not ended


def check_contexts(contexts: Sequence[Sequence[int]], length: int, names: Sequence[str] | None = None) -> None:
    """InputError for the first context that is empty or does not fit; names: of the prompts, to call them by."""
    for i, context in enumerate(contexts):
        name = names[i] if names else f"prompt {i + 1}"
        if not len(context):
            raise InputError(f"{name} has no tokens: put an end of text in front of it")
        if len(context) > length:
            raise InputError(
                f"{name} has {len(context)} tokens, an end of text in front of it included, and the context is "
                f"{length} (data.length): shorten it"
            )


def sample(
    model: LanguageModel,
    params,
    tokenizer,
    prompts: Sequence[str],
    *,
    length: int,
    num_tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[str]:
    """The texts that the model puts after `prompts`; temperature 0 takes the likeliest token.

    A context is an end of text and a prompt, of which the last `length` tokens count; see Generator for what comes
    when it is full. An end of text does not end a sample, it vanishes from it.
    """
    streams = [TextStream(tokenizer, ids.tolist()) for ids in tokenizer.encode_batch(list(prompts))]
    made = Generator(model, params, length=length)(
        [[tokenizer.end_of_text, *stream.prompt_ids][-length:] for stream in streams],
        TokenSampling(temperature, seed=seed), max_tokens=num_tokens,
    )  # fmt: skip
    return [stream.push(each.ids, last=True) for stream, each in zip(streams, made, strict=True)]
