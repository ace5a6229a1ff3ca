"""`eval.py` on a tiny run that `train.py` made: figures, options, and one line for every wrong input."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from programs import ROOT, Ended, shared_place

TINY = (
    "--config.data.length=16", "--config.training.batch_size=4", "--config.training.steps=4",
    "--config.schedule.warmup_steps=1", "--config.checkpoint.every=2", "--config.eval.prompt=",
    "--config.eval.every=0", "--config.model.num_layers=1", "--config.model.width=16",
    "--config.model.num_heads=2", "--config.model.mlp_hidden=16", "--config.optimizer.kind=adamw",
    "--config.optimizer.ema=0.9", "--config.eval.batch_size=8",
)  # fmt: skip
FIGURES = {"loss", "perplexity", "perplexity_by_instance", "bits_per_byte", "tokens", "bytes", "instances"}


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with a trained run, its corpus of three files, and another text."""
    folder = shared_place(tmp_path_factory).folder / "eval"
    folder.mkdir()
    (folder / "corpus").mkdir()
    for name in ("one", "two", "three"):
        text = f"the text of file {name}, which says {name} again and again. " * 12
        (folder / "corpus" / f"{name}.txt").write_text(text)
    (folder / "other.txt").write_text("another text, that was never trained on: é")
    config = f"--config={ROOT}/configs/quickstart.py"
    source = f"--config.data.source={folder}/corpus"
    done = run("train.py", config, f"--workdir={folder}/run", source, *TINY, place=folder)
    assert done.code == 0, done.err
    return folder


def run(program, *arguments, place, **environment) -> Ended:
    """environment: that a program has to be started with, and not forked."""
    if not environment:
        return shared_place().run(*arguments, program=program, at=place)
    program = str(ROOT / program)
    return shared_place().start(*arguments, program=program, environment=environment, at=place).ended()


def evaluate(place, *arguments, **environment) -> dict:
    """The one object that --json prints."""
    done = run("eval.py", "--workdir=run", "--json", *arguments, place=place, **environment)
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1
    return json.loads(done.out)


def copy_of_run(place, tmp_path, **data) -> Path:
    """The run again, elsewhere, with other values in the data part of its configuration."""
    shutil.copytree(place / "run", tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["data"] |= data
    path.write_text(json.dumps(config))
    return tmp_path / "run"


def refused(place, *arguments, code=2, says="error: ") -> str:
    """The one line on stderr of a program that ends with `code`, and prints nothing else."""
    done = run("eval.py", *arguments, place=place)
    assert done.code == code, done.err
    assert done.out == "" and done.err.startswith(says) and done.err.count("\n") == 1, done.err
    return done.err


def test_the_table_has_the_sources_and_the_total(place):
    done = run("eval.py", "--workdir=run", "--split=all", place=place)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert "checkpoints/4, running average" in lines[0] and "split all" in lines[1]
    assert lines[2].split() == ["source", "tokens", "bits/byte", "loss", "perplexity", "by", "instance"]
    names = [line.split()[0] for line in lines[3:]]
    assert names == ["one.txt", "three.txt", "two.txt", "total"]
    counts = [int(line.split()[1].replace(",", "")) for line in lines[3:]]
    assert sum(counts[:-1]) == counts[-1]


def test_the_default_is_the_validation_that_ended_the_training(place):
    """The newest checkpoint, its running average, the validation split: bit for bit the run's own figures."""
    found = evaluate(place)
    assert (found["step"], found["split"], found["averaged"]) == (4, "validation", True)
    assert found["total"].keys() == FIGURES
    assert found["total"] == json.loads((place / "run" / "summary.json").read_text())["validation"]
    assert Path(place, found["checkpoint"]).is_dir()


def test_an_earlier_step_has_other_figures(place):
    one, other = (evaluate(place, "--split=train", f"--step={step}") for step in (2, 4))
    assert (one["step"], other["step"]) == (2, 4)
    assert one["total"]["loss"] != other["total"]["loss"]
    assert one["total"]["tokens"] == other["total"]["tokens"]


def test_other_sources(place):
    """All of each file, in the order given, whether repeated or by commas; max_windows from the front."""
    first, second = f"{place}/other.txt", f"{place}/corpus/one.txt"
    one = evaluate(place, f"--data.source={first}", f"--data.source={second}")
    other = evaluate(place, f"--data.source={first},{second}", "--batch_size=3", "--data.cache_dir=elsewhere")
    assert list(one["sources"]) == ["other.txt", "corpus/one.txt"] == list(other["sources"])
    assert one["split"] == "all" and one["source"] == f"{first},{second}"
    assert one["total"]["bytes"] == sum(Path(path).stat().st_size for path in (first, second))
    assert one["total"]["loss"] == pytest.approx(other["total"]["loss"], rel=1e-6)
    assert list((place / "elsewhere").iterdir())
    few = evaluate(place, f"--data.source={first}", "--max_windows=2")
    assert (few["windows"], few["total"]["tokens"]) == (2, 32)


def test_a_given_source_does_not_fall_back_to_the_runs_validation_source(place, tmp_path):
    workdir = copy_of_run(place, tmp_path, validation_source=f"{place}/corpus")
    found = evaluate(place, f"--workdir={workdir}", f"--data.source={place}/other.txt", "--split=validation")
    assert list(found["sources"]) == ["other.txt"] and found["total"]["bytes"] < 10


def test_another_number_of_devices(place):
    flags = "--xla_force_host_platform_device_count=4"
    four, one = evaluate(place, "--batch_size=3", XLA_FLAGS=flags), evaluate(place)
    assert four["total"]["tokens"] == one["total"]["tokens"]
    assert four["total"]["loss"] == pytest.approx(one["total"]["loss"], rel=1e-6)


def test_a_broken_checkpoint_is_passed_over_but_not_when_it_was_asked_for(place, tmp_path):
    workdir = copy_of_run(place, tmp_path)
    largest = max((workdir / "checkpoints/4").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    done = run("eval.py", f"--workdir={workdir}", place=place)
    assert done.code == 0, done.err
    assert done.out.startswith("checkpoint 4 is broken") and "checkpoints/2" in done.out.splitlines()[1]
    asked = refused(place, f"--workdir={workdir}", "--step=4")
    assert asked.startswith("error: checkpoint 4 ") and "is broken" in asked


def test_no_run_folder_no_checkpoint_and_no_such_step(place, tmp_path):
    assert "--workdir is missing" in refused(place)
    assert "nowhere is not a run folder" in refused(place, "--workdir=nowhere")
    assert "corpus is not a run folder" in refused(place, "--workdir=corpus")
    assert "no checkpoint 3 in" in (line := refused(place, "--workdir=run", "--step=3")) and "2, 4" in line
    workdir = copy_of_run(place, tmp_path)
    shutil.rmtree(workdir / "checkpoints")
    assert "there is no checkpoint in" in refused(place, f"--workdir={workdir}")
    (workdir / "config.json").write_text("[]")
    assert "config.json is a list" in refused(place, f"--workdir={workdir}")


def test_wrong_options(place):
    assert "train|validation|all" in refused(place, "--workdir=run", "--split=test")
    assert "batch_size is 0: it must be at least 1" in refused(place, "--workdir=run", "--batch_size=0")
    assert "max_windows is -1" in refused(place, "--workdir=run", "--max_windows=-1")
    assert "--step=last" in refused(place, "--workdir=run", "--step=last")
    assert "'bogus'" in refused(place, "--workdir=run", "--bogus=1")


def test_wrong_sources(place, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"abc \xe9")
    assert "gone.txt does not exist" in refused(place, "--workdir=run", "--data.source=gone.txt")
    assert "is empty" in refused(place, "--workdir=run", f"--data.source={tmp_path}/empty.txt")
    line = refused(place, "--workdir=run", f"--data.source={tmp_path}/latin.txt")
    assert "is not UTF-8: byte 0xe9 at offset 4" in line
    assert "source is ''" in refused(place, "--workdir=run", "--data.source=")


def test_a_cache_that_cannot_be_written(place):
    """A file in its place: even root cannot make a folder there."""
    line = refused(place, "--workdir=run", "--data.source=other.txt", "--data.cache_dir=other.txt/cache")
    assert "cannot write a token store below" in line


def test_a_tokenizer_that_has_grown_beyond_the_model(place, tmp_path):
    vocabulary = {"</s>": 0, "?": 1} | {f"word{i}": i + 2 for i in range(400)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "?"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    workdir = copy_of_run(place, tmp_path, tokenizer=f"{tmp_path}/tokenizer.json")
    line = refused(place, f"--workdir={workdir}")
    assert "token ids up to 401" in line and "257" in line


def test_another_tokenizer_of_a_size_that_fits(place, tmp_path):
    vocabulary = {"</s>": 0, "?": 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "?"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    workdir = copy_of_run(place, tmp_path, tokenizer=f"{tmp_path}/tokenizer.json")
    assert "error: the tokenizer changed: " in refused(place, f"--workdir={workdir}")


def test_help_names_the_options(place):
    done = run("eval.py", "--help", place=place)
    assert done.code == 0 and done.out.startswith("Evaluates a checkpoint")
    for option in ("workdir", "step", "split", "data.source", "data.cache_dir", "batch_size", "max_windows"):
        assert f"--{option}:" in done.out
    assert "--[no]json" in done.out


def test_help_that_is_not_read_to_its_end(place):
    """As `eval.py --help | head`; of a pipe that is closed already, whatever the speed."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "eval.py"), "--help"]
    done = subprocess.run(command, cwd=place, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert done.stderr == "" and done.returncode == 1
