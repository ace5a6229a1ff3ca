"""Text of TFDS: read from prepared files, parted by its own splits, and said at once where it is not there."""

import os
import time

import numpy as np
import pytest

from siamese_jax.config import base_config
from siamese_jax.data.prepared import open_domains, open_sources, own_part, prepare_store
from siamese_jax.data.sources import Reading, find_corpus
from siamese_jax.data.tokenizer import ByteTokenizer

tfds = pytest.importorskip("tensorflow_datasets")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds_text")

    def make(name, splits, features, example):
        def examples(numbers):
            yield from ((number, example(number)) for number in numbers)

        class Made(tfds.core.GeneratorBasedBuilder):
            """A data set."""

            VERSION = tfds.core.Version("1.0.0")

            def _info(self):
                return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

            def _split_generators(self, manager):
                return {split: examples(numbers) for split, numbers in splits.items()}

            def _generate_examples(self):
                raise NotImplementedError

        Made.name = name
        Made(data_dir=folder, file_format="array_record").download_and_prepare()

    pair = tfds.features.Tensor(shape=(2,), dtype=np.int64)
    text = {"text": tfds.features.Text(), "id": tfds.features.Scalar(dtype=np.int64), "pair": pair}
    with tfds.core.registered.skip_registration():
        spell = lambda i: {"text": f"text {i} ß", "id": i, "pair": [i, i]}  # noqa: E731
        make("parted_text", {"train": range(300), "test": range(300, 310)}, text, spell)
        make("single_text", {"train": range(40)}, text, spell)
    return folder


def documents(source, split, folder, field="text", **options):
    return [text for _, text in find_corpus(source, split, data_dir=str(folder), **options).documents(field)]


def test_own_splits_are_the_parts(prepared):
    train, validation = (documents("tfds:parted_text", split, prepared) for split in ("train", "validation"))
    assert sorted(train) == sorted(f"text {i} ß" for i in range(300))
    assert sorted(validation) == sorted(f"text {i} ß" for i in range(300, 310))
    assert len(documents("tfds:parted_text", "all", prepared)) == 310
    folder = prepared / "parted_text" / "1.0.0"
    assert documents(str(folder), "validation", "") == validation
    assert own_part("tfds:parted_text") == own_part(str(folder)) == "validation"


def test_a_split_can_be_named(prepared):
    assert len(documents("tfds:parted_text:train[:10%]", "all", prepared)) == 30
    assert len(documents("tfds:parted_text:train+test", "all", prepared)) == 310
    train, validation = (documents("tfds:single_text", split, prepared) for split in ("train", "validation"))
    assert train and validation and len(train) + len(validation) == 40 and not set(train) & set(validation)
    assert validation == documents("tfds:single_text:train", "validation", prepared)


def test_a_store_is_made_of_it_once(prepared, tmp_path):
    options = {"tokenizer": ByteTokenizer(), "cache_dir": tmp_path, "data_dir": str(prepared), "progress": False}
    store = prepare_store("tfds:parted_text", "train", **options)
    assert store.num_documents == 300 and list(store.sources) == ["tfds:parted_text train"]
    assert prepare_store("tfds:parted_text", "train", **options).path == store.path
    reading = Reading()
    assert (
        len(list(find_corpus("tfds:parted_text", "train", data_dir=str(prepared)).documents("text", reading)))
        == 300
    )
    assert reading.place == 300


def test_what_cannot_be_read_is_said_at_once(prepared, refuses):
    began = time.monotonic()
    for source, field, words in [
        ("tfds:c4/en", "text", ("not prepared", "download_and_prepare()", "tensorflow_datasets.text.c4", prepared)),
        ("tfds:lm1b", "text", ("not prepared", "'lm1b'")),
        ("tfds:wikipedai", "text", ("'wikipedai'", "nearest: wikipedia")),
        ("tfds:parted_text:nothing", "text", ("'nothing'", "splits are train, test")),
        ("tfds:parted_text", "body", ('no field "body"', '"text"', '"id"')),
        ("tfds:parted_text", "id", ('field "id" is a int', "not a string")),
        ("tfds:parted_text", "pair", ('field "pair" is a ndarray', "not a string")),
    ]:
        with refuses(*words):
            documents(source, "train", prepared, field)
    assert time.monotonic() - began < 60  # a download that cannot be had takes minutes to give up


def test_files_that_were_made_again_are_read_again(prepared, tmp_path):
    options = {"tokenizer": ByteTokenizer(), "cache_dir": tmp_path, "data_dir": str(prepared), "progress": False}
    store = prepare_store("tfds:single_text", "all", **options)
    (shard,) = (prepared / "single_text" / "1.0.0").glob("*array_record*")
    os.utime(shard, ns=(1, 1))
    assert prepare_store("tfds:single_text", "all", **options).path != store.path


def test_another_set_for_validation(prepared, tmp_path):
    """A named split is read whole; beside it a set with splits of its own trains on `train` alone."""
    named = {"validation_source": "tfds:parted_text:train[:10%]"}
    assert len(documents("tfds:single_text", "validation", prepared, **named)) == 30
    assert len(documents("tfds:single_text", "train", prepared, **named)) == 40
    other = {"validation_source": "tfds:single_text:train"}
    assert len(documents("tfds:parted_text", "train", prepared, **other)) == 300
    assert own_part("tfds:parted_text:train[:10%]") == "all"


def test_named_sets_hold_out_the_share_of_the_run(prepared, tmp_path):
    data = base_config().data
    data.data_dir, data.cache_dir = str(prepared), str(tmp_path)
    for fraction in (0.2, 0.6):
        data.validation_fraction = fraction
        (store,) = open_domains({"one": "tfds:single_text"}, data, ByteTokenizer(), False).values()
        expected = documents("tfds:single_text", "validation", prepared, validation_fraction=fraction)
        assert store.num_documents == len(expected)
        data.validation_source = "tfds:single_text"
        assert open_sources(data, "validation", ByteTokenizer(), False)[""].num_documents == len(expected)
        data.validation_source = ""
