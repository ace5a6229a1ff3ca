"""The loader: order, purity, exactness of every token, packed documents, and the prefetching thread."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siamese_jax.data.loader import (
    Prefetcher,
    WindowLoader,
    check_vocabulary,
    evaluation_batches,
    num_evaluation_windows,
)
from siamese_jax.data.order import permute


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
        assert left[name].dtype == right[name].dtype


# The order of examples.


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000, 4097])
def test_permute_is_a_bijection(size):
    places = permute(np.arange(size), size, (0, 0))
    assert places.dtype == np.int64
    assert sorted(places.tolist()) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_permute_is_a_bijection_for_any_key(size, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(size), size, (seed, epoch))), np.arange(size))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=50, unique=True))
def test_permute_of_a_huge_range_is_pointwise(indices):
    size = 2**40 + 1
    places = permute(np.array(indices), size, (1, 2))
    assert ((places >= 0) & (places < size)).all()
    assert len(set(places.tolist())) == len(indices)
    assert [int(permute(index, size, (1, 2))) for index in indices] == places.tolist()


def test_permute_keeps_shape_and_refuses_strangers():
    assert permute(np.arange(6).reshape(2, 3), 10, (0, 0)).shape == (2, 3)
    assert permute(np.zeros(0, np.int64), 10, (0, 0)).shape == (0,)
    for index in (-1, 10):
        with pytest.raises(ValueError, match=r"range\(10\)"):
            permute(np.array([index]), 10, (0, 0))


def test_permute_mixes_well():
    size = 10_000
    orders = [permute(np.arange(size), size, key) for key in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    for order in orders:
        assert (np.abs(np.diff(order)) == 1).sum() < 12  # 2 expected of a random order
        counts, *_ = np.histogram2d(np.arange(size), order, bins=10)
        assert ((counts - 100) ** 2 / 100).sum() < 150  # chi-square with 81 degrees of freedom: p < 1e-5
    for first in range(4):
        for second in range(first):
            assert (orders[first] == orders[second]).sum() < 10  # 1 expected
            assert abs(np.corrcoef(orders[first], orders[second])[0, 1]) < 0.05


def test_permute_is_pinned():
    found = [permute(np.arange(10), 10, (0, 0)).tolist(), permute(np.arange(4), 10**9, (7, 3)).tolist()]
    assert found == [[5, 0, 2, 7, 6, 4, 8, 1, 3, 9], [834463082, 115689891, 848986920, 176503683]], (
        "the order of examples has changed: a run that resumes would see other data"
    )


# Training batches.


@pytest.fixture
def store(make_store):
    return make_store(["word " * number + "end" for number in range(30)])


def spell(tokens):
    return ["".join("." if token == 256 else chr(token) for token in row) for row in tokens]


def test_windows_by_hand(make_store):
    store = make_store()  # ab.cdefg..h.ijklmnop. with an end of text for every point
    batch = WindowLoader(store, length=5, batch_size=4, shuffle=False).batch(0)
    assert spell(batch["inputs"]) == [".ab.c", "defg.", ".h.ij", "klmno"]
    assert spell(batch["targets"]) == ["ab.cd", "efg..", "h.ijk", "lmnop"]
    assert batch["weights"].tolist() == [[1.0] * 5] * 4
    assert batch.keys() == {"inputs", "targets", "weights"}
    assert [batch[name].dtype for name in batch] == [np.int32, np.int32, np.float32]


@pytest.mark.parametrize("cross_documents", [True, False])
def test_batches_are_pure(store, cross_documents):
    options = {"length": 16, "batch_size": 6, "seed": 3, "cross_documents": cross_documents}
    loader = WindowLoader(store, **options)
    forward = [loader.batch(step) for step in range(40)]
    for step in reversed(range(40)):
        same(WindowLoader(store, **options).batch(step), forward[step])
    assert any((forward[0]["inputs"] != batch["inputs"]).any() for batch in forward[1:])


@pytest.mark.parametrize("cross_documents", [True, False])
@pytest.mark.parametrize("num_parts", [2, 3])
def test_some_rows_of_a_batch(store, num_parts, cross_documents):
    options = {"length": 16, "batch_size": 12, "cross_documents": cross_documents}
    rows = np.split(np.arange(12)[::-1], num_parts)
    parts = [WindowLoader(store, **options, rows=part) for part in rows]
    for step in range(15):
        whole = WindowLoader(store, **options).batch(step)
        for part, own in zip(parts, rows, strict=True):
            same(part.batch(step), {name: values[own] for name, values in whole.items()})


@pytest.mark.parametrize("batch_size", [1, 3, 8, 500])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_window_once(store, batch_size, shuffle):
    loader = WindowLoader(store, length=16, batch_size=batch_size, shuffle=shuffle)
    steps = -(-3 * loader.num_windows // batch_size)
    windows = np.concatenate([loader.windows_of(step) for step in range(steps)])
    epochs = windows[: 3 * loader.num_windows].reshape(3, -1)
    assert loader.num_windows == store.num_tokens // 16 > 100
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(loader.num_windows))
    assert (epochs[0] != epochs[1]).any() == (epochs[1] != epochs[2]).any() == shuffle
    assert loader.batches_per_epoch == -(-loader.num_windows // batch_size)
    for step in range(steps):
        assert loader.epoch_of(step) == step * batch_size // loader.num_windows


def test_seeds_give_other_orders(store):
    orders = [WindowLoader(store, 16, 50, seed=seed).windows_of(0).tolist() for seed in (0, 1, 2)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_batch_reads_the_window_it_names(store):
    loader = WindowLoader(store, length=7, batch_size=9, seed=5)
    padded = [store.end_of_text, *store.tokens.tolist()]
    for step in range(20):
        batch = loader.batch(step)
        for row, window in enumerate(loader.windows_of(step)):
            assert batch["inputs"][row].tolist() == padded[window * 7 : window * 7 + 7]
            assert batch["targets"][row].tolist() == padded[window * 7 + 1 : window * 7 + 8]


# Packed documents.


def transcribe(store, window, length):
    """Segments, positions and document numbers of a window, token by token."""
    rows = []
    previous, segment, position = None, 0, 0
    for place in range(window * length, (window + 1) * length):
        document = -1
        if place < store.num_tokens:
            while store.document_starts[document + 1] <= place:
                document += 1
        if document == previous:
            position += 1
        else:
            previous, segment, position = document, segment + 1 if document >= 0 else 0, 0
        rows.append((segment, position, document))
    return [list(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("length", [1, 4, 5, 50])
@pytest.mark.parametrize("texts", [["ab", "cdefg", "", "h", "ijklmnop"], ["", "a" * 60, "", "", "b" * 60]])
def test_segments_against_a_plain_transcription(make_store, length, texts):
    store = make_store(texts)
    options = {"length": length, "batch_size": 2, "cross_documents": False}
    for batch in evaluation_batches(store, **options):
        for row, window in enumerate(batch["window"]):
            if window >= 0:
                found = [batch[name][row].tolist() for name in ("segments", "positions", "document")]
                assert found == transcribe(store, window, length)
    if store.num_tokens >= length:
        loader = WindowLoader(store, **options)
        for step in range(loader.batches_per_epoch):
            batch = loader.batch(step)
            for row, window in enumerate(loader.windows_of(step)):
                found = [batch[name][row].tolist() for name in ("segments", "positions")]
                assert found == transcribe(store, window, length)[:2]


def test_segments_by_hand(make_store):
    batch = WindowLoader(make_store(), 10, 2, shuffle=False, cross_documents=False).batch(0)
    #                                      a  b  .  c  d  e  f  g  .  .    h  .  i  j  k  l  m  n  o  p
    assert batch["segments"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 2, 2, 3], [1, 1, 2, 2, 2, 2, 2, 2, 2, 2]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5, 0], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert [batch[name].dtype for name in ("segments", "positions")] == [np.int32, np.int32]


# Evaluation.


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("length", [1, 4, 7, 21, 22, 1000])
def test_every_token_is_a_target_once(make_store, batch_size, length):
    store = make_store()
    batches = list(evaluation_batches(store, length, batch_size))
    counts = np.concatenate([batch["weights"].ravel() for batch in batches]) > 0
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])[counts]
    inputs = np.concatenate([batch["inputs"].ravel() for batch in batches])
    documents = np.concatenate([batch["document"].ravel() for batch in batches])
    windows = np.concatenate([batch["window"] for batch in batches])
    assert targets.tolist() == store.tokens.tolist()
    assert inputs[counts].tolist() == [256, *store.tokens[:-1].tolist()]
    assert (inputs[~counts] == 256).all() and (documents[~counts] == -1).all()
    assert np.bincount(documents[counts]).tolist() == np.diff(store.document_starts).tolist()
    assert all(batch["inputs"].shape == (batch_size, length) for batch in batches)
    assert num_evaluation_windows(store, length) == -(-21 // length) == (windows >= 0).sum()
    assert windows[windows >= 0].tolist() == list(range(-(-21 // length)))
    assert (windows.dtype, documents.dtype) == (np.int64, np.int32)


def test_document_numbers_give_sums_per_source(make_store):
    store = make_store()
    losses = np.zeros(store.num_documents)
    for batch in evaluation_batches(store, 4, 3):
        counts = batch["weights"] > 0
        np.add.at(losses, batch["document"][counts], batch["targets"][counts])
    for first, last in store.sources.values():
        span = store.tokens[store.document_starts[first] : store.document_starts[last + 1]]
        assert losses[first : last + 1].sum() == span.sum()


# Mistakes.


def test_corpus_shorter_than_a_window(make_store, refuses):
    store = make_store()
    with refuses(store.path, "21 tokens", "window of 22"):
        WindowLoader(store, 22, 1)
    assert WindowLoader(store, 21, 1).num_windows == 1


@pytest.mark.parametrize("make", [WindowLoader, evaluation_batches])
def test_wrong_sizes(make_store, make, refuses):
    store = make_store()
    with refuses("batch size is 0", "positive"):
        make(store, 4, 0)
    with refuses("length is 0", "at least 1"):
        make(store, 0, 2)


def test_vocabulary(make_store, refuses):
    store = make_store()
    check_vocabulary(store, 257)
    with refuses("model.vocab_size = 256", "at least 257"):
        check_vocabulary(store, 256)


# The thread.


def test_prefetcher_keeps_the_order(store):
    loader = WindowLoader(store, 16, 4)
    with Prefetcher(loader.batch, start=7) as batches:
        for expected in range(7, 30):
            step, batch = next(batches)
            assert step == expected
            same(batch, loader.batch(step))


def test_prefetcher_works_ahead_but_not_too_far():
    made = []
    with Prefetcher(lambda step: made.append(step), ready=3) as batches:
        wait_for(lambda: len(made) == 4)  # three wait in the queue, one in the thread's hand
        time.sleep(0.05)
        assert made == [0, 1, 2, 3]
        next(batches)
        wait_for(lambda: len(made) == 5)


def test_prefetcher_raises_where_the_error_belongs():
    def make(step):
        if step == 3:
            raise OSError("the disk is gone")
        return step

    with Prefetcher(make, start=1) as batches:
        assert [next(batches), next(batches)] == [(1, 1), (2, 2)]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(batches)


def test_prefetcher_ends_cleanly():
    before = threading.active_count()
    with pytest.raises(KeyError), Prefetcher(lambda step: step) as batches:
        assert threading.active_count() == before + 1
        raise KeyError  # an error of the consumer while the thread waits for room
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(batches)


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
