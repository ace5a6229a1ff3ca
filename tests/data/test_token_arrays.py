"""Arrays of tokens that others wrote: read where they lie, cut where documents end, refused where they changed."""

import os

import numpy as np
import pytest

from siamese_jax.data.index import index_arrays
from siamese_jax.data.loader import WindowLoader
from siamese_jax.data.prepared import is_token_arrays, prepare_store
from siamese_jax.data.store import TokenStore
from siamese_jax.data.token_arrays import Joined, TokenArray
from siamese_jax.data.tokenizer import ByteTokenizer

DOCUMENTS = ["ab", "cdefg", "", "h", "ijkl", "mn", "opqrst"]


def tokens_of(documents):
    return np.array([token for text in documents for token in [*text.encode(), 256]], np.uint16)


@pytest.fixture
def write(tmp_path):
    """Writes tokens as other code bases do."""

    def go(name, documents, form="raw"):
        path, tokens = tmp_path / name, tokens_of(documents)
        if form == "numpy":
            np.save(path, tokens.astype(np.uint32))
        elif form == "shard":  # 256 int32, the first of them a magic number
            head = np.zeros(256, np.int32)
            head[:3] = 20240520, 1, len(tokens)
            path.write_bytes(head.tobytes() + tokens.tobytes())
        else:
            path.write_bytes(tokens.tobytes())
        return path

    return go


def prepare(source, tmp_path, split="all", **options):
    return prepare_store(
        str(source), split, tokenizer=ByteTokenizer(), cache_dir=tmp_path / "cache", progress=False, **options
    )


@pytest.mark.parametrize("form", ["raw", "numpy", "shard"])
def test_an_array_is_read_where_it_lies(write, tmp_path, form):
    path = write("part.npy" if form == "numpy" else "part.bin", DOCUMENTS, form)
    store = prepare(path, tmp_path)
    assert store.tokens[0 : store.num_tokens].tolist() == tokens_of(DOCUMENTS).tolist()
    assert store.document_bytes.tolist() == [len(text) for text in DOCUMENTS]
    assert (store.num_documents, store.num_bytes) == (7, sum(map(len, DOCUMENTS)))
    assert not (store.path / "tokens.bin").exists()
    assert prepare(path, tmp_path).path == store.path  # the index is made once


def test_several_arrays_are_one(write, tmp_path, make_store):
    first, second = write("a.npy", DOCUMENTS[:3], "numpy"), write("b.npy", DOCUMENTS[3:])
    store = prepare(f"{first},{second}", tmp_path)
    whole = make_store(DOCUMENTS)
    assert store.sources == {"a.npy": (0, 2), "b.npy": (3, 6)}
    assert store.document_starts.tolist() == whole.document_starts.tolist()
    for step in range(5):
        ours, theirs = (WindowLoader(one, 4, 3, cross_documents=False).batch(step) for one in (store, whole))
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_joined_arrays_are_sliced_like_one():
    parts = [np.arange(5), np.arange(5, 6), np.arange(6, 13)]
    joined, whole = Joined(parts), np.arange(13)
    for start in range(14):
        for stop in range(start, 16):
            assert joined[start:stop].tolist() == whole[start:stop].tolist()
    assert np.shares_memory(joined[6:9], parts[2])
    with pytest.raises(IndexError):
        joined[::2]


def test_parts_are_cut_where_a_document_ends(write, tmp_path, refuses):
    paths = ",".join(str(write(f"{i}.bin", DOCUMENTS[i : i + 3])) for i in (0, 3))
    for fraction in (0.05, 0.3, 0.6, 0.95):
        train, validation = (
            prepare(paths, tmp_path, part, validation_fraction=fraction) for part in ("train", "validation")
        )
        assert train.tokens[0 : train.num_tokens][-1] == 256
        both = [
            *train.tokens[0 : train.num_tokens].tolist(),
            *validation.tokens[0 : validation.num_tokens].tolist(),
        ]
        assert both == tokens_of(DOCUMENTS[:6]).tolist()
        assert train.num_documents + validation.num_documents == 6
    single = write("single.bin", ["abc"])
    with refuses("single.bin", "one document", "another source for validation"):
        prepare(single, tmp_path, "train")
    other = prepare(single, tmp_path, "validation", validation_source=paths)
    assert other.num_documents == 6


def test_a_changed_array_is_noticed(write, tmp_path, refuses):
    path = write("a.bin", DOCUMENTS)
    store = prepare(path, tmp_path)
    path.write_bytes(tokens_of(["zb", *DOCUMENTS[1:]]).tobytes())
    with refuses(path, "has changed", "its content differs", "prepare again"):
        TokenStore.open(store.path)
    path.unlink()
    with refuses(path, "has changed", "0 bytes now"):
        TokenStore.open(store.path)


def test_arrays_that_are_none(write, tmp_path, refuses):
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"abc")
    with refuses(odd, "3 bytes", "multiple of 2"):
        prepare(odd, tmp_path)
    wide = tmp_path / "wide.bin"
    wide.write_bytes(np.array([1, 300, 256], np.uint16).tobytes())
    with refuses(wide, "id 300 at token 1", "bytes has 257"):
        prepare(wide, tmp_path)
    silent = tmp_path / "silent.bin"
    silent.write_bytes(np.array([256, 256], np.uint16).tobytes())
    with refuses(silent, "nothing but ends of text"):
        prepare(silent, tmp_path)
    endless = tmp_path / "endless.bin"
    endless.write_bytes(np.array([1, 2], np.uint16).tobytes())
    with refuses(endless, "no end of text (id 256"):
        prepare(endless, tmp_path)
    table = tmp_path / "table.npy"
    np.save(table, np.zeros((2, 2)))
    with refuses(table, "(2, 2) of float64"):
        prepare(table, tmp_path)
    table.write_bytes(b"\x93NUMPY broken")
    with refuses(table, "damaged"):
        prepare(table, tmp_path)
    with refuses("does not exist"):
        prepare(tmp_path / "nothing.bin", tmp_path)


def test_what_counts_as_arrays(write, tmp_path, refuses, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.npy").write_bytes(b"")
    assert is_token_arrays(str(folder)) and is_token_arrays("x/*.npy, y.bin")
    (folder / ".b.txt").write_text("hidden, so it does not count")
    assert is_token_arrays(str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert is_token_arrays("~/folder")
    (folder / "b.txt").write_text("text")
    with refuses(folder, "tokens (a.npy) and text (b.txt)", "/**/*.npy' or", "/**/*.txt'"):
        is_token_arrays(str(folder))
    (folder / "a.npy").unlink()
    assert not is_token_arrays(str(folder)) and not is_token_arrays("sotu") and not is_token_arrays("x.npy,y.txt")
    assert not is_token_arrays(",".join(f"{name}.txt" for name in "abcdefghij" * 40))  # longer than a path may be
    assert TokenArray.find(write("c.bin", DOCUMENTS), 257).num_tokens == len(tokens_of(DOCUMENTS))


def test_ids_of_four_bytes_are_known_without_a_header(tmp_path):
    documents = ["some words", "others, so that there are enough"]
    path = tmp_path / "wide.bin"
    path.write_bytes(tokens_of(documents).astype("<u4").tobytes())
    store = prepare(path, tmp_path)
    assert store.tokens[0 : store.num_tokens].tolist() == tokens_of(documents).tolist()
    assert store.document_bytes.tolist() == [len(text) for text in documents]


def test_a_change_between_the_ends_is_noticed(tmp_path, refuses):
    path = tmp_path / "long.bin"
    tokens = np.full(400_000, 97, np.uint16)
    tokens[-1] = 256
    path.write_bytes(tokens.tobytes())
    store = prepare(path, tmp_path)
    tokens[190_000:210_000] = 98  # 5 % of it, in the middle
    path.write_bytes(tokens.tobytes())
    with refuses(path, "has changed", "prepare again"):
        TokenStore.open(store.path)


def test_ids_of_eight_bytes_are_refused(tmp_path, refuses):
    path = tmp_path / "wider.bin"
    path.write_bytes(np.array(tokens_of(["some words", "others, so that there are enough"]), "<u8").tobytes())
    with refuses(path, "eight bytes", "uint16 or uint32"):
        prepare(path, tmp_path)


def test_a_part_need_not_have_an_end_of_text(tmp_path):
    """The last document may be open, or an end of text stand in front of each."""
    path = tmp_path / "open.bin"
    path.write_bytes(np.array([*([256, 97, 98, 99, 100] * 5), 256, *[97] * 50], np.uint16).tobytes())
    train, validation = (prepare(path, tmp_path, part) for part in ("train", "validation"))
    assert train.num_tokens + validation.num_tokens == 76
    assert 256 not in validation.tokens[0 : validation.num_tokens] and validation.num_documents == 1


def test_a_rewritten_array_is_indexed_anew(write, tmp_path):
    path = write("a.bin", DOCUMENTS)
    store = prepare(path, tmp_path)
    os.utime(path, ns=(1, 1))
    assert prepare(path, tmp_path).path != store.path


def test_a_document_may_run_through_the_end_of_an_array(write, tmp_path):
    """Only all arrays together have to close one; each starts one, as nothing tells otherwise."""
    first = tmp_path / "a.bin"
    first.write_bytes(np.frombuffer(b"abc", np.uint8).astype(np.uint16).tobytes())
    store = prepare(f"{first},{write('b.bin', ['de', 'f'])}", tmp_path)
    assert store.document_bytes.tolist() == [3, 2, 1] and store.sources == {"a.bin": (0, 0), "b.bin": (1, 2)}


def test_bytes_are_counted_by_decoding_where_ids_do_not_tell_them(write, tmp_path):
    class Decoding(ByteTokenizer):
        def byte_lengths(self):
            return None

    path = write("a.bin", [*DOCUMENTS, "ß"])
    store = prepare_store(str(path), "all", tokenizer=Decoding(), cache_dir=tmp_path / "cache", progress=False)
    assert store.document_bytes.tolist() == [len(text.encode()) for text in [*DOCUMENTS, "ß"]]


def test_a_folder_of_prepared_stores_is_no_source(write, make_store, tmp_path, refuses):
    store = make_store(DOCUMENTS)
    with refuses(store.path.parent, "holds prepared stores", store.path, "name one"):
        prepare(store.path.parent, tmp_path)
    indexed = index_arrays([("a", TokenArray.find(write("a.bin", DOCUMENTS), 257))], ByteTokenizer(),
                           tmp_path / "of" / "stores" / "one", False)  # fmt: skip
    with refuses("holds prepared stores", indexed.path):
        prepare(tmp_path / "of", tmp_path)


def test_what_killed_calls_left_is_swept(write, tmp_path):
    folder = tmp_path / "cache"
    old, fresh = (folder / f".{name}.{'0' * 32}.tmp" for name in ("old", "fresh"))
    for leftover in (old, fresh):
        leftover.mkdir(parents=True)
        (leftover / "lock").touch()
    for path in (old, old / "lock"):
        os.utime(path, (1, 1))
    prepare(write("a.bin", DOCUMENTS), tmp_path)
    assert not old.exists() and fresh.exists()
