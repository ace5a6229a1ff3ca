"""Writes token stores: tokenises documents, in several processes if wanted.

The same documents and tokenizer give the same bytes, whatever the number of processes and however often the work
was interrupted.
"""

import array
import collections
import concurrent.futures
import concurrent.futures.process
import contextlib
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from siamese_jax.data.sources import Reading
from siamese_jax.data.store import FORMAT_VERSION, TokenStore, token_type
from siamese_jax.data.writing import (
    JOURNAL,
    LENGTHS,
    check_begun,
    folder_beside,
    place_of,
    publish,
    read_journal,
    write_meta,
)
from siamese_jax.errors import FaultError, InputError

Documents = Iterable[tuple[str, str]]

TOKENS = "tokens.bin"
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 4096


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
    path, reading = place_of(path), reading or Reading()
    with folder_beside(path, resume) as folder:
        bar = Progress(path.name, progress, reading, total, unit)
        with bar.bar, Writer(folder, tokenizer, origin) as writer:
            writer.take(_batches(documents), workers, bar)
            writer.finish(path.name, ({"duplicates": reading.duplicates}) | ({"origin": origin} if origin else {}))
        return publish(folder, path)


class Writer:
    """Appends batches to a folder, with a journal of what is complete in it; goes on with an earlier one's work.

    A batch counts when its line is in the journal. Before it goes on, everything that counts is checked: the tokens
    by their checksums, the documents by the digests of their texts. InputError for work of another tokenizer or
    origin, which is not written over.
    """

    def __init__(self, folder: Path, tokenizer, origin: dict | None = None):
        self._folder, self._tokenizer = folder, tokenizer
        self._origin = json.loads(json.dumps(origin))  # as the journal gives it back
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
            block, lengths = encoded.tokens.astype(self._kind, copy=False), encoded.lengths.astype("<i8")
            self._lengths.frombytes(lengths.tobytes())
            self._digest.update(block)
            line = {
                "texts": _digest_of(batch), "tokens": len(block), "documents": len(batch),
                "crc": zlib.crc32(lengths, zlib.crc32(block)),
            }  # fmt: skip
            for name, values in (
                (TOKENS, block), (LENGTHS, lengths), (JOURNAL, json.dumps(line).encode() + b"\n"),
            ):  # fmt: skip
                self._files[name].write(values)
                self._files[name].flush()
            bar.add(int(sizes.sum()))

    def finish(self, name: str, extra: dict) -> None:
        """Completes the folder; extra: more for meta.json."""
        if not sum(self._sizes):
            (self._folder / JOURNAL).unlink(missing_ok=True)  # there is nothing that could go on
            raise InputError(
                f"the corpus for {name} is empty ({len(self._sizes)} documents, 0 bytes of text): give it text"
            )
        starts = np.concatenate([[0], np.cumsum(self._lengths)]).astype("<i8")
        self._digest.update(starts)
        np.save(self._folder / "documents.npy", starts)
        np.save(self._folder / "bytes.npy", np.array(self._sizes, "<i8"))
        write_meta(self._folder, self._tokenizer, starts, self._sizes, self._sources, self._digest, extra)

    def _found(self) -> list[dict]:
        """Lines of the journal whose data are there and whole."""
        check_begun(self._folder, tokenizer=self._tokenizer.fingerprint, origin=self._origin)
        head, *lines = read_journal(self._folder) or [None]
        if head != self._head():
            return []
        sound = []
        with contextlib.suppress(OSError), self._read(TOKENS) as tokens, self._read(LENGTHS) as lengths:
            for line in lines:
                block = tokens.read(line["tokens"] * self._kind.itemsize)
                if zlib.crc32(lengths.read(8 * line["documents"]), zlib.crc32(block)) != line["crc"]:
                    break
                sound.append(line)
        return sound

    def _read(self, name: str):
        return (self._folder / name).open("rb")

    def _head(self) -> dict:
        return {
            "format_version": FORMAT_VERSION, "tokenizer": self._tokenizer.fingerprint, "origin": self._origin,
            "batch": [_BATCH_CHARACTERS, _BATCH_DOCUMENTS],
        }  # fmt: skip

    def _skip(self, batches: Iterator, bar: Progress) -> Iterator:
        """The batches that are still to be tokenised; what is known of the others is taken over."""
        found, self.found = self.found, []
        if not found:
            return batches
        kept = 0
        with self._read(LENGTHS) as lengths, self._read(TOKENS) as tokens:
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
        ends = {
            TOKENS: sum(line["tokens"] for line in self.found) * self._kind.itemsize,
            LENGTHS: 8 * sum(line["documents"] for line in self.found),
        }
        for name, end in ends.items():
            self._files[name] = (self._folder / name).open("r+b" if end else "wb")
            self._files[name].truncate(end)
            self._files[name].seek(end)
        # What stays in the journal is written over itself, so a kill here loses nothing.
        path = self._folder / JOURNAL
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
