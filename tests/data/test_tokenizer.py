"""Tokenizers: bytes by hand, and files made here by the `tokenizers` library."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from siamese_jax.data.tokenizer import END_OF_TEXT_NAMES, ByteTokenizer, FileTokenizer, make_tokenizer

TEXTS = [
    "the cat sat on the mat",
    "",
    "Grüße, \U0001d54aiamese cats: the mat",
    "<|endoftext|> is written here",
]


def train(path, special=("<pad>", "<|endoftext|>"), prepare=None):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat " * 20], trainer)
    if prepare:
        prepare(tokenizer)
    tokenizer.save(str(path))
    return tokenizer


def test_bytes():
    tokenizer = make_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.name) == (257, 256, "bytes")
    ids = tokenizer.encode_batch(["aß", ""])
    assert [part.tolist() for part in ids] == [[97, 195, 159], []]
    assert all(part.dtype == np.int32 for part in ids)
    assert tokenizer.decode(np.array([97, 195, 159, 256, 300])) == "aß"
    assert tokenizer.decode([97, 195]) == "a\ufffd"


def test_file_round_trip(tmp_path):
    reference = train(tmp_path / "t.json")
    tokenizer = make_tokenizer(str(tmp_path / "t.json"))
    ids = tokenizer.encode_batch(TEXTS)
    assert [tokenizer.decode(part) for part in ids] == TEXTS
    assert all(part.dtype == np.int32 for part in ids)
    assert ids[0].tolist() == reference.encode(TEXTS[0]).ids
    assert tokenizer.name == "t.json"
    assert tokenizer.vocab_size == 1 + max(reference.get_vocab().values())
    assert tokenizer.end_of_text == reference.token_to_id("<|endoftext|>") == 1
    assert tokenizer.decode([*ids[0], 1, 99_999]) == TEXTS[0]


def test_text_cannot_forge_an_end_of_text(tmp_path):
    reference = train(tmp_path / "t.json")
    assert 1 in reference.encode(TEXTS[3]).ids  # what the library does by itself
    assert 1 not in FileTokenizer(tmp_path / "t.json").encode_batch(TEXTS)[3]


def test_settings_of_the_file_do_not_change_texts(tmp_path):
    def meddle(tokenizer):
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=64)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 1)]
        )

    meddled = train(tmp_path / "meddled.json", prepare=meddle).encode(TEXTS[0]).ids
    assert len(meddled) == 64 and meddled[0] == 1  # what the file asks for
    train(tmp_path / "plain.json")
    ours, plain = (FileTokenizer(tmp_path / name).encode_batch(TEXTS) for name in ("meddled.json", "plain.json"))
    assert [part.tolist() for part in ours] == [part.tolist() for part in plain]


def test_vocab_size_counts_the_largest_id(tmp_path):
    train(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    content["model"]["vocab"]["sat"] = 1000
    (tmp_path / "t.json").write_text(json.dumps(content))
    tokenizer = FileTokenizer(tmp_path / "t.json")
    assert tokenizer.vocab_size == 1001
    assert tokenizer.encode_batch(["sat"])[0].tolist() == [1000]


@pytest.mark.parametrize("name", END_OF_TEXT_NAMES)
def test_end_of_text_is_found(tmp_path, name):
    train(tmp_path / "t.json", special=("<pad>", "<other>", name))
    assert FileTokenizer(tmp_path / "t.json").end_of_text == 2
    assert FileTokenizer(tmp_path / "t.json", "<other>").end_of_text == 1


def test_fingerprint_follows_content(tmp_path):
    train(tmp_path / "a.json")
    train(tmp_path / "b.json")
    train(tmp_path / "c.json", special=("<|endoftext|>", "<pad>"))
    a, b, c = (FileTokenizer(tmp_path / f"{name}.json").fingerprint for name in "abc")
    assert a == b
    other_end = FileTokenizer(tmp_path / "a.json", "<pad>").fingerprint
    assert len({a, c, other_end, ByteTokenizer().fingerprint}) == 4
    assert int(a, 16) and len(a) == 16


def test_no_end_of_text(tmp_path, refuses):
    train(tmp_path / "t.json", special=("<pad>",))
    with refuses("t.json", "end-of-text", *END_OF_TEXT_NAMES):
        FileTokenizer(tmp_path / "t.json")
    with refuses("t.json", "end-of-text", "tried <end>"):
        FileTokenizer(tmp_path / "t.json", "<end>")


def test_files_that_are_no_tokenizer(tmp_path, refuses):
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "b.bpe").write_bytes(b"\x0a\xff\0binary")
    with refuses("missing.json", "does not exist", "'bytes'"):
        make_tokenizer(str(tmp_path / "missing.json"))
    with refuses(tmp_path, "folder", "tokenizer.json"):
        make_tokenizer(str(tmp_path))
    for name in ("a.json", "b.bpe"):
        with refuses(name, "not a tokenizer file", "tokenizers"):
            make_tokenizer(str(tmp_path / name))


def test_bytes_have_their_own_end_of_text(refuses):
    with refuses("'bytes'", "256", "'</s>'"):
        make_tokenizer("bytes", "</s>")
