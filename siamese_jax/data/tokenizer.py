"""Text to token ids and back: plain bytes, or a tokenizer of the Hugging Face `tokenizers` library, SentencePiece
or tiktoken.

All classes have the attributes name, spec, wanted_end, vocab_size, end_of_text and fingerprint and the methods
encode_batch, decode and byte_lengths, and can be sent to another process.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from siamese_jax.errors import InputError

END_OF_TEXT_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a text."""

    name = spec = "bytes"
    wanted_end = ""  # what was asked for as end of text
    vocab_size = 257
    end_of_text = 256
    fingerprint = hashlib.sha256(b"UTF-8 bytes, 256 = end of text").hexdigest()[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text: int32 [number of its bytes], without an end of text."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; broken UTF-8 becomes U+FFFD, ids that are not bytes vanish."""
        return bytes(token for token in map(int, ids) if 0 <= token < 256).decode("utf-8", errors="replace")

    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes that each id stands for, int32 [vocab_size]; the end of text stands for none."""
        return np.array([1] * 256 + [0], np.int32)


class FileTokenizer:
    """A `tokenizers` JSON file.

    end_of_text: the token that closes a document; '' takes the first of END_OF_TEXT_NAMES that the file
    knows. vocab_size is 1 + the largest id, added tokens included. The fingerprint covers the file and the
    end of text. Raises InputError where the file cannot be read as a tokenizer or does not know the end of
    text.
    """

    def __init__(self, path: str | Path, end_of_text: str = ""):
        path = Path(os.path.expanduser(path))
        content = read_tokenizer_file(path)
        self.name, self.spec = path.name, str(path)
        self.wanted_end = end_of_text
        self._tokenizer = _parse(content, path)
        # A file may ask to cut or pad every text to a length, and reads '<|endoftext|>' written out in a text
        # as the token itself. Neither is wanted of a corpus.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        closing = _find_end_of_text(vocabulary, end_of_text, path)
        self.vocab_size = 1 + max(vocabulary.values())
        self.end_of_text = vocabulary[closing]
        self.fingerprint = hashlib.sha256(content + b"\0" + closing.encode("utf-8")).hexdigest()[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, int32 [number of its tokens]; no special token is added or recognised."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; the end of text and ids beyond the vocabulary vanish."""
        known = (token for token in map(int, ids) if 0 <= token < self.vocab_size)
        kept = [token for token in known if token != self.end_of_text]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def byte_lengths(self) -> np.ndarray | None:
        """UTF-8 bytes that each id stands for, int32 [vocab_size]; None where that is not the same everywhere."""
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            return None
        # A character of a byte-level token stands for a byte; added tokens are plain text.
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[number] = len(token)
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            lengths[number] = len(token.content.encode("utf-8"))
        lengths[self.end_of_text] = 0
        return lengths

    def __reduce__(self):
        return FileTokenizer, (self.spec, self.wanted_end)


def make_tokenizer(spec: str, end_of_text: str = ""):
    """The tokenizer of a configuration; InputError for one that cannot be had.

    spec: 'bytes', a tokenizer.json of the `tokenizers` library, a .model of SentencePiece, or 'tiktoken:ENCODING'.
    """
    if spec.startswith("tiktoken:") or spec.endswith(".model"):
        from siamese_jax.data import foreign_tokenizers as foreign

        make = foreign.TiktokenTokenizer if spec.startswith("tiktoken:") else foreign.SentencePieceTokenizer
        return make(spec, end_of_text)
    if spec != "bytes":
        return FileTokenizer(spec, end_of_text)
    if end_of_text:
        raise InputError(
            f"the tokenizer 'bytes' has its own end of text (id 256), but '{end_of_text}' was "
            "given: leave the end of text empty"
        )
    return ByteTokenizer()


def absolute_spec(spec: str) -> str:
    """The same tokenizer, named so that it is found from any folder."""
    return spec if spec == "bytes" or spec.startswith("tiktoken:") else os.path.abspath(os.path.expanduser(spec))


def read_tokenizer_file(path: Path) -> bytes:
    """The content of a tokenizer's file; InputError where there is none."""
    if path.is_dir():
        raise InputError(f"the tokenizer {path} is a folder: name the tokenizer.json in it")
    if not path.exists():
        raise InputError(
            f"the tokenizer {path} does not exist (looked in {Path.cwd()}): use 'bytes' or the path of a "
            "tokenizer.json, or train one:  python -m siamese_jax.data.prepare --source=SOURCE "
            f"--train_tokenizer=SIZE --out={path.parent}"
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the tokenizer {path}: {error.strerror}: check its permissions") from error


def _parse(content: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception and ValueError
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path} is not a tokenizer file of the Hugging Face 'tokenizers' library "
            f"({reason}): name a tokenizer.json"
        ) from error


def _find_end_of_text(vocabulary: dict[str, int], wanted: str, path: Path) -> str:
    tried = (wanted,) if wanted else END_OF_TEXT_NAMES
    found = next((token for token in tried if token in vocabulary), None)
    if found is None:
        raise InputError(
            f"{path} has no end-of-text token; tried {', '.join(tried)}: give the name of the "
            "token that closes a document in this vocabulary"
        )
    return found
