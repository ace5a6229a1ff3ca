"""SentencePiece and tiktoken: texts there and back, bytes of ids, other processes, and what cannot be had."""

import importlib.util
import pickle

import numpy as np
import pytest

from siamese_jax.data.build import build_store
from siamese_jax.data.tokenizer import ByteTokenizer, FileTokenizer, make_tokenizer

TEXTS = ["the state of the union", "Straße und Wörter", "", "  two  blanks, 日本 <|endoftext|> </s>"]


@pytest.fixture(scope="module")
def piece_model(tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("piece")
    (folder / "text.txt").write_text(
        "\n".join(["the state of the union is strong"] * 50 + ["Straße und Wörter"] * 50)
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "own"), vocab_size=300, byte_fallback=True,
        character_coverage=1.0, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return folder / "own.model"


@pytest.fixture
def small_encoding(monkeypatch):
    """tiktoken's cl100k_base with bytes and three merges in place of its own tokens, which would be downloaded."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" s": 258}
    encoding = tiktoken.Encoding(
        "cl100k_base", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 260}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    return make_tokenizer("tiktoken:cl100k_base")


def test_sentencepiece(piece_model, tmp_path):
    tokenizer = make_tokenizer(str(piece_model))
    encoded = tokenizer.encode_batch(TEXTS)
    assert [ids.dtype for ids in encoded] == [np.int32] * 4
    assert [tokenizer.decode([*ids, tokenizer.end_of_text, 10**6]) for ids in encoded[:3]] == TEXTS[:3]
    assert all(tokenizer.end_of_text not in ids for ids in encoded)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode_batch(TEXTS)[0].tolist() == encoded[0].tolist()
    store = build_store((("a", text) for text in TEXTS), tokenizer, tmp_path / "s", False, workers=2)
    assert store.num_tokens == sum(map(len, encoded)) + 4
    other = make_tokenizer(str(piece_model), "<s>")
    assert other.end_of_text != tokenizer.end_of_text and other.fingerprint != tokenizer.fingerprint


def test_tiktoken(small_encoding):
    tokenizer = small_encoding
    encoded = tokenizer.encode_batch(TEXTS)
    assert encoded[0][0] == 257 and (tokenizer.vocab_size, tokenizer.end_of_text) == (261, 260)
    assert [tokenizer.decode([*ids, 260, 259, 10**6]) for ids in encoded] == TEXTS  # 259 is no token
    lengths = tokenizer.byte_lengths()
    assert [int(lengths[ids].sum()) for ids in encoded] == [len(text.encode()) for text in TEXTS]
    assert lengths[[256, 257, 259, 260]].tolist() == [2, 3, 0, 0]


def test_bytes_of_ids_are_those_of_the_text(tmp_path):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    own = tokenizers.Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own.train_from_iterator(TEXTS * 9, trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ))  # fmt: skip
    own.save(str(tmp_path / "own.json"))
    for tokenizer in (ByteTokenizer(), FileTokenizer(tmp_path / "own.json")):
        lengths = tokenizer.byte_lengths()
        for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
            assert lengths[ids].sum() == len(text.encode())
        assert lengths[tokenizer.end_of_text] == 0
        assert pickle.loads(pickle.dumps(tokenizer)).fingerprint == tokenizer.fingerprint


def test_what_cannot_be_had(piece_model, tmp_path, refuses, monkeypatch):
    (tmp_path / "broken.model").write_bytes(b"no model")
    with refuses(tmp_path / "broken.model", "not a model of SentencePiece"):
        make_tokenizer(str(tmp_path / "broken.model"))
    with refuses("does not exist", "--train_tokenizer=SIZE"):
        make_tokenizer(str(tmp_path / "nothing.model"))
    with refuses(piece_model, "no piece <nothing>"):
        make_tokenizer(str(piece_model), "<nothing>")
    with refuses("no encoding 'nothing'", "cl100k_base"):
        make_tokenizer("tiktoken:nothing")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tiktoken.load.read_file", lambda url: (_ for _ in ()).throw(ConnectionError("no network")))
    with refuses("cannot be loaded", "ConnectionError", "TIKTOKEN_CACHE_DIR"):
        make_tokenizer("tiktoken:p50k_edit")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for spec, package in (("tiktoken:cl100k_base", "tiktoken"), (str(piece_model), "sentencepiece")):
        with refuses(f"pip install {package}"):
            make_tokenizer(spec)


def test_no_token_for_the_end_of_text(small_encoding, refuses):
    with refuses("tiktoken:cl100k_base", "no token <x>", "<|endoftext|>"):
        make_tokenizer("tiktoken:cl100k_base", "<x>")
