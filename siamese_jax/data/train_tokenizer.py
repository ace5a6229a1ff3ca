"""Trains a byte-level BPE on a corpus, with the `tokenizers` library."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from siamese_jax.data.sources import Reading
from siamese_jax.errors import FaultError, InputError

END_OF_TEXT = "<|endoftext|>"
LEAST = 257  # the bytes and the end of text


def check_size(size: int) -> None:
    """InputError for a vocabulary that cannot hold the bytes."""
    if size < LEAST:
        raise InputError(f"--train_tokenizer is {size}: the bytes and the end of text alone are {LEAST}")


def train_tokenizer(
    corpus, field: str, size: int, path: Path, record: Path, trained_on: dict, say: Callable[[str], None]
) -> None:
    """Writes a tokenizer.json of at most `size` tokens, <|endoftext|> the first of them, whole or not at all.

    Any text can be encoded: all bytes are tokens. Before it, `record` gets what it is `trained_on`. Raises
    InputError for a size below these and a folder that cannot be written to, FaultError where the disk is full.
    """
    check_size(size)
    marks = {record: json.dumps(trained_on, indent=1)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(marks, rename=False)  # what cannot be written is said before the work
    except OSError as error:
        raise InputError(f"cannot write {record}: {error.strerror}: choose another --out") from error
    say(f"training a tokenizer of {size:,} tokens")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )  # fmt: skip
    tokenizer.train_from_iterator((text for _, text in corpus.documents(field, Reading())), trainer)
    try:
        _write(marks | {path: tokenizer.to_str(pretty=True)})
    except OSError as error:
        raise FaultError(f"cannot write {path}: {error.strerror}: free space or choose another --out") from error


def _write(texts: dict[Path, str], rename: bool = True) -> None:
    """Writes files beside their places, then renames them in this order; rename False: only tries to write."""
    beside = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in texts}
    try:
        for path, text in texts.items():
            beside[path].write_text(text, encoding="utf-8")
        for path in texts if rename else ():
            beside[path].replace(path)
    finally:
        for path in beside.values():
            path.unlink(missing_ok=True)
