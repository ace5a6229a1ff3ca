"""Text with a cache against text without one, for every scheme; what is drawn; what a text does not depend on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from siamese_jax.data.tokenizer import ByteTokenizer, FileTokenizer
from siamese_jax.errors import InputError
from siamese_jax.evaluation import generation
from siamese_jax.evaluation.generation import Generator, check_contexts, sample
from siamese_jax.evaluation.sampling import TokenSampling, keep_likely
from siamese_jax.evaluation.text_stream import TextStream
from siamese_jax.models.cache import empty_cache
from siamese_jax.models.families import parameter_shapes
from siamese_jax.models.language import LanguageConfig, LanguageModel
from siamese_jax.residual.scheme import known_schemes

SMALL = LanguageConfig(
    num_layers=4, width=16, num_heads=4, num_kv_heads=2, mlp_hidden=32, vocab_size=61, vocab_multiple=16,
    value_norm="head", context_norm="full",
)  # fmt: skip
OVERRIDES = {"residual_overrides": "{0: {'attn_norm': True, 'ffn_residual_after_norm': False}}"}
CASES = [*((name, {"residual": name}) for name in known_schemes()), ("overrides", OVERRIDES)]
SAMPLINGS = [TokenSampling(0), TokenSampling(1.0, top_k=20, top_p=0.9, seed=3)]
CONTEXTS = [[7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 7]]


@functools.cache
def made(scan: bool = True, **options):
    """(model, parameters) of the small model; drawn by numpy, which takes no compiling."""
    config = dataclasses.replace(SMALL, scan=scan, **options)
    draw = np.random.default_rng(1).normal

    def leaf(path, shape):
        values = draw(size=shape.shape).astype(np.float32)
        return jnp.asarray(0.3 * values if path[-1].key in ("kernel", "table") else 1 + 0.1 * values)

    return LanguageModel(config), jax.tree_util.tree_map_with_path(leaf, parameter_shapes(config))


def step_logits(model, params, tokens_BL) -> np.ndarray:
    """Logits [B, L, V] of a model that reads token by token; row b stands b positions behind row 0."""
    rows, length = tokens_BL.shape
    cache, found = empty_cache(model.config, rows, length), []

    @jax.jit
    def read(cache, tokens, starts):
        return model.apply(
            {"params": params, "cache": cache}, tokens, jnp.zeros_like(starts),
            starts_B=starts, method="next_logits", mutable=["cache"],
        )  # fmt: skip

    for i in range(length + rows - 1):
        at_B = np.clip(i - np.arange(rows), 0, length - 1).astype(np.int32)  # until its turn a row reads its first
        logits, kept = read(cache, tokens_BL[np.arange(rows), at_B][:, None], at_B)
        cache = kept["cache"]
        found.append(np.asarray(logits))
    return np.stack([np.stack(found[row : row + length], 0)[:, row] for row in range(rows)])


def largest_difference(model, params) -> float:
    """Of cached and uncached logits, over the largest of them."""
    tokens = np.random.default_rng(0).integers(61, size=(3, 14)).astype(np.int32)
    found = step_logits(model, params, tokens)[..., :61]
    expected = np.asarray(jax.jit(lambda tokens: model.apply({"params": params}, tokens))(tokens))[..., :61]
    return np.abs(found - expected).max() / np.abs(expected).max()


def texts(
    model, params, sampling, cached, contexts=CONTEXTS, length=12, max_tokens=20, **options
) -> list[list[int]]:
    generator = Generator(model, params, length=length, cached=cached)
    return [each.ids for each in generator(contexts, sampling, max_tokens=max_tokens, **options)]


def compare(samplings, scan, **options):
    """Tokens of rows at different positions, past the end of the context too."""
    model, params = made(scan, **options)
    for sampling in samplings:
        found, expected = (texts(model, params, sampling, cached) for cached in (True, False))
        assert found == expected and all(len(ids) == 20 for ids in found)
        # The likeliest token of a small random model may be the same for ever.
        assert sampling.greedy or len({token for ids in found for token in ids}) > 3


@pytest.mark.parametrize(("name", "options"), CASES)
def test_logits_are_those_without_a_cache(name, options):
    assert largest_difference(*made(True, **options)) < 1e-5  # seen: 1e-6


def test_tokens_are_those_without_a_cache():
    compare(SAMPLINGS[1:], False, residual="siamese_hybrid")


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_scheme_in_any_layout(name, options, scan):
    assert largest_difference(*made(scan, **options)) < 1e-5
    compare(SAMPLINGS, scan, **options)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_in_float64_nothing_at_all(name, options, scan):
    jax.config.update("jax_enable_x64", True)
    try:
        assert largest_difference(*made(scan, dtype="float64", **options)) < 1e-12
    finally:
        jax.config.update("jax_enable_x64", False)


def test_bfloat16_and_remat():
    """bfloat16 has steps of 2^-8; the type of the cache is that of the model."""
    model, params = made(dtype="bfloat16", remat="inputs")
    assert largest_difference(model, params) < 2**-5
    assert {leaf.dtype for leaf in jax.tree.leaves(empty_cache(model.config, 1, 8))} == {jnp.dtype("bfloat16")}


def plain_greedy(model, params, context: list[int], length: int, num_tokens: int) -> list[int]:
    """The likeliest token again and again; nothing is padded. A context that is full keeps its last half."""
    forward = jax.jit(lambda tokens: model.apply({"params": params}, tokens))  # compiled for each length
    context, found = list(context), []
    for _ in range(num_tokens):
        context = context[-(length // 2) :] if len(context) > length else context
        token = int(np.argmax(forward(np.array([context], np.int32))[0, -1]))
        found.append(token)
        context.append(token)
    return found


@pytest.mark.parametrize("cached", [True, False])
def test_a_full_context_goes_on_with_its_last_half(model, params, cached):
    for context in ([256, 97], [256, 1, 2, 3, 4, 5]):
        found = texts(model, params, SAMPLINGS[0], cached, [context], 6, 14)[0]
        assert found == plain_greedy(model, params, context, 6, 14)
        assert len(set(found)) > 2


def test_a_context_of_one_token(model, params):
    found = texts(model, params, SAMPLINGS[0], True, [[256]], 1, 4)[0]
    assert found == texts(model, params, SAMPLINGS[0], False, [[256]], 1, 4)[0]


def test_a_text_does_not_depend_on_the_rows_beside_it_nor_on_chunks(model, params, monkeypatch):
    sampling = TokenSampling(1.0, seed=5)
    together = texts(model, params, sampling, True, max_tokens=30)
    for number, context in enumerate(CONTEXTS):
        assert texts(model, params, sampling, True, [context], max_tokens=30, numbers=[number]) == [
            together[number]
        ]
    monkeypatch.setattr("siamese_jax.evaluation.generation.CHUNK", 3)
    assert texts(model, params, sampling, True, max_tokens=30) == together


def test_numbers_and_seeds_differ_and_a_seed_gives_one_text(model, params):
    found = [texts(model, params, TokenSampling(1.0, seed=seed), True, [[7], [7]]) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


def test_a_low_temperature_a_single_candidate_and_a_thin_nucleus_are_greedy(model, params):
    greedy = texts(model, params, TokenSampling(0), True)
    lowest = [TokenSampling(value) for value in (1e-7, 1.2e-38, 1e-42, 1e-300)]
    for sampling in (*lowest, TokenSampling(2.0, top_k=1), TokenSampling(1.0, top_p=1e-6)):
        assert texts(model, params, sampling, True) == greedy


def slow_keep(logits, top_k: int, top_p: float) -> np.ndarray:
    """Which tokens of one row may be drawn."""
    order = np.argsort(-logits, kind="stable")
    if top_k:
        order = order[:top_k]
    weights = np.exp(logits[order].astype(np.float64) - logits[order[0]])
    weights /= weights.sum()
    kept, total = np.zeros(len(logits), bool), 0.0
    for token, weight in zip(order, weights, strict=True):
        if total >= top_p and top_p < 1:
            break
        kept[token] = True
        total += weight
    return kept


@pytest.mark.parametrize("top_k", [0, 1, 7, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.37, 1e-3])
def test_the_likeliest_against_a_loop(top_k, top_p):
    logits = np.random.default_rng(top_k).normal(scale=3, size=(5, 50)).astype(np.float32)
    logits[:, 40:] = -np.inf  # rows that pad the vocabulary
    found = np.asarray(keep_likely(logits, np.int32(top_k), np.float32(top_p)))
    for row, kept in zip(logits, found, strict=True):
        expected = slow_keep(row, top_k, top_p) & np.isfinite(row)
        assert (np.isfinite(kept) == expected).all() and (kept[expected] == row[expected]).all()


def test_what_is_as_likely_as_the_last_one_kept_is_kept():
    logits = np.array([[3.0, 2.0, 2.0, 1.0]], np.float32)
    assert np.isfinite(keep_likely(logits, np.int32(2), np.float32(1))).tolist() == [[True, True, True, False]]


def test_draws_have_the_frequencies_of_the_softmax(model, params):
    """The first tokens of 400 rows, by the two likeliest: a binomial's four deviations."""
    rows = [[256]] * 400
    drawn = np.array(texts(model, params, TokenSampling(0.7, top_k=2, seed=1), True, rows, 6, 1))[:, 0]
    logits = np.asarray(model.apply({"params": params}, np.array([[256]], np.int32))[0, 0])
    likeliest = np.argsort(-logits)[:2]
    share = 1 / (1 + np.exp((logits[likeliest[1]] - logits[likeliest[0]]) / 0.7))
    assert set(drawn) <= set(likeliest.tolist())
    assert abs(np.mean(drawn == likeliest[0]) - share) < 4 * np.sqrt(share * (1 - share) / 400)


@pytest.mark.parametrize("cached", [True, False])
def test_a_row_ends_at_the_end_of_text_and_the_others_go_on(model, params, cached):
    free = texts(model, params, SAMPLINGS[1], cached, max_tokens=25)
    stop = free[1][4]
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    generator = Generator(model, params, length=12, cached=cached)
    found = generator(
        CONTEXTS, SAMPLINGS[1], max_tokens=25, stop=stop, watch=lambda row, ids: seen[row].extend(ids)
    )
    for row, each in enumerate(found):
        expected = free[row][: free[row].index(stop)] if stop in free[row] else free[row]
        assert each.ids == expected == seen[row]
        assert each.reason == ("end_of_text" if stop in free[row] else "length")
    assert found[1].reason == "end_of_text"


def test_wrong_contexts_and_samplings(model, params):
    generator = Generator(model, params, length=6)
    for contexts, said in (
        ([[1], [2] * 7], "prompt 2 has 7 tokens.*context is 6"),
        ([[]], "prompt 1 has no tokens"),
    ):
        with pytest.raises(InputError, match=said):
            generator(contexts, TokenSampling(), max_tokens=1)
    with pytest.raises(InputError, match="'abc' has 7"):
        check_contexts([[1] * 7], 6, ["'abc'"])
    wrong = {"temperature": (-0.1, np.nan, np.inf), "top_k": (-1, 258), "top_p": (0, 1.1), "seed": (-1, 2**32)}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(InputError, match=f"{name} is "):
                generator([[1]], TokenSampling(**{name: value}), max_tokens=1)
    assert generator([[1]], TokenSampling(seed=2**32 - 1), max_tokens=0)[0].ids == []


def test_warming_up_changes_nothing_and_then_nothing_is_compiled(model, params):
    generator, sampling = Generator(model, params, length=12), TokenSampling(1.0)
    generator.warm_up([[256, 1, 2]], sampling, 30)
    before = [function._cache_size() for function in _programs()]
    found = generator([[256, 1, 2]], sampling, max_tokens=30)[0].ids
    assert [function._cache_size() for function in _programs()] == before
    assert found == texts(model, params, sampling, False, [[256, 1, 2]], 12, 30)[0]


def test_warming_up_serves_the_row_that_is_left_alone(model, params):
    """Rows of different lengths: the first time the context is full both go on, the second time only one."""
    contexts, sampling = [[256, 1, 2, 3, 4], [256, 5]], TokenSampling(1.0)
    free = texts(model, params, sampling, False, contexts, 12, 40)
    stop = next(token for token in free[0][14:20] if token not in free[0][:14] + free[1])
    generator = Generator(model, params, length=12)
    generator.warm_up(contexts, sampling, 40)
    before = [function._cache_size() for function in _programs()]
    found = [each.ids for each in generator(contexts, sampling, max_tokens=40, stop=stop)]
    assert [function._cache_size() for function in _programs()] == before
    assert found == [free[0][: free[0].index(stop)], free[1]]


def _programs():
    return generation._read, generation._advance


def test_bytes_of_a_character_are_shown_together():
    stream, shown = TextStream(ByteTokenizer(), list(b"caf")), []
    for byte in "é \N{EURO SIGN}\N{GRINNING FACE}!".encode():
        shown.append(stream.push([byte]))
    whole = ["é", " ", "\N{EURO SIGN}", "\N{GRINNING FACE}", "!"]
    assert [text for text in shown if text] == whole
    assert stream.push([0xE2, 0x82]) == "" and stream.push([], last=True) == "\ufffd"
    assert stream.shown == "".join(whole) + "\ufffd"


def test_broken_bytes_are_shown_once_it_is_clear_that_they_are_broken():
    stream = TextStream(ByteTokenizer())
    assert stream.push([0xC3]) == "" and stream.push([ord("a")]) == "\ufffda"


def test_pieces_of_a_byte_level_tokenizer(tmp_path):
    """Each byte of a character is a token of its own."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0} | {token: i + 1 for i, token in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    (ids,) = tokenizer.encode_batch(["é\N{EURO SIGN}x"])
    stream = TextStream(tokenizer, tokenizer.encode_batch(["the "])[0].tolist())
    shown = [stream.push([token]) for token in ids.tolist()]
    assert shown == ["", "é", "", "", "\N{EURO SIGN}", "x"]


def test_samples_of_a_run(model, params):
    """Of a prompt that does not fit the end counts; each text is that of its prompt and place."""
    draw = functools.partial(sample, model, params, ByteTokenizer(), length=6, temperature=1.0)
    one, two = draw(["ab", "longer than it"], num_tokens=9)
    assert one == draw(["ab"], num_tokens=9)[0]
    assert two != draw(["longer than it"], num_tokens=9)[0]  # another number
    assert draw(["x", "than it"], num_tokens=9)[1] == two
    assert draw(["ab"], num_tokens=0) == [""] and draw([], num_tokens=4) == []
    assert draw(["ab"], num_tokens=9, seed=1) != [one]
