"""How a token store comes to its place: written beside it, locked, and renamed when it is whole."""

import contextlib
import fcntl
import glob
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from siamese_jax.data.store import FORMAT_VERSION, TokenStore, is_store, partial_of, read_meta
from siamese_jax.data.tokenizer import absolute_spec
from siamese_jax.errors import FaultError, InputError

JOURNAL, LENGTHS, LOCK = "journal.jsonl", "lengths.bin", "lock"
_UNFINISHED = (JOURNAL, LENGTHS, LOCK)
_LEFTOVER_SECONDS = 24 * 3600


def place_of(path: str | Path) -> Path:
    """Where a store that is called path comes to lie; InputError where it could not be renamed to that."""
    path = Path(os.path.realpath(path))
    if path.exists() and not (path.is_dir() and (is_store(path) or not any(path.iterdir()))):
        raise InputError(f"{path} exists and is not a token store: choose another path or remove it")
    for kind, is_one in (("the current folder", path == Path.cwd()), ("a mount point", os.path.ismount(path))):
        if is_one:
            raise InputError(f"{path} is {kind}, which a store cannot replace: name a folder in it")
    return path


@contextlib.contextmanager
def folder_beside(path: Path, resume: bool) -> Iterator[Path]:
    """A folder to write a store in, removed at the end unless its work can go on; a full disk is one line."""
    folder = partial_of(path) if resume else path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    sweep(path.parent, f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}.tmp")
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
                journal = folder / JOURNAL
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


def read_journal(folder: Path) -> list[dict]:
    """The lines of an unfinished store, the head of its journal first; none where it has none or a broken one."""
    try:
        return [json.loads(line) for line in (folder / JOURNAL).read_bytes().split(b"\n")[:-1]]
    except (OSError, ValueError):
        return []


def check_begun(folder: Path, **expected) -> None:
    """InputError where the work in an unfinished store is of another tokenizer or origin than expected."""
    head, *done = read_journal(folder) or [{}]
    for name, value in expected.items():
        if done and head.get(name) != value:
            what = "tokenizer" if name == "tokenizer" else "source, files or options"
            raise InputError(
                f"{folder} was begun with another {what} than now: finish it with the command that began it, "
                "remove it, or choose another --out"
            )


@contextlib.contextmanager
def _locked(folder: Path, path: Path) -> Iterator[None]:
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another process prepares {path}: wait for it, or choose another folder") from error
        yield


def write_meta(folder: Path, tokenizer, starts, sizes, sources: dict, digest, extra: dict) -> None:
    """The last file of a store."""
    meta = {
        "format_version": FORMAT_VERSION,
        "num_tokens": int(starts[-1]),
        "num_documents": len(starts) - 1,
        "num_bytes": int(np.sum(sizes)),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "tokenizer": {
            "name": tokenizer.name,
            "spec": absolute_spec(tokenizer.spec),
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


def publish(folder: Path, path: Path) -> TokenStore:
    """The store at path, which a whole one in folder becomes.

    What an interrupted call would need goes last: before the rename it can go on, afterwards it has nothing to do.
    """
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
    tidy(path)
    return TokenStore.open(path)


def tidy(path: Path) -> None:
    """Removes what only an unfinished store needs from a finished one."""
    for name in _UNFINISHED:
        (path / name).unlink(missing_ok=True)


def sweep(folder: Path, pattern: str) -> None:
    """Removes what killed preparations left behind a day ago or longer."""
    for leftover in folder.glob(pattern):
        try:
            changed = max(item.stat().st_mtime for item in (leftover, *leftover.iterdir()))
        except OSError:  # its owner has just finished
            continue
        if time.time() - changed > _LEFTOVER_SECONDS and not _is_locked(leftover):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_locked(folder: Path) -> bool:
    try:
        with (folder / LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
