"""What the data tests share: a check of error messages and small stores with known documents."""

import contextlib

import pytest

from siamese_jax.data.build import build_store
from siamese_jax.data.tokenizer import ByteTokenizer
from siamese_jax.errors import InputError

TEXTS = ("ab", "cdefg", "", "h", "ijklmnop")  # 16 bytes, 21 tokens with their ends of text


@pytest.fixture
def refuses(tmp_path):
    """A context in which InputError must be raised, in one line that holds every given word."""

    @contextlib.contextmanager
    def check(*words):
        with pytest.raises(InputError) as caught:
            yield
        # The temporary folder bears the name of the test, and so words that a message must say itself.
        message, *words = (str(text).replace(str(tmp_path), "FOLDER") for text in (caught.value, *words))
        assert "\n" not in message
        for word in words:
            assert word in message, f"{word!r} is not in: {message}"

    return check


@pytest.fixture
def make_store(tmp_path):
    """Builds a byte-level store of the given texts, each its own source."""

    def make(texts=TEXTS, name="store"):
        documents = [(f"source{number}", text) for number, text in enumerate(texts)]
        return build_store(documents, ByteTokenizer(), tmp_path / name, progress=False)

    return make
