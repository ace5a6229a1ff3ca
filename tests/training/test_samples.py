"""samples.jsonl: whole lines, each step once, whatever a killed run left, and a training that they do not touch."""

import json
import shutil

import pytest
from programs import records, shared_place, undisturbed

from siamese_jax.errors import FaultError
from siamese_jax.training.samples import SAMPLES, write_samples


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return shared_place(tmp_path_factory)


def read(workdir) -> list[tuple[int, str]]:
    lines = (workdir / SAMPLES).read_text(encoding="utf-8").splitlines()
    return [(row["step"], row["text"]) for row in map(json.loads, lines)]


def test_a_step_is_written_once_and_what_lies_behind_it_goes(tmp_path):
    for step, text in ((3, "a"), (6, "b\n\u2028"), (9, "c"), (6, "d")):
        write_samples(tmp_path, step, [{"prompt": "", "text": text}])
    assert [step for step, _ in read(tmp_path)] == [3, 6]
    with open(tmp_path / SAMPLES, "a") as file:
        file.write('{"step": "6"}\n{"step": null}\n[6]\n{"step": 7, "te')  # as a copy that was cut off
    write_samples(tmp_path, 9, [{"prompt": "", "text": "e"}])
    assert [step for step, _ in read(tmp_path)] == [3, 6, 9]
    write_samples(tmp_path, 7, [])
    assert [step for step, _ in read(tmp_path)] == [3, 6]
    assert [path.name for path in tmp_path.iterdir()] == [SAMPLES]


def test_nothing_is_written_of_nothing_and_a_disk_that_refuses_is_a_fault(tmp_path):
    write_samples(tmp_path, 1, [])
    assert not list(tmp_path.iterdir())
    with pytest.raises(FaultError, match=r"cannot write .*samples.jsonl at step 1"):
        write_samples(tmp_path / "gone", 1, [{"prompt": "", "text": ""}])


def test_samples_of_a_run_that_was_killed_and_went_on(place, tmp_path):
    """The same bytes as without the kill; and the training is that of a run without samples."""
    workdir = tmp_path / "run"
    keys = ("eval.prompt=abc|x", "eval.sample_tokens=5", "eval.sample_every=7")
    ended = place.run(*place.arguments(workdir, *keys))
    assert ended.code == 0, ended.err
    whole = (workdir / SAMPLES).read_bytes()
    assert [step for step, _ in read(workdir)] == [step for step in (7, 14, 21, 28, 30) for _ in range(2)]
    assert records(workdir) == records(undisturbed(place)[0])
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    assert [(30, row["text"]) for row in summary["samples"]] == read(workdir)[-2:]
    for step in (27, 30):  # as if killed in step 28
        shutil.rmtree(workdir / "checkpoints" / str(step))
    (workdir / "summary.json").unlink()
    ended = place.run(*place.arguments(workdir, *keys))
    assert ended.code == 0, ended.err
    assert (workdir / SAMPLES).read_bytes() == whole
