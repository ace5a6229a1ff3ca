"""Writes token stores: tokenises documents, in several processes if wanted, or indexes arrays of tokens.

The same documents and tokenizer give the same bytes, whatever the number of processes and however often the work
was interrupted.
"""

import array
import collections
import concurrent.futures
import concurrent.futures.process
import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from siamese_jax.data.sources import Reading
from siamese_jax.data.store import FORMAT_VERSION, TokenStore, is_store, partial_of, read_meta, token_type
from siamese_jax.data.token_arrays import TokenArray
from siamese_jax.errors import FaultError, InputError

Documents = Iterable[tuple[str, str]]

_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 4096
_SCAN_TOKENS = 1 << 24
_UNFINISHED = ("journal.jsonl", "lengths.bin", "sizes.bin", "lock")


class Encoded(NamedTuple):
    """A batch as the store holds it: tokens of its documents, ends of text included; lengths [documents]."""

    tokens: np.ndarray
    lengths: np.ndarray


class Progress:
    """A bar with rate and time left, shown after two seconds; without a reading it counts bytes of text."""

    def __init__(self, name: str, show: bool, reading: Reading | None = None, total: int = 0, unit: str = "B"):
        self._reading = reading if total else None
        self.bar = tqdm(
            desc=f"tokenising {name}", total=total or None, unit=unit, unit_scale=True, delay=2, disable=not show,
            dynamic_ncols=True,
        )  # fmt: skip

    def add(self, text_bytes: int) -> None:
        """So many more bytes of text are done."""
        self.bar.update(text_bytes if self._reading is None else self._reading.place - self.bar.n)


def build_store(
    documents: Documents,
    tokenizer,
    path: str | Path,
    progress: bool = True,
    *,
    workers: int = 1,
    resume: bool = False,
    reading: Reading | None = None,
    total: int = 0,
    unit: str = "B",
    origin: dict | None = None,
) -> TokenStore:
    """Tokenises (source name, text) documents into a new store at path.

    The store is written beside path and renamed, so path never holds an unfinished one, and of two processes
    that build the same store both succeed. Raises InputError for an empty corpus and for a path that holds
    something else, FaultError where the disk does not take the data.

    Args:
        workers: processes that tokenise; 1 = threads of this one, as many as the tokenizer takes.
        resume: whether an interrupted call may be made again with the same documents, to go on where it stopped.
        reading: of the documents, total and unit: of its places, for the time left.
        origin: what meta.json tells of where the documents came from.
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and (is_store(path) or not any(path.iterdir()))):
        raise InputError(f"{path} exists and is not a token store: choose another path or remove it")
    reading = reading or Reading()
    with _folder_beside(path, resume) as folder:
        bar = Progress(path.name, progress, reading, total, unit)
        with bar.bar, Writer(folder, tokenizer) as writer:
            writer.take(_batches(documents), workers, bar)
            writer.finish(path.name, ({"duplicates": reading.duplicates}) | ({"origin": origin} if origin else {}))
        return _publish(folder, path)


@contextlib.contextmanager
def _folder_beside(path: Path, resume: bool) -> Iterator[Path]:
    """A folder to write a store in, removed at the end unless its work can go on; a full disk is one line."""
    folder = partial_of(path) if resume else path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=resume)
    except OSError as error:
        raise InputError(
            f"cannot write a token store below {path.parent}: {error.strerror}: choose another folder"
        ) from error
    try:
        with _locked(folder, path):
            try:
                yield folder
            except BaseException:
                journal = folder / "journal.jsonl"
                if not (resume and journal.is_file() and journal.read_bytes().count(b"\n") > 1):
                    shutil.rmtree(folder, ignore_errors=True)  # not a single batch is done
                raise
    except OSError as error:
        raise FaultError(
            f"cannot write the token store {path}: {error.strerror or error}: free space or "
            "choose another folder, then start again"
        ) from error
    finally:
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, path: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another process prepares {path}: wait for it, or choose another folder") from error
        yield


class Writer:
    """Appends batches to a folder, with a journal of what is complete in it; goes on with an earlier one's work.

    A batch counts when its line is in the journal. Before it goes on, everything that counts is checked: the tokens
    by their checksums, the documents by the digests of their texts.
    """

    def __init__(self, folder: Path, tokenizer):
        self._folder, self._tokenizer = folder, tokenizer
        self._kind = token_type(tokenizer.vocab_size)
        self._sources: dict[str, tuple[int, int]] = {}
        self._digest = hashlib.sha256()
        self._lengths, self._sizes = array.array("q"), array.array("q")
        self._files = {}
        self.found = self._found()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_) -> None:
        for file in self._files.values():
            file.close()

    def take(self, batches: Iterator[list[tuple[str, str]]], workers: int, bar: Progress) -> None:
        """Writes all batches; those that an earlier call wrote are only read again."""
        batches = self._skip(batches, bar)
        self._open()
        for batch, encoded in _encode_all(batches, self._tokenizer, workers):
            sizes = self._note(batch)
            block = encoded.tokens.astype(self._kind, copy=False)
            self._lengths.extend(encoded.lengths.tolist())
            self._digest.update(block)
            line = {
                "texts": _digest_of(batch), "tokens": len(block), "documents": len(batch), "crc": zlib.crc32(block),
            }  # fmt: skip
            for name, values in (
                ("tokens.bin", block), ("lengths.bin", encoded.lengths.astype("<i8")), ("sizes.bin", sizes),
            ):  # fmt: skip
                self._files[name].write(values)
                self._files[name].flush()
            self._files["journal.jsonl"].write(json.dumps(line).encode() + b"\n")
            self._files["journal.jsonl"].flush()
            bar.add(int(sizes.sum()))

    def finish(self, name: str, extra: dict) -> None:
        """Completes the folder; extra: more for meta.json."""
        if not sum(self._sizes):
            raise InputError(
                f"the corpus for {name} is empty ({len(self._sizes)} documents, 0 bytes of text): give it text"
            )
        starts = np.concatenate([[0], np.cumsum(self._lengths)]).astype("<i8")
        self._digest.update(starts)
        np.save(self._folder / "documents.npy", starts)
        np.save(self._folder / "bytes.npy", np.array(self._sizes, "<i8"))
        write_meta(self._folder, self._tokenizer, starts, self._sizes, self._sources, self._digest, extra)
        for file in _UNFINISHED:
            (self._folder / file).unlink(missing_ok=True)

    def _found(self) -> list[dict]:
        """Lines of the journal whose data are there and whole; of a journal of another tokenizer none."""
        try:
            head, *lines = (self._folder / "journal.jsonl").read_bytes().split(b"\n")[:-1]
            if json.loads(head) != self._head():
                return []
            lines = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return []
        sound = []
        with contextlib.suppress(OSError), (self._folder / "tokens.bin").open("rb") as file:
            for line in lines:
                block = file.read(line["tokens"] * self._kind.itemsize)
                if zlib.crc32(block) != line["crc"]:
                    break
                sound.append(line)
        documents = sum(line["documents"] for line in sound)
        for name in ("lengths.bin", "sizes.bin"):
            file = self._folder / name
            if not file.is_file() or file.stat().st_size < 8 * documents:
                return []
        return sound

    def _head(self) -> dict:
        return {
            "format_version": FORMAT_VERSION, "tokenizer": self._tokenizer.fingerprint,
            "batch": [_BATCH_CHARACTERS, _BATCH_DOCUMENTS],
        }  # fmt: skip

    def _skip(self, batches: Iterator, bar: Progress) -> Iterator:
        """The batches that are still to be tokenised; what is known of the others is taken over."""
        found, self.found = self.found, []
        if not found:
            return batches
        kept = 0
        with (
            (self._folder / "lengths.bin").open("rb") as lengths,
            (self._folder / "tokens.bin").open("rb") as tokens,
        ):
            for batch in batches:
                if kept == len(found) or _digest_of(batch) != found[kept]["texts"]:
                    self.found = found[:kept]
                    return _with_first(batch, batches)
                line = found[kept]
                self._lengths.frombytes(lengths.read(8 * line["documents"]))
                self._digest.update(tokens.read(line["tokens"] * self._kind.itemsize))
                bar.add(int(self._note(batch).sum()))
                kept += 1
        self.found = found[:kept]
        return batches

    def _note(self, batch: list[tuple[str, str]]) -> np.ndarray:
        """Takes down sources and sizes; the sizes of the batch, int64 [documents]."""
        sizes = []
        for source, text in batch:
            _extend_source(self._sources, source, len(self._sizes) + len(sizes))
            sizes.append(len(text.encode("utf-8")))
        self._sizes.extend(sizes)
        return np.array(sizes, "<i8")

    def _open(self) -> None:
        """Opens the files behind what counts in them."""
        documents = sum(line["documents"] for line in self.found)
        ends = {
            "tokens.bin": sum(line["tokens"] for line in self.found) * self._kind.itemsize,
            "lengths.bin": 8 * documents,
            "sizes.bin": 8 * documents,
        }
        for name, end in ends.items():
            self._files[name] = (self._folder / name).open("r+b" if end else "wb")
            self._files[name].truncate(end)
            self._files[name].seek(end)
        # What stays in the journal is written over itself, so a kill here loses nothing.
        path = self._folder / "journal.jsonl"
        journal = self._files[path.name] = path.open("r+b" if path.exists() else "wb")
        for line in [self._head(), *self.found]:
            journal.write(json.dumps(line).encode() + b"\n")
        journal.truncate()
        journal.flush()


def _digest_of(batch: list[tuple[str, str]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for source, text in batch:
        raw = text.encode("utf-8")
        digest.update(b"%s\0%d\0" % (source.encode("utf-8"), len(raw)))
        digest.update(raw)
    return digest.hexdigest()


def _with_first(first, others: Iterator) -> Iterator:
    yield first
    yield from others


_tokenizer = None  # of a worker process


def _start_worker(tokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's process would wait for work for ever where its parent was killed."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _encode_there(texts: list[str]) -> Encoded:
    return _encode(_tokenizer, texts)


def _encode(tokenizer, texts: Sequence[str]) -> Encoded:
    kind = token_type(tokenizer.vocab_size)
    closing = np.array([tokenizer.end_of_text], kind)
    encoded = tokenizer.encode_batch(texts)
    tokens = np.concatenate([part.astype(kind) for ids in encoded for part in (ids, closing)])
    return Encoded(tokens, np.array([len(ids) + 1 for ids in encoded], np.int64))


def _encode_all(batches: Iterator, tokenizer, workers: int) -> Iterator[tuple[list, Encoded]]:
    """(batch, encoded) in the order of the batches; the next ones are read while these are encoded."""
    if workers == 1:
        pool = concurrent.futures.ThreadPoolExecutor(1)

        def submit(texts):
            return pool.submit(_encode, tokenizer, texts)
    else:
        pool = concurrent.futures.ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _start_worker, (tokenizer,)
        )

        def submit(texts):
            return pool.submit(_encode_there, texts)

    with _one_thread_each(workers), pool:
        waiting = collections.deque()
        try:
            for batch in batches:
                waiting.append((batch, submit([text for _, text in batch])))
                while len(waiting) > workers + 1 or (waiting and waiting[0][1].done()):
                    yield _settled(waiting.popleft())
            while waiting:
                yield _settled(waiting.popleft())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _settled(item: tuple[list, concurrent.futures.Future]) -> tuple[list, Encoded]:
    try:
        return item[0], item[1].result()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise FaultError(
            "a process that tokenises has died, perhaps for want of memory: start again with fewer --workers; what "
            "is done is kept"
        ) from error


@contextlib.contextmanager
def _one_thread_each(workers: int) -> Iterator[None]:
    """Workers inherit the environment: each takes one thread, or all of them would take all cores."""
    names = ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS") if workers > 1 else ()
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict(zip(names, ("false", "1"), strict=False)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _batches(documents: Documents) -> Iterator[list[tuple[str, str]]]:
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


def write_meta(folder: Path, tokenizer, starts, sizes, sources: dict, digest, extra: dict) -> None:
    """The last file of a store."""
    meta = {
        "format_version": FORMAT_VERSION,
        "num_tokens": int(starts[-1]),
        "num_documents": len(starts) - 1,
        "num_bytes": int(sum(sizes)),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "tokenizer": {
            "name": tokenizer.name,
            "spec": tokenizer.spec,
            "end_of_text": tokenizer.wanted_end,
            "fingerprint": tokenizer.fingerprint,
        },
        "sources": [
            {"name": source, "first_document": first, "last_document": last}
            for source, (first, last) in sources.items()
        ],
        **extra,
        "fingerprint": digest.hexdigest(),
        "complete": True,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def index_arrays(
    arrays: Sequence[tuple[str, TokenArray]],
    tokenizer,
    path: str | Path,
    progress: bool = True,
    origin: dict | None = None,
) -> TokenStore:
    """A store of (source name, array) that lie elsewhere: only where their documents start is written.

    Each array starts a document, and every end of text closes one. Raises InputError for ids that the tokenizer
    does not have, and for arrays without an end of text. Bytes of text are counted where the tokenizer's ids tell
    them, else by decoding.
    """
    path = Path(path)
    lengths = tokenizer.byte_lengths()
    digest, starts, sizes, sources = hashlib.sha256(), [], [], {}
    before = 0
    with _folder_beside(path, False) as folder:
        total = sum(one.num_tokens for _, one in arrays)
        with tqdm(total=total, unit="token", unit_scale=True, desc=f"indexing {path.name}", delay=2,
                  disable=not progress, dynamic_ncols=True) as bar:  # fmt: skip
            for name, one in arrays:
                tokens = one.map()
                own = _starts_of(tokens, tokenizer, one.path, digest, bar.update)
                sources[name] = (len(starts), len(starts) + len(own) - 1)
                sizes.extend(_sizes_of(tokens, own, tokenizer, lengths))
                starts.extend((own + before).tolist())
                before += len(tokens)
        starts = np.array([*starts, before], "<i8")
        digest.update(starts)
        np.save(folder / "documents.npy", starts)
        np.save(folder / "bytes.npy", np.array(sizes, "<i8"))
        entries = {"arrays": [one.to_json() for _, one in arrays]} | ({"origin": origin} if origin else {})
        write_meta(folder, tokenizer, starts, sizes, sources, digest, entries)
        (folder / "lock").unlink(missing_ok=True)
        return _publish(folder, path)


def _starts_of(tokens: np.ndarray, tokenizer, path: Path, digest, done: Callable[[int], object]) -> np.ndarray:
    """Where the documents of an array start, int64; at least one."""
    found = [np.zeros(1, np.int64)]
    for first in range(0, len(tokens), _SCAN_TOKENS):
        block = np.ascontiguousarray(tokens[first : first + _SCAN_TOKENS])
        digest.update(block)
        lowest, highest = int(block.min()), int(block.max())
        if highest >= tokenizer.vocab_size or lowest < 0:
            wrong = highest if lowest >= 0 else lowest
            place = first + int(np.flatnonzero(block == wrong)[0])
            raise InputError(
                f"{path} has the id {wrong} at token {place}, but {tokenizer.name} has {tokenizer.vocab_size}: "
                "name the tokenizer that the array was made with"
            )
        found.append(first + 1 + np.flatnonzero(block == tokenizer.end_of_text))
        done(len(block))
    starts = np.concatenate(found)
    if len(starts) == 1:
        raise InputError(
            f"{path} has no end of text (id {tokenizer.end_of_text} of {tokenizer.name}): name the tokenizer that "
            "the array was made with, or its end of text with --end_of_text"
        )
    return starts[:-1] if starts[-1] == len(tokens) else starts


def _sizes_of(tokens: np.ndarray, starts: np.ndarray, tokenizer, lengths: np.ndarray | None) -> list[int]:
    """Bytes of text of each document."""
    ends = [*starts[1:].tolist(), len(tokens)]
    if lengths is None:
        spans = zip(starts.tolist(), ends, strict=True)
        return [len(tokenizer.decode(tokens[first:end].tolist()).encode("utf-8")) for first, end in spans]
    sizes, group = [], 1024
    for first in range(0, len(starts), group):
        own = starts[first : first + group]
        end = ends[min(first + group, len(starts)) - 1]
        sizes.extend(np.add.reduceat(lengths[tokens[own[0] : end]], own - own[0], dtype=np.int64).tolist())
    return sizes


def _publish(folder: Path, path: Path) -> TokenStore:
    try:
        os.rename(folder, path)
    except OSError:
        if not is_store(path):
            raise
        # Another process was first. That is welcome if it wrote the same.
        ours, theirs = read_meta(folder)["fingerprint"], json.loads((path / "meta.json").read_text())["fingerprint"]
        if theirs != ours:
            raise InputError(
                f"{path} holds a store with another content ({theirs[:16]}, this one "
                f"is {ours[:16]}): choose another path or remove it"
            ) from None
        shutil.rmtree(folder, ignore_errors=True)
    return TokenStore.open(path)
