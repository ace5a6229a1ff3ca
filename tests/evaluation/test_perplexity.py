"""The evaluator against a plain numpy computation, whatever the batch size, and its accounting of bytes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from siamese_jax.data.build import build_store
from siamese_jax.data.tokenizer import ByteTokenizer
from siamese_jax.evaluation.perplexity import Evaluator, format_table

LENGTH = 7
# Windows end inside documents; one source has several documents, one an empty text, one a single letter.
DOCUMENTS = (
    ("first", "some words that cross the border of a window"),
    ("second", "é"),
    ("second", ""),
    ("second", "two bytes a letter: äöü"),
    ("third", "x"),
    ("fourth", "the last document ends in a ragged window, and in a ragged batch"),
)
FIGURES = ("loss", "perplexity", "perplexity_by_instance", "bits_per_byte", "tokens", "bytes", "instances")
# Another batch size is another matrix product, so a loss may differ in its last float32 bits (6e-8 relative,
# and a few of them through one layer); the sums themselves are float64.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return build_store(DOCUMENTS, ByteTokenizer(), tmp_path_factory.mktemp("store") / "s", progress=False)


def evaluate(model, params, store, mesh, **options):
    return Evaluator(model, store, mesh, **{"length": LENGTH, "batch_size": 3} | options)(params)


def assert_close(one: dict, other: dict, relative: float = TOLERANCE):
    assert one.keys() == other.keys() == set(FIGURES)
    for name in FIGURES:
        assert one[name] == pytest.approx(other[name], rel=relative), name


@functools.cache
def forward(model):
    return jax.jit(lambda params, tokens: model.apply({"params": params}, tokens[None])[0])


def last_logits(model, params, inputs) -> np.ndarray:
    """The whole logits after the inputs, in float64; what is padded behind them, a causal model ignores."""
    padded = np.pad(inputs, (0, LENGTH - len(inputs)))
    return np.asarray(forward(model)(params, padded)[len(inputs) - 1], np.float64)


def window_losses(model, params, store, first: int, cross_documents: bool) -> list[float]:
    """The loss of each target of the window that starts at token `first`, from whole logits."""
    tokens = store.tokens[first : first + LENGTH].astype(np.int32)
    before = store.tokens[first - 1] if first else store.end_of_text
    inputs = np.concatenate([[before], tokens[:-1]])
    losses = []
    for i, target in enumerate(tokens):
        start = 0
        if not cross_documents:  # the document alone, from the end of text in front of it
            start = max(start - first for start in [*store.document_starts, first] if start <= first + i)
        row = last_logits(model, params, inputs[max(start, 0) : i + 1])
        losses.append(math.log(sum(math.exp(value) for value in row)) - row[target])
    return losses


def plain_figures(model, params, store, cross_documents=True, max_windows=10**9) -> dict:
    """What `Evaluator` returns, token by token in Python."""
    firsts = list(range(0, store.num_tokens, LENGTH))[:max_windows]
    rows = {name: [] for name in ("total", *store.sources)}  # per window [(loss, bytes), ...]
    for first in firsts:
        losses = window_losses(model, params, store, first, cross_documents)
        for name in rows:
            rows[name].append([])
        for i, loss in enumerate(losses):
            document = max(d for d in range(store.num_documents) if store.document_starts[d] <= first + i)
            size = store.document_starts[document + 1] - store.document_starts[document]
            name = DOCUMENTS[document][0]
            for group in ("total", name):
                rows[group][-1].append((loss, store.document_bytes[document] / size))
    found = {name: figures([window for window in windows if window]) for name, windows in rows.items()}
    return {"total": found.pop("total"), "sources": {name: row for name, row in found.items() if row}}


def figures(windows: list[list[tuple[float, float]]]) -> dict:
    if not windows:
        return {}
    losses = [loss for window in windows for loss, _ in window]
    text_bytes = sum(size for window in windows for _, size in window)
    means = [sum(loss for loss, _ in window) / len(window) for window in windows]
    return {
        "loss": sum(losses) / len(losses),
        "perplexity": math.exp(sum(losses) / len(losses)),
        "perplexity_by_instance": math.exp(sum(means) / len(means)),
        "bits_per_byte": sum(losses) / math.log(2) / text_bytes,
        "tokens": len(losses),
        "bytes": round(text_bytes),
        "instances": len(windows),
    }


def assert_same_result(found: dict, expected: dict):
    assert_close(found["total"], expected["total"])
    assert found["sources"].keys() == expected["sources"].keys()
    for name, row in expected["sources"].items():
        assert_close(found["sources"][name], row)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_figures_are_those_of_a_plain_loop_whatever_the_batch_size(model, params, store, mesh, batch_size):
    assert store.num_tokens % LENGTH and -(-store.num_tokens // LENGTH) % 8
    found = evaluate(model, params, store, mesh, batch_size=batch_size)
    assert_same_result(found, plain_figures(model, params, store))
    assert found["total"]["tokens"] == store.num_tokens
    assert found["total"]["bytes"] == store.num_bytes


def test_documents_that_do_not_see_each_other(model, params, store, mesh):
    found = evaluate(model, params, store, mesh, cross_documents=False)
    assert_same_result(found, plain_figures(model, params, store, cross_documents=False))
    assert found["total"]["loss"] != evaluate(model, params, store, mesh)["total"]["loss"]


@pytest.mark.parametrize("max_windows", [1, 4, 6, 18])
def test_max_windows(model, params, store, mesh, max_windows):
    """Also where they end exactly before the ragged last batch, 18 of 21 windows in batches of 6."""
    assert -(-store.num_tokens // LENGTH) == 21
    seen = []
    evaluator = Evaluator(model, store, mesh, length=LENGTH, batch_size=6, max_windows=max_windows)
    found = evaluator(params, seen.append)
    assert_same_result(found, plain_figures(model, params, store, max_windows=max_windows))
    assert found["total"]["instances"] == seen[-1] == evaluator.num_windows == max_windows


def test_a_uniform_model_has_log2_of_the_vocabulary_bits_a_token(model, params, store, mesh):
    bits = math.log2(model.config.vocab_size)
    rate = bits * store.num_tokens / store.num_bytes

    def uniform(params, batch):
        return np.full(batch["inputs"].shape, bits * math.log(2))

    found = evaluate(model, None, store, mesh, score=uniform)["total"]
    assert found["bits_per_byte"] == pytest.approx(rate, rel=1e-14)
    flat = params | {"head": jax.tree.map(jnp.zeros_like, params["head"])}
    found = evaluate(model, flat, store, mesh)["total"]
    assert found["bits_per_byte"] == pytest.approx(rate, rel=1e-6)  # its logsumexp is float32
    assert found["perplexity"] == pytest.approx(257, rel=1e-5)


def test_many_sources(tmp_path, model, mesh):
    """Each of 300 sources gets its own figures: the loss is its number."""
    texts = ["ab" * (1 + number % 7) for number in range(300)]
    documents = [(f"source{number}", text) for number, text in enumerate(texts)]
    store = build_store(documents, ByteTokenizer(), tmp_path / "many", progress=False)
    source = np.repeat(np.arange(300), np.diff(store.document_starts))
    seen = iter(np.pad(source, (0, -len(source) % 64)).reshape(-1, 8, 8))
    found = evaluate(model, None, store, mesh, length=8, batch_size=8, score=lambda *_: next(seen))
    assert [row["loss"] for row in found["sources"].values()] == list(range(300))
    assert list(found["sources"]) == [f"source{number}" for number in range(300)]
    assert [row["bytes"] for row in found["sources"].values()] == [len(text) for text in texts]
    assert found["total"]["loss"] == pytest.approx(source.mean(), rel=1e-14)


def test_a_loss_that_is_not_finite_shows(model, store, mesh):
    for value in (math.nan, math.inf, 1e4):
        score = lambda _, batch, value=value: np.full(batch["inputs"].shape, value)  # noqa: E731
        total = evaluate(model, None, store, mesh, score=score)["total"]
        assert math.isnan(total["perplexity"]) if math.isnan(value) else total["perplexity"] == math.inf


def test_the_table_has_a_line_for_each_source_and_the_total(model, params, store, mesh):
    result = evaluate(model, params, store, mesh)
    lines = format_table(result).splitlines()
    assert [line.split()[0] for line in lines] == ["source", *store.sources, "total"]
    assert len({len(line) for line in lines}) == 1
    assert lines[-1].split()[1] == f"{store.num_tokens:,}"
