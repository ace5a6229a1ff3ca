"""The token store: a corpus tokenised once, as flat memory-mapped arrays in a folder.

tokens.bin     little-endian uint16 (uint32 where the vocabulary needs it); an end of text closes a document
documents.npy  int64 [documents + 1], where each document starts in the tokens
bytes.npy      int64 [documents], UTF-8 bytes of each document's text
meta.json      counts, tokenizer, sources and the fingerprint of the content

A store of token arrays that somebody else wrote has no tokens.bin: meta.json says where they lie (`arrays`).
"""

import json
import os
from pathlib import Path

import numpy as np

from siamese_jax.data.token_arrays import TokenArray, join
from siamese_jax.errors import InputError

FORMAT_VERSION = 1
COUNTS = ("vocab_size", "end_of_text", "num_tokens", "num_documents", "num_bytes")


class TokenStore:
    """An opened token store; made by `build.build_store` and `index.index_arrays`.

    tokens: uint16 or uint32 [num_tokens]; document_starts: int64 [num_documents + 1]; document_bytes: int64
    [num_documents]; all memory-mapped. sources: file name -> (first_document, last_document), both included.
    """

    def __init__(
        self,
        path: Path,
        meta: dict,
        tokens: np.ndarray,
        document_starts: np.ndarray,
        document_bytes: np.ndarray,
    ):
        self.path, self.meta = path, meta
        self.tokens, self.document_starts, self.document_bytes = tokens, document_starts, document_bytes
        self.vocab_size, self.end_of_text = meta["vocab_size"], meta["end_of_text"]
        self.num_tokens, self.num_documents, self.num_bytes = (meta[name] for name in COUNTS[2:])
        self.fingerprint = meta["fingerprint"]
        self.sources = {
            entry["name"]: (entry["first_document"], entry["last_document"]) for entry in meta["sources"]
        }

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        """Opens a store folder; InputError for a missing, unfinished, foreign or truncated one."""
        path = Path(path)
        meta = read_meta(path)
        if "arrays" in meta:
            tokens = join([TokenArray.from_json(entry) for entry in meta["arrays"]])
        else:
            kind = token_type(meta["vocab_size"])
            token_bytes = meta["num_tokens"] * kind.itemsize
            _expect(path, "bytes in tokens.bin", _size_of(path / "tokens.bin"), token_bytes)
            # A plain view: every slice of a np.memmap object costs microseconds more.
            tokens = np.memmap(path / "tokens.bin", kind, "r").view(np.ndarray)
        starts = _load(path, "documents.npy", meta["num_documents"] + 1)
        _expect(path, "tokens at the end of documents.npy", int(starts[-1]), meta["num_tokens"])
        sizes = _load(path, "bytes.npy", meta["num_documents"])
        return cls(path, meta, tokens, starts, sizes)


def is_store(path: Path) -> bool:
    """Whether a folder holds a finished store."""
    return (path / "meta.json").is_file()


def read_meta(path: Path) -> dict:
    """What meta.json tells, checked; InputError for a folder that is no finished store."""
    if partial_of(path).exists():
        raise InputError(
            f"the preparation of {path} was interrupted: run its command again to finish it (it goes on where it "
            f"stopped), or remove {partial_of(path)}"
        )
    if not path.is_dir():
        raise InputError(
            f"the token store {path} does not exist or is no folder: prepare it with  python -m "
            f"siamese_jax.data.prepare --source=SOURCE --out={path}, or correct the path"
        )
    if not is_store(path):
        raise InputError(f"{path} is not a finished token store (no meta.json): prepare it or name another folder")
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        version, complete = meta["format_version"], meta["complete"]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path}/meta.json is not that of a token store ({error!r}): name another folder, "
            "or remove it and prepare again"
        ) from error
    _expect(path, "as format version", version, FORMAT_VERSION)
    missing = [name for name in (*COUNTS, "fingerprint", "sources") if name not in meta]
    if missing or complete is not True:
        raise InputError(
            f"{path}/meta.json is incomplete (missing {missing}, complete is {complete}): "
            "remove the folder and prepare again"
        )
    return meta


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _load(path: Path, name: str, length: int) -> np.ndarray:
    try:
        values = np.load(path / name, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"the token store {path} is damaged: {name} is missing or truncated: remove the "
            "folder and prepare again"
        ) from error
    _expect(path, f"entries in {name}", values.size, length)
    return values.view(np.ndarray)


def _expect(path: Path, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise InputError(
            f"the token store {path} has {found} {what}, expected {expected}: remove the folder and prepare again"
        )


def partial_of(path: Path) -> Path:
    """Where a preparation of path lies that can be continued."""
    path = Path(os.path.realpath(path))  # a link to a store stands for it
    return path.parent / f".{path.name}.partial"


def token_type(vocab_size: int) -> np.dtype:
    """The type of tokens.bin."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
