"""The token store: a corpus tokenised once, as flat memory-mapped arrays in a folder.

tokens.bin     little-endian uint16 (uint32 where the vocabulary needs it); an end of text closes a document
documents.npy  int64 [documents + 1], where each document starts in tokens.bin
bytes.npy      int64 [documents], UTF-8 bytes of each document's text
meta.json      counts, tokenizer, sources and the fingerprint of the content
"""

import array
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from siamese_jax.data.sources import Corpus, find_corpus
from siamese_jax.errors import FaultError, InputError

FORMAT_VERSION = 1

_COUNTS = ("vocab_size", "end_of_text", "num_tokens", "num_documents", "num_bytes")
_BATCH_CHARACTERS = 1 << 21
_BATCH_DOCUMENTS = 4096
_LEFTOVER_SECONDS = 24 * 3600


class TokenStore:
    """An opened token store; make one with `TokenStore.open`, `build_store` or `prepare_store`.

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
        self.num_tokens, self.num_documents, self.num_bytes = (meta[name] for name in _COUNTS[2:])
        self.fingerprint = meta["fingerprint"]
        self.sources = {
            entry["name"]: (entry["first_document"], entry["last_document"]) for entry in meta["sources"]
        }

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        """Opens a store folder; InputError for a missing, unfinished, foreign or truncated one."""
        path = Path(path)
        meta = _read_meta(path)
        kind = _token_type(meta["vocab_size"])
        token_bytes = meta["num_tokens"] * kind.itemsize
        _expect(path, "bytes in tokens.bin", _size_of(path / "tokens.bin"), token_bytes)
        starts = _load(path, "documents.npy", meta["num_documents"] + 1)
        _expect(path, "tokens at the end of documents.npy", int(starts[-1]), meta["num_tokens"])
        sizes = _load(path, "bytes.npy", meta["num_documents"])
        # A plain view: every slice of a np.memmap object costs microseconds more.
        tokens = np.memmap(path / "tokens.bin", kind, "r").view(np.ndarray)
        return cls(path, meta, tokens, starts, sizes)


def build_store(
    documents: Iterable[tuple[str, str]], tokenizer, path: str | Path, progress: bool = True
) -> TokenStore:
    """Tokenises (source name, text) documents into a new store at path.

    The store is written beside path and renamed, so path never holds an unfinished one, and of two processes
    that build the same store both succeed. Raises InputError for an empty corpus and for a path that holds
    something else, FaultError where the disk does not take the data.
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and (_is_store(path) or not any(path.iterdir()))):
        raise InputError(f"{path} exists and is not a token store: choose another path or remove it")
    folder = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"cannot write a token store below {path.parent}: {error.strerror}: choose another folder"
        ) from error
    try:
        _write(documents, tokenizer, folder, path.name, progress)
        return _publish(folder, path)
    except OSError as error:
        raise FaultError(
            f"cannot write the token store {path}: {error.strerror or error}: free space or "
            "choose another folder, then start again"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepare_store(
    source: str,
    split: str,
    *,
    tokenizer,
    field: str = "text",
    cache_dir: str | Path = "",
    validation_source: str = "",
    validation_fraction: float = 0.05,
    progress: bool = True,
) -> TokenStore:
    """The store of a split of a source, built at the first call and opened from the cache afterwards.

    source, split, validation_source, validation_fraction: as in `sources.find_corpus`. The cache folder is
    named by the files (path, size, time of change), the split, the field and the tokenizer; '' is
    $SIAMESE_JAX_CACHE, $XDG_CACHE_HOME/siamese_jax or ~/.cache/siamese_jax. Errors as in find_corpus,
    read_file and build_store.
    """
    corpus = find_corpus(source, split, validation_source, validation_fraction)
    folder = Path(cache_dir).expanduser() if str(cache_dir) else default_cache_dir()
    label = re.sub(r"[^A-Za-z0-9]+", "-", Path(source).stem)[:40].strip("-")
    path = folder / f"{label}-{split}-{_cache_key(corpus, field, tokenizer)}"
    if path.exists():
        return TokenStore.open(path)
    _sweep(folder)
    return build_store(corpus.documents(field), tokenizer, path, progress)


def default_cache_dir() -> Path:
    """Where `prepare_store` keeps its stores unless told otherwise."""
    own = os.environ.get("SIAMESE_JAX_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "siamese_jax"


def _token_type(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _write(documents, tokenizer, folder: Path, name: str, progress: bool) -> None:
    kind = _token_type(tokenizer.vocab_size)
    closing = np.array([tokenizer.end_of_text], kind)
    lengths, sizes, sources = array.array("q"), array.array("q"), {}
    digest = hashlib.sha256()
    bar = tqdm(desc=f"tokenising {name}", unit="B", unit_scale=True, delay=2, disable=not progress)
    with bar, open(folder / "tokens.bin", "wb") as file:
        for batch in _batches(documents):
            for source, text in batch:
                _extend_source(sources, source, len(sizes))
                sizes.append(len(text.encode("utf-8")))
            encoded = tokenizer.encode_batch([text for _, text in batch])
            lengths.extend(len(ids) + 1 for ids in encoded)
            block = np.concatenate([part.astype(kind) for ids in encoded for part in (ids, closing)])
            file.write(block)
            digest.update(block)
            bar.update(sum(sizes[-len(batch) :]))
    if not sum(sizes):
        raise InputError(f"the corpus for {name} is empty ({len(sizes)} documents, 0 bytes of text): give it text")
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
    digest.update(starts)
    np.save(folder / "documents.npy", starts)
    np.save(folder / "bytes.npy", np.array(sizes, "<i8"))
    meta = {
        "format_version": FORMAT_VERSION,
        "num_tokens": int(starts[-1]),
        "num_documents": len(sizes),
        "num_bytes": sum(sizes),
        **_tokenizer_meta(tokenizer),
        "sources": [
            {"name": source, "first_document": first, "last_document": last}
            for source, (first, last) in sources.items()
        ],
        "fingerprint": digest.hexdigest(),
        "complete": True,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _tokenizer_meta(tokenizer) -> dict:
    return {
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
    }


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document[1])
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _extend_source(sources: dict, source: str, document: int) -> None:
    first, last = sources.get(source, (document, document - 1))
    if last != document - 1:
        raise InputError(
            f"document {document} is of source {source}, whose documents ended at {last}: give "
            "the documents of a source in one block"
        )
    sources[source] = (first, document)


def _publish(folder: Path, path: Path) -> TokenStore:
    try:
        os.rename(folder, path)
    except OSError:
        if not _is_store(path):
            raise
        # Another process was first. That is welcome if it wrote the same.
        ours, store = _read_meta(folder)["fingerprint"], TokenStore.open(path)
        if store.fingerprint != ours:
            raise InputError(
                f"{path} holds a store with another content ({store.fingerprint[:16]}, this one "
                f"is {ours[:16]}): choose another path or remove it"
            ) from None
    return TokenStore.open(path)


def _sweep(folder: Path) -> None:
    """Removes what killed preparations left behind; a live one writes far more often than once a day."""
    for leftover in folder.glob(".*.tmp"):
        try:
            changed = max(item.stat().st_mtime for item in (leftover, *leftover.iterdir()))
        except OSError:  # its owner has just finished
            continue
        if time.time() - changed > _LEFTOVER_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


def _cache_key(corpus: Corpus, field: str, tokenizer) -> str:
    stats = [(file.name, str(file.path), file.path.stat()) for file in corpus.files]
    files = [(name, path, stat.st_size, stat.st_mtime_ns) for name, path, stat in stats]
    parts = [FORMAT_VERSION, files, corpus.part, corpus.fraction, field, tokenizer.fingerprint]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _is_store(path: Path) -> bool:
    return (path / "meta.json").is_file()


def _read_meta(path: Path) -> dict:
    if not path.is_dir():
        raise InputError(f"the token store {path} does not exist or is no folder: prepare it or correct the path")
    if not _is_store(path):
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
    missing = [name for name in (*_COUNTS, "fingerprint", "sources") if name not in meta]
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
