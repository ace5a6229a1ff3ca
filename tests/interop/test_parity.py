"""The parity command as a user runs it."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from programs import shared_place

PARITY = "siamese_jax/interop/parity.py"
GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
B1 = GOLDEN / "b1_olmo_prenorm_tied.npz"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return shared_place(tmp_path_factory)


def run(place, *arguments):
    return place.run(*map(str, arguments), program=PARITY)


def test_tables_and_verdicts_of_several_files(place):
    ended = run(place, B1, GOLDEN / "b1_olmo_prenorm_tied_f64.npz")
    assert ended.code == 0 and "rror" not in ended.err, ended
    assert "recorded in float32, computed in float32" in ended.out and "computed in float64" in ended.out
    assert ended.out.count("agree: logits, states and loss within") == 4  # under each table, and side by side
    assert "within 1e-10" in ended.out and "grad/transformer.blocks.0.att_proj.weight" in ended.out


def test_json_is_one_object_and_a_limit_that_is_missed_is_exit_code_1(place):
    ended = run(place, B1, "--atol=1e-9", "--json")
    assert ended.code == 1, ended
    report = json.loads(ended.out)
    assert not report["ok"] and report["files"][0]["atol"] == 1e-9
    rows = report["files"][0]["rows"]
    assert not rows[0]["ok"] and rows[-1]["ok"] and rows[-1]["max_abs"] == 0  # worst first, the embedding last
    assert all(row["ok"] for row in rows if row["by"] == "rel")
    ended = run(place, B1, "--atol=1e-9")
    assert ended.code == 1 and "FAILS" in ended.out and "Traceback" not in ended.err


def test_nan_is_null_in_json(place, tmp_path):
    with np.load(B1) as file:
        arrays = {name: file[name] for name in file.files} | {"out/loss": np.float32("nan")}
    np.savez(tmp_path / "nan.npz", **arrays)
    ended = run(place, tmp_path / "nan.npz", "--json")
    assert ended.code == 1 and json.loads(ended.out)["files"][0]["rows"][0]["max_abs"] is None


def test_wrong_input_ends_in_one_line_before_anything_is_computed(place, tmp_path):
    (tmp_path / "x.npz").write_text("text")
    image = tmp_path / "image.npz"
    np.savez(image, config=json.dumps({"sample_rate": 16}), meta=json.dumps({"dtype": "float32"}))
    for arguments, words in (
        ([], ("golden files (.npz) or --live",)),
        ([B1, "--live"], ("golden files (.npz) or --live",)),
        ([B1, tmp_path / "x.npz"], ("x.npz", "not a golden file")),
        ([tmp_path / "missing.npz"], ("no golden file", "missing.npz")),
        ([image], ("image.npz", "does not have", "sample_rate")),
        ([B1, "--atol=-1"], ("--atol is -1",)),
        ([B1, "--dtype=float16"], ("dtype", "float32")),
        ([B1, "--attol=1"], ("attol",)),
        ([B1, "--steps=4"], ("--steps is for --live",)),
        ([B1, "--residual=pre"], ("--residual is for --live",)),
        (["--live", "--seed=-1"], ("--seed is -1",)),
        (["--live", f"--out={tmp_path / 'x.npz' / 'y'}"], ("cannot be made a folder",)),
        (["--live", "--atol=1"], ("--atol", "golden files")),
        (["--live", "--residual=siamese"], ("'siamese'", "siamese_hybrid, hybrid")),
        (["--live", "--steps=1"], ("--steps is 1", "at least 2")),
        (["--live", f"--out={tmp_path / 'x.npz'}"], ("cannot be made a folder",)),
    ):
        if arguments[:1] == ["--live"]:
            pytest.importorskip("torch")
        ended = run(place, *arguments)
        assert ended.code == 2, (arguments, ended)
        line = ended.err.strip().splitlines()[-1]
        assert line.startswith("error: ") and all(word in line for word in words), ended
        assert ended.out == ""


def test_live_writes_a_plot_and_its_figures(place, tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "report"
    ended = run(place, "--live", "--dtype=float32", "--steps=10", f"--out={out}", "--json")
    assert ended.code == 0, ended
    report = json.loads(ended.out)
    assert report == json.loads((out / "parity.json").read_text())
    (live,) = report["runs"]
    assert report["ok"] and live["residual"] == "siamese_hybrid" and len(live["curves"]["ours"]) == 10
    assert max(live["curves"]["relative"]) <= 1e-4 and "loss of 10 updates" in ended.err
    assert (out / "parity.png").read_bytes()[:4] == b"\x89PNG"
    weights = [row for row in report["initialisation"] if row["note"]]
    assert len(weights) == 6 * 14 and all(row["ok"] and row["max_abs"] > 0 for row in weights)
    assert ended.err.count("mitchell, ours") == 1 and "agree" in ended.err


def test_help_teaches(place):
    ended = run(place, "--help")
    assert ended.code == 0 and "--live" in ended.out and "max rel" in ended.out and ended.err == ""


def test_the_reference_is_not_needed_beside_a_file(place, tmp_path):
    """A file is complete: it may lie anywhere, under any name."""
    shutil.copy(B1, tmp_path / "renamed.npz")
    assert run(place, tmp_path / "renamed.npz").code == 0
