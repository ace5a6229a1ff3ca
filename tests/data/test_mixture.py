"""Mixtures: exact shares at every moment, batches by (seed, step) alone, and weights that are none."""

import collections
from fractions import Fraction

import numpy as np
import pytest

from siamese_jax.data.loader import WindowLoader
from siamese_jax.data.mixture import LONGEST_CYCLE, Cycle, MixtureLoader, parse_weights
from siamese_jax.data.naming import parse_domains, source_names

WEIGHTS = (Fraction(7, 10), Fraction(2, 10), Fraction(1, 10))


@pytest.fixture
def stores(make_store):
    """Three stores whose tokens tell them apart."""
    return {letter: make_store([letter * 50] * 4, letter) for letter in "abc"}


@pytest.mark.parametrize(
    "weights",
    [WEIGHTS, (Fraction(1),), (Fraction(1, 3),) * 3, (Fraction(0), Fraction(1, 7), Fraction(6, 7)),
     (Fraction(1, 1000), Fraction(999, 1000))],
)  # fmt: skip
def test_every_beginning_holds_the_sources_in_proportion(weights):
    cycle = Cycle(weights)
    examples = np.arange(3 * cycle.length + 5)
    sources, numbers = cycle.of(examples)
    for source, weight in enumerate(weights):
        own = numbers[sources == source]
        assert own.tolist() == list(range(len(own)))  # none twice, none left out
        taken = np.cumsum(sources == source)
        assert np.abs(taken - float(weight) * (examples + 1)).max() < len(weights)
    for count in (0, 1, cycle.length - 1, cycle.length, len(examples)):
        assert cycle.counts(count).tolist() == np.bincount(sources[:count], minlength=len(weights)).tolist()


def test_weights_of_a_long_cycle_are_rounded():
    weights = (Fraction(1, 1_000_003), Fraction(500_000, 1_000_003), Fraction(500_002, 1_000_003))
    cycle = Cycle(weights)
    assert cycle.length == LONGEST_CYCLE == cycle.shares.sum() == len(cycle.sources)
    assert cycle.shares[0] == 1  # never nothing of what has a weight
    assert np.abs(cycle.shares / LONGEST_CYCLE - [float(w) for w in weights]).max() < 2 / LONGEST_CYCLE


def test_a_batch_depends_on_seed_and_step_alone(stores):
    make = lambda **options: MixtureLoader(stores, WEIGHTS, 16, 10, **{"seed": 3} | options)  # noqa: E731
    loader = make()
    backwards = {step: make().batch(step) for step in reversed(range(8))}
    for step in range(8):
        for name, values in loader.batch(step).items():
            np.testing.assert_array_equal(values, backwards[step][name])
    parts = [make(rows=np.array(rows)).batch(5) for rows in ([0, 1, 2], [7, 3], [4, 5, 6, 8, 9])]
    joined = np.concatenate([part["inputs"] for part in parts])[[0, 1, 2, 4, 5, 6, 7, 3, 8, 9]]
    np.testing.assert_array_equal(joined, loader.batch(5)["inputs"])
    assert not np.array_equal(make(seed=4).batch(0)["inputs"], loader.batch(0)["inputs"])


def test_tokens_by_source_are_those_of_the_batches(stores):
    loader = MixtureLoader(stores, WEIGHTS, 16, 7)
    seen = collections.Counter()
    for step in range(9):
        for row in loader.batch(step)["targets"]:
            (letter,) = {chr(token) for token in row.tolist()} - {chr(256)}
            seen[letter] += 16
        assert loader.tokens_by_source(step + 1) == dict(seen) | {c: 0 for c in "abc" if c not in seen}


def test_every_source_goes_through_all_its_windows(stores):
    """In each epoch of a source every window comes once, in an order of its own."""
    loader = MixtureLoader(stores, WEIGHTS, 4, 10, seed=1)
    own = WindowLoader(stores["c"], 4, 10, seed=1, stream=(3,))
    rows = [batch["targets"][loader.cycle.of(step * 10 + np.arange(10))[0] == 2]
            for step in range(own.num_windows) if (batch := loader.batch(step))]  # fmt: skip
    expected = own.read(np.arange(own.num_windows))["targets"]
    np.testing.assert_array_equal(np.concatenate(rows), expected)


def test_documents_are_masked_in_mixtures_too(stores):
    batch = MixtureLoader(stores, WEIGHTS, 60, 4, cross_documents=False).batch(0)
    for inputs, segments, positions in zip(batch["inputs"], batch["segments"], batch["positions"], strict=True):
        opens = np.flatnonzero(inputs == 256)
        assert segments.max() >= 2 and (positions[opens] == 0).all()


def test_fingerprint_tells_stores_and_shares(stores):
    def of(stores, weights):
        return MixtureLoader(stores, weights, 16, 4).fingerprint

    other = dict(reversed(stores.items()))
    different = [of(stores, WEIGHTS), of(stores, WEIGHTS[::-1]), of(other, WEIGHTS)]
    assert len(set(different)) == 3 and of(stores, WEIGHTS) == different[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1", ("are 1", "names 2", "web", "books")),
        ("1,-2", ("1,-2", "not be negative")),
        ("0,0", ("0,0", "all of them 0")),
        ("1,x", ("1,x", "numbers by commas")),
        ("1,1/0", ("1,1/0", "numbers")),
        ("nan,1", ("nan,1", "numbers")),
    ],
)
def test_weights_that_are_none(text, words, refuses):
    with refuses("data.weights", *words):
        parse_weights(text, ["web", "books"])


def test_weights_are_exact():
    assert parse_weights("0.7, 0.2,0.1", "abc") == WEIGHTS == parse_weights("7,2,1", "abc")
    assert parse_weights("1e-3,0.999", "ab") == (Fraction(1, 1000), Fraction(999, 1000))


def test_names_of_sources(refuses):
    assert source_names("stores/web, books/*.txt,tfds:c4/en:train") == {
        "web": "stores/web", "*": "books/*.txt", "tfds:c4/en:train": "tfds:c4/en:train",
    }  # fmt: skip
    assert list(source_names("a/text.jsonl.gz,b/text.txt")) == ["a/text.jsonl.gz", "b/text.txt"]
    with refuses("twice"):
        source_names("a,a")


def test_names_of_domains(refuses):
    assert parse_domains(" web = a=b ;books=x.txt;", "k") == {"web": "a=b", "books": "x.txt"}
    assert parse_domains("", "k") == {}
    for text in ("web", "=x", "web=", "we b=x"):
        with refuses("eval.domains", "NAME=SOURCE"):
            parse_domains(text, "eval.domains")
    with refuses("twice", "a", "b"):
        parse_domains("web=a;web=b", "k")
