"""Indexes arrays of tokens that others wrote: a store that says where they lie and where documents start."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from siamese_jax.data.store import TokenStore
from siamese_jax.data.token_arrays import TokenArray
from siamese_jax.data.writing import folder_beside, place_of, publish, write_meta
from siamese_jax.errors import InputError

_SCAN_TOKENS = 1 << 24


def index_arrays(
    arrays: Sequence[tuple[str, TokenArray]],
    tokenizer,
    path: str | Path,
    progress: bool = True,
    origin: dict | None = None,
    whole: bool = True,
) -> TokenStore:
    """A store of (source name, array) that lie elsewhere: only where their documents start is written.

    Each array starts a document, and every end of text closes one. Raises InputError for ids that the tokenizer
    does not have, and where there is nothing but ends of text or, of whole arrays, none. Bytes are those of the
    decoded text (with the blank in front that some tokenizers add), from the lengths of ids where these tell them.
    """
    path = place_of(path)
    lengths = tokenizer.byte_lengths()
    digest, starts, sizes, sources = hashlib.sha256(), [], [], {}
    before, documents, closed = 0, 0, 0
    with folder_beside(path, False) as folder:
        total = sum(one.num_tokens for _, one in arrays)
        # Every token is looked at twice: for the ends of text, and for the bytes that it stands for.
        with tqdm(total=2 * total, unit="token", unit_scale=True, desc=f"indexing {path.name}", delay=2,
                  disable=not progress, dynamic_ncols=True) as bar:  # fmt: skip
            for name, one in arrays:
                tokens = one.map()
                own, ends = _starts_of(tokens, tokenizer, one.path, digest, bar.update)
                sources[name] = (documents, documents + len(own) - 1)
                sizes.append(_sizes_of(tokens, own, tokenizer, lengths, bar.update))
                starts.append(own + before)
                before, documents, closed = before + len(tokens), documents + len(own), closed + ends
        names = [str(one.path) for _, one in arrays]
        _check_text(names, tokenizer, closed or not whole, sum(int(part.sum()) for part in sizes))
        starts, sizes = np.concatenate([*starts, [before]]).astype("<i8"), np.concatenate(sizes).astype("<i8")
        digest.update(starts)
        np.save(folder / "documents.npy", starts)
        np.save(folder / "bytes.npy", sizes)
        entries = {"arrays": [one.to_json() for _, one in arrays]} | ({"origin": origin} if origin else {})
        write_meta(folder, tokenizer, starts, sizes, sources, digest, entries)
        return publish(folder, path)


def _check_text(names: Sequence[str], tokenizer, closed: bool, num_bytes: int) -> None:
    where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    if not closed:
        raise InputError(
            f"{where} has no end of text (id {tokenizer.end_of_text} of {tokenizer.name}): name the tokenizer that "
            "the array was made with, or its end of text with --end_of_text"
        )
    if not num_bytes:
        raise InputError(f"{where} holds nothing but ends of text: name arrays with text")


def _starts_of(
    tokens: np.ndarray, tokenizer, path: Path, digest, done: Callable[[int], object]
) -> tuple[np.ndarray, int]:
    """(where the documents of an array start, int64, at least one; how many ends of text it has)."""
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
    return starts[:-1] if starts[-1] == len(tokens) else starts, len(starts) - 1


def _sizes_of(
    tokens: np.ndarray, starts: np.ndarray, tokenizer, lengths: np.ndarray | None, done: Callable[[int], object]
) -> np.ndarray:
    """Bytes of text of each document, int64."""
    ends = np.append(starts[1:], len(tokens))
    sizes, group = np.zeros(len(starts), np.int64), 1024
    for first in range(0, len(starts), group):
        own, stop = starts[first : first + group], ends[first : first + group]
        if lengths is None:
            spans = zip(own.tolist(), stop.tolist(), strict=True)
            texts = (tokenizer.decode(tokens[a:b].tolist()) for a, b in spans)
            sizes[first : first + group] = [len(text.encode("utf-8")) for text in texts]
        else:
            spelt = lengths[tokens[own[0] : stop[-1]]]
            sizes[first : first + group] = np.add.reduceat(spelt, own - own[0], dtype=np.int64)
        done(int(stop[-1] - own[0]))
    return sizes
