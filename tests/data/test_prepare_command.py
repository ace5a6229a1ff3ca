"""`python -m siamese_jax.data.prepare`: what it writes, that it goes on after a kill, and what it refuses."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from programs import shared_place

from siamese_jax.data import build
from siamese_jax.data.build import build_store
from siamese_jax.data.prepared import prepare_store
from siamese_jax.data.store import TokenStore, partial_of
from siamese_jax.data.tokenizer import ByteTokenizer, FileTokenizer
from siamese_jax.errors import FaultError, InputError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    return shared_place(tmp_path_factory)


def command(*arguments):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    options = {"cwd": ROOT, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "siamese_jax.data.prepare", *map(str, arguments)], **options)


def run(*arguments, code=0):
    ended = shared_place().run(*map(str, arguments), program="siamese_jax/data/prepare.py")
    assert ended.code == code, ended.err
    return ended.out, ended.err


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """2,000 documents of many words, every tenth of which comes a second time at the end."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    draw = np.random.default_rng(0)
    words = ["union", "state", "nation", "people", "Straße", "peace", "and", "the", "of"]
    texts = [" ".join(draw.choice(words, 20)) + f" {number}" for number in range(2000)]
    lines = [json.dumps({"text": text, "other": "x"}) for text in texts + texts[::10]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_parts_tokenizer_inspection_and_next_step(corpus, tmp_path):
    out = tmp_path / "stores"
    arguments = (f"--source={corpus}", "--train_tokenizer=300", f"--out={out}", "--deduplicate")
    text, _ = run(*arguments, "--inspect", "--samples=2")
    train, validation = TokenStore.open(out / "train"), TokenStore.open(out / "validation")
    assert train.num_documents + validation.num_documents == 2000 and train.meta["duplicates"] == 200
    tokenizer = FileTokenizer(out / "tokenizer.json")
    assert tokenizer.vocab_size == 300 == train.vocab_size
    first = tokenizer.decode(train.tokens[: train.document_starts[1]])
    assert first == json.loads(corpus.read_text().splitlines()[0])["text"]
    assert text.count("200 duplicates") == 1
    for words in ("median", "document 0 (corpus.jsonl", first[:30], "vocab_size=300"):
        assert words in text
    before = content(out)
    result = json.loads(run(*arguments, "--json")[0])  # the same again: everything is there
    assert content(out) == before
    assert [result["parts"][part]["seconds"] for part in ("train", "validation")] == [None, None]
    assert result["parts"]["train"]["fingerprint"] == train.fingerprint
    seen = json.loads(run(f"--out={out}", "--inspect", "--json")[0])["parts"]["train"]["inspection"]
    assert seen["bytes_per_token"] == train.num_bytes / train.num_tokens and len(seen["samples"]) == 3
    assert sum(row["documents"] for row in seen["histogram"]) == seen["documents"] == train.num_documents
    opened = prepare_store(str(out), "validation", tokenizer=tokenizer)
    assert opened.path == out / "validation"


def test_the_bytes_do_not_depend_on_the_processes(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_BATCH_DOCUMENTS", 300)
    documents = [("a", json.loads(line)["text"]) for line in corpus.read_text().splitlines()]
    path = tmp_path / "store"
    stores = []
    for workers in (1, 2, 3):
        build_store(iter(documents), ByteTokenizer(), path, False, workers=workers, resume=workers == 2)
        stores.append(content(path))
        for file in path.iterdir():
            file.unlink()
    assert stores[0] == stores[1] == stores[2]
    assert sorted(stores[0]) == ["bytes.npy", "documents.npy", "meta.json", "tokens.bin"]


class Counting(ByteTokenizer):
    """Counts its calls, and fails at one of them."""

    def __init__(self, fails_at=0):
        self.calls, self.fails_at = 0, fails_at

    def encode_batch(self, texts):
        self.calls += 1
        if self.calls == self.fails_at:
            raise KeyboardInterrupt
        return super().encode_batch(texts)


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A preparation of 10 batches that was interrupted in the fifth or sixth; (path, documents)."""
    monkeypatch.setattr(build, "_BATCH_DOCUMENTS", 5)
    documents = [("a", f"document {number}") for number in range(50)]
    path = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        build_store(iter(documents), Counting(6), path, False, resume=True)
    return path, documents


def whole(documents, tmp_path):
    return content(build_store(iter(documents), ByteTokenizer(), tmp_path / "whole", False).path)


def test_an_interrupted_preparation_goes_on(interrupted, tmp_path, refuses):
    path, documents = interrupted
    with refuses(path, "was interrupted", "run its command again"):
        prepare_store(str(path), "train", tokenizer=ByteTokenizer())
    tokenizer = Counting()
    store = build_store(iter(documents), tokenizer, path, False, resume=True)
    assert 5 <= tokenizer.calls <= 6  # of ten: what was done is not done again
    assert content(store.path) == whole(documents, tmp_path) and not partial_of(path).exists()


@pytest.mark.parametrize("harm", ["tokens", "lengths", "length", "journal", "torn", "document"])
def test_what_was_done_is_checked(interrupted, tmp_path, harm):
    path, documents = interrupted
    folder = partial_of(path)
    if harm == "tokens":
        with (folder / "tokens.bin").open("r+b") as file:
            file.seek(150)
            file.write(b"?")
    elif harm == "lengths":
        os.truncate(folder / "lengths.bin", 16)
    elif harm == "length":
        with (folder / "lengths.bin").open("r+b") as file:
            file.seek(40)
            file.write(b"\7")
    elif harm == "journal":
        (folder / "journal.jsonl").write_text("{broken\n")
    elif harm == "torn":
        with (folder / "journal.jsonl").open("ab") as file:
            file.write(b'{"texts": "12')
        with (folder / "tokens.bin").open("ab") as file:
            file.write(b"half a batch")
    else:
        documents[7] = ("a", "another text")
    store = build_store(iter(documents), ByteTokenizer(), path, False, resume=True)
    assert content(store.path) == whole(documents, tmp_path)


def test_work_of_others_is_not_written_over(interrupted, refuses):
    path, documents = interrupted
    before = content(partial_of(path))
    with refuses("begun with another source", "finish it with the command"):
        build_store(iter(documents), ByteTokenizer(), path, False, resume=True, origin={"source": "else"})

    class Other(ByteTokenizer):
        fingerprint = "0" * 16

    with refuses("begun with another tokenizer"):
        build_store(iter(documents), Other(), path, False, resume=True)
    assert content(partial_of(path)) == before


def test_what_was_begun_is_finished_before_anything_else_goes_there(place, corpus, tmp_path):
    def call(*options):
        return place.run(
            f"--out={tmp_path / 'link'}", "--split=all", *options, program="siamese_jax/data/prepare.py"
        )

    (tmp_path / "link").symlink_to(tmp_path / "out")
    for i in range(8):  # a batch each, several of which are on the way when the last file is met
        (tmp_path / f"{i}.txt").write_text(f"{i}" * build._BATCH_CHARACTERS)
    (tmp_path / "9.txt").write_bytes(b"caf\xe9")
    sources = f"--source={tmp_path}/?.txt"
    assert "not UTF-8" in call(sources).err
    before = content(tmp_path / ".out.partial")
    for options, words in [
        ((f"--source={corpus}",), "begun with another source"),
        ((sources, "--deduplicate"), "begun with another source, files or options"),
        (("--inspect",), "was interrupted"),
    ]:
        ended = call(*options)
        assert (ended.code, len(ended.err.splitlines())) == (2, 1) and words in ended.err, ended
    assert content(tmp_path / ".out.partial") == before


def test_a_store_may_lie_below_its_source_and_have_its_name(place, corpus, tmp_path):
    shutil.copy(corpus, tmp_path)
    for source, out in ((tmp_path, tmp_path / "stores"), ("sotu", "sotu")):
        arguments = (f"--source={source}", f"--out={out}", "--json")
        for begun in (False, True):
            ended = place.run(*arguments, program="siamese_jax/data/prepare.py", at=tmp_path)
            assert ended.code == 0, ended.err
            seconds = [part["seconds"] for part in json.loads(ended.out)["parts"].values()]
            assert [one is None for one in seconds] == [begun, begun]


def test_a_full_disk_keeps_what_is_done(interrupted, tmp_path, monkeypatch):
    path, documents = interrupted
    monkeypatch.setattr(np, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FaultError, match="No space left"):
        build_store(iter(documents), ByteTokenizer(), path, False, resume=True)
    monkeypatch.undo()
    monkeypatch.setattr(build, "_BATCH_DOCUMENTS", 5)
    tokenizer = Counting()
    store = build_store(iter(documents), tokenizer, path, False, resume=True)
    assert tokenizer.calls == 0 and content(store.path) == whole(documents, tmp_path)


def test_a_rename_that_fails_loses_nothing(interrupted, tmp_path, monkeypatch):
    path, documents = interrupted
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(16, "Device or resource busy")))
    with pytest.raises(FaultError, match="resource busy"):
        build_store(iter(documents), ByteTokenizer(), path, False, resume=True)
    monkeypatch.undo()
    monkeypatch.setattr(build, "_BATCH_DOCUMENTS", 5)
    tokenizer = Counting()
    store = build_store(iter(documents), tokenizer, path, False, resume=True)
    assert tokenizer.calls == 0 and content(store.path) == whole(documents, tmp_path)


def test_places_that_a_store_cannot_take(tmp_path, monkeypatch, refuses):
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    store = build_store([("a", "text")], ByteTokenizer(), tmp_path / "link", False, resume=True)
    assert store.path == tmp_path / "elsewhere" and TokenStore.open(tmp_path / "link").num_documents == 1
    monkeypatch.chdir(tmp_path / "store")
    with refuses("is the current folder", "name a folder in it"):
        build_store([("a", "text")], ByteTokenizer(), ".", False, resume=True)


def test_a_corpus_without_text_leaves_nothing(tmp_path, refuses):
    with refuses("is empty (2 documents"):
        build_store([("a", ""), ("a", "")], ByteTokenizer(), tmp_path / "store", False, resume=True)
    assert not list(tmp_path.iterdir())


def test_a_second_preparation_of_the_same_folder_is_told(interrupted):
    path, documents = interrupted

    def slow():
        yield documents[0]
        with pytest.raises(InputError, match="another process prepares"):
            build_store(iter(documents), ByteTokenizer(), path, False, resume=True)
        yield from documents[1:]

    assert build_store(slow(), ByteTokenizer(), path, False, resume=True).num_documents == 50


def test_a_killed_command_goes_on_and_leaves_no_process(tmp_path):
    source = tmp_path / "big.jsonl"
    line = json.dumps({"text": "the state of the union " * 400})
    source.write_text(f"{line}\n" * 1500)  # 14 MB
    out = tmp_path / "stores"
    arguments = (f"--source={source}", f"--out={out}", "--split=all", "--workers=2", "--tokenizer", "bytes")
    process = command(*arguments)
    journal = partial_of(out) / "journal.jsonl"
    while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > 3):
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    if partial_of(out).exists():  # else it was done before the kill
        assert process.returncode == -signal.SIGKILL
        out_text, err = run("--inspect", f"--out={out}", code=2)
        assert not out_text and "was interrupted" in err and len(err.splitlines()) == 1
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}/exe").exists() for child in children):
        assert time.monotonic() < deadline, f"processes {children} outlive the command"
        time.sleep(0.05)
    run(*arguments)
    expected = build_store((("big.jsonl", json.loads(line)["text"]) for _ in range(1500)), ByteTokenizer(),
                           tmp_path / "whole", False)  # fmt: skip
    assert TokenStore.open(out).fingerprint == expected.fingerprint


WRONG = [
    ((), ("--out is missing",)),
    (("--out=OUT",), ("--source is missing",)),
    (("--out=OUT", "--inspect"), ("OUT", "does not exist", "siamese_jax.data.prepare")),
    (("--out=OUT", "--source=nothing.txt"), ("nothing.txt does not exist",)),
    (("--out=OUT", "--source=CORPUS", "--field=body"), ('no field "body"', '"text"', "line 1")),
    (("--out=OUT", "--source=tfds:cifar1"), ("'cifar1'", "nearest: cifar10")),
    (("--out=OUT", "--source=tfds:lm1b", "--data_dir=OUT"), ("not prepared", "download_and_prepare")),
    (("--out=OUT", "--source=LATIN"), ("LATIN, line 3 is not UTF-8", "0xe9")),
    (("--out=OUT", "--source=CUT"), ("CUT is truncated",)),
    (("--out=OUT", "--source=CORPUS", "--train_tokenizer=100"), ("--train_tokenizer is 100", "257")),
    (("--out=OUT", "--source=CORPUS", "--train_tokenizer=300", "--tokenizer=bytes"), ("leave --tokenizer out",)),
    (("--out=OUT", "--source=CORPUS", "--tokenizer=tiktoken:nothing"), ("tiktoken",)),
    (("--out=CORPUS", "--source=CORPUS"), ("CORPUS is a file",)),
    (("--out=CORPUS/x/y", "--source=CORPUS"), ("cannot write", "choose another")),
    (("--out=CORPUS/x/y", "--source=CORPUS", "--train_tokenizer=300"), ("cannot write", "choose another --out")),
    (("--out=OUT", "--source=CORPUS", "--workers=-1"), ("workers", "-1")),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_input_is_one_line_and_leaves_nothing(place, corpus, tmp_path, arguments, words):
    latin, cut = tmp_path / "latin.txt", tmp_path / "cut.jsonl.gz"
    latin.write_bytes("one\ntwo\ncaf\xe9\n".encode("latin-1"))
    cut.write_bytes(gzip.compress(corpus.read_bytes())[:-100])
    names = {"OUT": tmp_path / "out", "CORPUS": corpus, "LATIN": latin, "CUT": cut}

    def named(text):
        for name, path in names.items():
            text = text.replace(name, str(path))
        return text

    ended = place.run(*map(named, arguments), program="siamese_jax/data/prepare.py")
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 1, ended.err
    for word in words:
        assert named(word) in ended.err
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["cut.jsonl.gz", "latin.txt"]


def test_folders_of_other_content_are_not_written_over(corpus, tmp_path):
    out = tmp_path / "stores"
    run(f"--source={corpus}", f"--out={out}")
    before = content(out)
    for arguments, words in [
        ((f"--source={out}", f"--out={tmp_path / 'x'}", "--train_tokenizer=300"), ("prepared already",)),
        ((f"--source={corpus}", "--deduplicate"), ("was made from", "choose another --out")),
        ((f"--source={corpus}", "--split=all"), ("holds train/ and validation/",)),
        ((f"--source={out}", f"--out={tmp_path / 'x'}"), ("prepared already",)),
    ]:
        _, err = run(f"--out={out}", *arguments, code=2)
        assert len(err.splitlines()) == 1 and all(word in err for word in words), err
    assert content(out) == before and not (tmp_path / "x").exists()


def test_a_tokenizer_in_the_folder_is_taken_only_if_it_was_trained_on_the_same(place, corpus, tmp_path):
    def call(*options):
        base = (f"--source={corpus}", f"--out={tmp_path / 'out'}", "--split=train")
        return place.run(*base, *options, program="siamese_jax/data/prepare.py")

    assert call("--train_tokenizer=300").code == 0
    assert call("--train_tokenizer=300", "--inspect").code == 0  # again: all of it is there
    shutil.rmtree(tmp_path / "out")  # as if interrupted before the store
    for options in (("--train_tokenizer=280",), ("--train_tokenizer=300", "--deduplicate")):
        ended = call(*options)
        assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended
        assert (
            "out.tokenizer.json was trained to 300 tokens" in ended.err
            and "in place of --train_tokenizer" in ended.err
        )
    (tmp_path / "out.tokenizer.trained_on.json").unlink()
    ended = call("--train_tokenizer=300")
    assert ended.code == 2 and "tokenizer.json is there, and not on the same" in ended.err


def test_a_training_that_fails_leaves_nothing_of_a_tokenizer(place, tmp_path):
    latin, out = tmp_path / "latin.txt", tmp_path / "out"
    latin.write_bytes(b"one\ntwo\ncaf\xe9\n")
    options = (f"--source={latin}", f"--out={out}", "--train_tokenizer=300", "--json")
    ended = place.run(*options, program="siamese_jax/data/prepare.py")
    assert (ended.code, ended.out) == (2, "") and "latin.txt, line 3 is not UTF-8" in ended.err
    assert not list(out.iterdir())


def test_a_moved_folder_can_be_looked_into(place, corpus, tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    made = place.run(
        f"--source={corpus}", f"--out={first}", "--train_tokenizer=300", program="siamese_jax/data/prepare.py"
    )
    assert made.code == 0
    first.rename(second)
    ended = place.run(f"--out={second}", "--inspect", program="siamese_jax/data/prepare.py")
    assert ended.code == 0 and "document 0 (corpus.jsonl" in ended.out
    (second / "tokenizer.json").unlink()
    ended = place.run(f"--out={second}", "--inspect", program="siamese_jax/data/prepare.py")
    assert ended.code == 2 and f"tokenizer {first / 'tokenizer.json'} does not exist" in ended.err


def test_another_tokenizer_than_the_store_has(corpus, tmp_path, refuses):
    run(f"--source={corpus}", f"--out={tmp_path / 'a'}", "--train_tokenizer=300")
    with refuses("was prepared with the tokenizer", "tokenizer.json", "data.tokenizer is bytes"):
        prepare_store(str(tmp_path / "a"), "train", tokenizer=ByteTokenizer())
    with refuses("prepared in parts", tmp_path / "a" / "train"):
        prepare_store(str(tmp_path / "a"), "all", tokenizer=ByteTokenizer())
    with refuses("one store without a part for validation", "data.validation_source"):
        prepare_store(str(tmp_path / "a" / "train"), "validation", tokenizer=ByteTokenizer())
