"""The benchmark on a tiny shape: structure, not time."""

import json
import math

import pytest

from siamese_jax.config import base_config, model_config
from siamese_jax.errors import InputError
from siamese_jax.training.benchmark import benchmark, format_table, scheme_config
from siamese_jax.training.language_task import LanguageTask


@pytest.fixture(scope="module")
def config():
    config = base_config()
    config.model.update(num_layers=1, width=8, num_heads=2, mlp_hidden=8)
    config.model.residual_options.depth_scale = "none"  # of siamese_hybrid, the scheme of this configuration
    config.data.length = 8
    config.training.batch_size = 2
    return config


@pytest.fixture(scope="module")
def result(config):
    return benchmark(config, ["pre", "siamese_hybrid"], rounds=3, steps=2)


def test_a_row_for_each_scheme_in_order(result):
    rows = result["schemes"]
    assert [row["scheme"] for row in rows] == ["pre", "siamese_hybrid"]
    for row in rows:
        assert len(row["step_seconds_by_round"]) == 3 and min(row["step_seconds_by_round"]) > 0
        assert row["tokens_per_second"] == pytest.approx(2 * 8 / row["step_seconds"])
        assert row["mfu"] > 0 and row["compile_seconds"] > 0
        assert row["peak_bytes"] > row["temp_bytes"] > 0
        assert 0 < row["ratio"]["min"] <= row["ratio"]["median"] <= row["ratio"]["max"] < math.inf
    assert rows[0]["ratio"] == {"median": 1, "min": 1, "max": 1}
    assert rows[0]["parameters"] < rows[1]["parameters"]
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_ratios_are_taken_round_by_round(result):
    first, other = (row["step_seconds_by_round"] for row in result["schemes"])
    ratios = sorted(one / own for one, own in zip(other, first, strict=True))
    assert list(result["schemes"][1]["ratio"].values()) == [ratios[1], ratios[0], ratios[2]]


def test_only_the_configurations_own_scheme_keeps_its_options(config):
    assert scheme_config(config, "siamese_hybrid").model.residual_options.depth_scale == "none"
    assert scheme_config(config, "siamese").model.residual_options.depth_scale is None
    assert config.model.residual == "siamese_hybrid"


def test_the_table_has_a_line_for_each_scheme(result):
    lines = format_table(result).splitlines()
    assert [line.split()[0] for line in lines] == ["scheme", "pre", "siamese_hybrid"]
    assert "1.000 (1.000-1.000)" in lines[1]
    assert len({len(line) for line in lines}) == 1


def test_documents_kept_apart_are_part_of_the_batch(config):
    config = config.copy_and_resolve_references()
    config.data.cross_documents = False
    batch = LanguageTask().random_batch(config, model_config(config))
    assert batch.keys() == {"inputs", "targets", "weights", "segments", "positions"}
    assert all(rows.shape == (2, 8) for rows in batch.values())
    assert 0 <= batch["inputs"].min() and batch["inputs"].max() < config.model.vocab_size


def test_wrong_input_ends_before_any_compile(config):
    with pytest.raises(InputError, match=r"'pree': the known schemes are pre, post, .*siamese_hybrid"):
        benchmark(config, ["pre", "pree"], 1, 1)
    for schemes, rounds, steps, word in (
        ([], 1, 1, "schemes"),
        (["pre"], 0, 1, "rounds"),
        (["pre"], 1, 0, "steps"),
    ):
        with pytest.raises(InputError, match=f"0 {word}"):
            benchmark(config, schemes, rounds, steps)
