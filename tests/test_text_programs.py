"""The programs on several texts: mixtures, prepared stores, named validation sets, and what they refuse."""

import json
import math

import numpy as np
import pytest
from programs import records, shared_place, write_corpus

from siamese_jax.data.build import build_store
from siamese_jax.data.store import partial_of
from siamese_jax.data.tokenizer import ByteTokenizer

SHORT = ("training.steps=6", "eval.every=3", "checkpoint.every=3", "schedule.warmup_steps=2")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return shared_place(tmp_path_factory)


@pytest.fixture(scope="module")
def sources(place):
    """Three texts, a prepared store and a begun one."""
    folder = place.folder / "sources"
    folder.mkdir()
    paths = {
        name: write_corpus(folder / f"{name}.txt", seed, 600) for seed, name in enumerate(("one", "two", "three"))
    }
    paths["store"] = folder / "store"
    for part in ("train", "validation"):
        text = paths["three" if part == "train" else "one"].read_text()
        build_store([("x", text)], ByteTokenizer(), paths["store"] / part, progress=False)
    paths["begun"] = folder / "begun"
    partial_of(paths["begun"]).mkdir()
    wide = ByteTokenizer()
    wide.vocab_size = 60_000
    build_store([("x", "text")], wide, folder / "wide" / "train", progress=False)
    paths["wide"] = folder / "wide"
    return paths


@pytest.fixture(scope="module")
def mixed(place, sources):
    """A run on a mixture of a text and a prepared store."""
    workdir = place.folder / "mixed"
    mixture = (f"data.source={sources['one']},{sources['store']}", "data.weights=3,1")
    ended = place.run(*place.arguments(workdir, *SHORT, *mixture))
    assert ended.code == 0, ended.err
    return workdir, ended


def test_a_mixture_is_trained_on_in_proportion_and_validated_by_source(mixed):
    workdir, ended = mixed
    lines = records(workdir)
    for line in lines:
        assert (line["tokens/one"], line["tokens/store"]) == (3 * line["tokens"] // 4, line["tokens"] // 4)
    assert lines[-1]["tokens"] == 6 * 4 * 32
    checked = [line for line in lines if "validation/loss" in line]
    assert checked
    for line in checked:
        losses = [line[f"validation/loss/{name}"] for name in ("one", "store")]
        assert min(losses) < line["validation/loss"] < max(losses)
        assert line["validation/perplexity/one"] == pytest.approx(math.exp(losses[0]))
    summary = json.loads((workdir / "summary.json").read_text())
    assert set(summary["domains"]) == {"one", "store"}
    tokens = {name: figures["tokens"] for name, figures in summary["domains"].items()}
    assert sum(tokens.values()) == summary["validation"]["tokens"]
    assert "one: 75.00% of the run" in ended.out and "store: 25.00%" in ended.out


def evaluate(place, workdir, *arguments, code=0):
    ended = place.run(f"--workdir={workdir}", *arguments, program="eval.py")
    assert ended.code == code, ended.err
    return ended


def test_named_validation_sets_are_what_each_is_alone(place, mixed, sources):
    workdir, _ = mixed
    named = f"--domains=a={sources['two']};b={sources['store']}"
    result = json.loads(evaluate(place, workdir, named, "--max_windows=40", "--json").out)
    for name, source in (("a", sources["two"]), ("b", sources["store"])):
        alone = json.loads(
            evaluate(place, workdir, f"--data.source={source}", "--max_windows=40", "--json").out
        )["total"]  # fmt: skip
        assert result["domains"][name] == pytest.approx(alone, rel=1e-6)
    for figure in ("loss", "bits_per_byte", "perplexity", "perplexity_by_instance"):
        assert result["mean"][figure] == pytest.approx(np.mean([one[figure] for one in result["domains"].values()]))
    tokens = [one["tokens"] for one in result["domains"].values()]
    losses = [one["loss"] for one in result["domains"].values()]
    assert result["total"]["tokens"] == sum(tokens)
    assert result["total"]["loss"] == pytest.approx(np.average(losses, weights=tokens), rel=1e-9)
    table = evaluate(place, workdir, named, "--max_windows=40").out.splitlines()[-5:]
    assert [line.split()[0] for line in table] == ["domain", "a", "b", "mean", "total"]


def test_the_own_sets_of_a_run_are_taken_by_default(place, mixed, sources, tmp_path):
    result = json.loads(evaluate(place, mixed[0], "--json").out)
    summary = json.loads((mixed[0] / "summary.json").read_text())
    assert set(result["domains"]) == {"one", "store"}
    assert result["total"]["loss"] == pytest.approx(summary["validation"]["loss"], rel=1e-6)
    named = f"eval.domains=x={sources['two']};y={sources['store']}"
    ended = place.run(*place.arguments(tmp_path / "run", *SHORT, f"data.source={sources['store']}", named))
    assert ended.code == 0, ended.err
    line = next(line for line in records(tmp_path / "run") if "validation/loss" in line)
    assert {"validation/bits_per_byte/x", "validation/bits_per_byte/y"} < line.keys()
    result = json.loads(evaluate(place, tmp_path / "run", "--json", "--max_windows=1").out)
    assert result["source"] == named.partition("=")[2]


WRONG = [
    (("data.source=ONE,TWO", "data.weights=1,-1"), ("data.weights", "1,-1", "not be negative")),
    (("data.source=ONE,TWO", "data.weights=0,0"), ("data.weights", "all of them 0")),
    (("data.source=ONE,TWO", "data.weights=1"), ("are 1", "names 2")),
    (("data.source=ONE", "eval.domains=two"), ("eval.domains", "NAME=SOURCE")),
    (("data.source=BEGUN",), ("BEGUN", "was interrupted", "run its command again")),
    (("data.source=WIDE", "data.validation_source=ONE"), ("ids up to 59999", "model.vocab_size = 257")),
    (("data.source=STORE/train",), ("without a part for validation", "data.validation_source")),
    (("data.source=STORE", "data.tokenizer=nothing.json"), ("nothing.json does not exist", "--train_tokenizer")),
    (("data.source=stores/nothing",), ("stores/nothing", "does not exist")),
    (("data.source=tfds:lm1b", "data.data_dir=STORE"), ("not prepared", "download_and_prepare()")),
    (("data.source=tfds:wikipedai",), ("'wikipedai'", "nearest: wikipedia")),
]


@pytest.mark.parametrize(("overrides", "words"), WRONG)
def test_wrong_text_is_one_line(place, sources, tmp_path, overrides, words):
    def named(text):
        for name, path in sources.items():
            text = text.replace(name.upper(), str(path))
        return text

    workdir = tmp_path / "run"
    ended = place.run(*place.arguments(workdir, *SHORT, *map(named, overrides)))
    assert ended.code == 2 and len(ended.err.splitlines()) == 1, ended.err
    assert all(named(word) in ended.err for word in words), ended.err
    assert not workdir.exists()


def test_wrong_domains_of_an_evaluation(place, mixed, sources):
    for arguments, words in [
        (("--domains=a=nothing.txt",), "nothing.txt does not exist"),
        (("--domains=a",), "NAME=SOURCE"),
        ((f"--domains=a={sources['one']}", "--split=train"), "leave --data.source and --split out"),
    ]:
        err = evaluate(place, mixed[0], *arguments, code=2).err
        assert words in err and len(err.splitlines()) == 1
