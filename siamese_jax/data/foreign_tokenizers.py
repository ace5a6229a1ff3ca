"""Tokenizers of SentencePiece and tiktoken, where these are installed; see `tokenizer` for what all share."""

import hashlib
import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from siamese_jax.data.tokenizer import END_OF_TEXT_NAMES, read_tokenizer_file
from siamese_jax.errors import InputError


class SentencePieceTokenizer:
    """A .model file of SentencePiece.

    end_of_text: the piece that closes a document; '' takes the model's own end of sentence. InputError where the
    file is none, the library is not installed or the piece is unknown.
    """

    def __init__(self, path: str | Path, end_of_text: str = ""):
        _need("sentencepiece", path)
        import sentencepiece

        path = Path(os.path.expanduser(path))
        content = read_tokenizer_file(path)
        self.name, self.spec, self.wanted_end = path.name, str(path), end_of_text
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except Exception as error:  # the library raises bare RuntimeError
            reason = " ".join(str(error).split())[:90]
            raise InputError(f"{path} is not a model of SentencePiece ({reason}): name another file") from error
        self.vocab_size = self._model.vocab_size()
        closing = self._model.piece_to_id(end_of_text) if end_of_text else self._model.eos_id()
        if closing < 0 or (end_of_text and self._model.id_to_piece(closing) != end_of_text):
            raise InputError(
                f"{path} has no piece {end_of_text or 'for the end of a sentence'}: set data.end_of_text"
            )
        self.end_of_text = closing
        self.fingerprint = hashlib.sha256(content + b"\0%d" % closing).hexdigest()[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, int32 [number of its tokens]; no special piece is added."""
        return [np.array(ids, np.int32) for ids in self._model.encode(list(texts), add_bos=False, add_eos=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; the end of text and ids beyond the vocabulary vanish."""
        known = (token for token in map(int, ids) if 0 <= token < self.vocab_size)
        return self._model.decode([token for token in known if token != self.end_of_text])

    def byte_lengths(self) -> None:
        """None: a piece at the start of a text stands for a byte less than elsewhere."""
        return None

    def __reduce__(self):
        return SentencePieceTokenizer, (self.spec, self.wanted_end)


class TiktokenTokenizer:
    """'tiktoken:ENCODING', such as tiktoken:cl100k_base; end_of_text: '' takes <|endoftext|>."""

    def __init__(self, spec: str, end_of_text: str = ""):
        _need("tiktoken", spec)
        import tiktoken

        encoding = spec.removeprefix("tiktoken:")
        self.name = self.spec = spec
        self.wanted_end = end_of_text
        known = tiktoken.list_encoding_names()
        if encoding not in known:
            raise InputError(f"tiktoken has no encoding {encoding!r}: it has {', '.join(known)}")
        try:
            self._encoding = tiktoken.get_encoding(encoding)
        except Exception as error:  # of the network, where the file is not there yet
            reason = " ".join(str(error).split())[:60]
            raise InputError(
                f"{spec} cannot be loaded ({type(error).__name__}: {reason}): connect once, or set "
                "TIKTOKEN_CACHE_DIR to a folder that holds its file"
            ) from error
        special = self._encoding._special_tokens
        wanted = (end_of_text,) if end_of_text else END_OF_TEXT_NAMES
        found = next((name for name in wanted if name in special), None)
        if found is None:
            raise InputError(
                f"{spec} has no token {', '.join(wanted)}; it has {', '.join(special)}: set data.end_of_text"
            )
        self.end_of_text, self.vocab_size = special[found], self._encoding.n_vocab
        digest = hashlib.sha256(f"{encoding} {self.end_of_text} {self.vocab_size}".encode())
        for token, number in sorted(self._encoding._mergeable_ranks.items()):
            digest.update(b"%d:%d:" % (len(token), number) + token)
        self.fingerprint = digest.hexdigest()[:16]
        self._byte_lengths = self._measure()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, int32 [number of its tokens]; no special token is added or recognised."""
        return [np.array(ids, np.int32) for ids in self._encoding.encode_ordinary_batch(list(texts))]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; the end of text and ids without a token vanish."""
        known = (token for token in map(int, ids) if 0 <= token < self.vocab_size)
        kept = [token for token in known if self._byte_lengths[token]]
        return self._encoding.decode(kept)

    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes that each id stands for, int32 [vocab_size]; none the end of text and ids without a token."""
        return self._byte_lengths

    def _measure(self) -> np.ndarray:
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, number in self._encoding._mergeable_ranks.items():
            lengths[number] = len(token)
        for token, number in self._encoding._special_tokens.items():
            lengths[number] = len(token.encode("utf-8"))
        lengths[self.end_of_text] = 0
        return lengths

    def __reduce__(self):
        return TiktokenTokenizer, (self.spec, self.wanted_end)


def _need(package: str, spec) -> None:
    if importlib.util.find_spec(package) is None:
        raise InputError(f"the tokenizer {spec} needs  pip install {package}")
