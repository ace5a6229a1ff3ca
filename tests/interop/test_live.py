"""Training in JAX against training in PyTorch, and that a planted difference is found and named."""

import dataclasses

import jax
import numpy as np
import pytest

pytest.importorskip("torch")

from siamese_jax.interop import live
from siamese_jax.models.language import LanguageModel


@pytest.fixture
def wide():
    """64-bit types while a test runs."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def rows_of(result):
    return {row["name"]: row for row in result["rows"]}


def test_float64_agrees_in_every_part(wide, tmp_path):
    result = live.compare_live("siamese_hybrid", "float64", steps=20, seed=1, say=lambda line: None)
    assert result["ok"], live.format_live(result)
    rows = rows_of(result)
    assert rows["loss of 20 updates"]["max_rel"] <= 1e-8
    assert result["curves"]["ours"][-1] < result["curves"]["ours"][0] - 0.5  # they learn
    # PyTorch's own clipping is not what we do, and that shows at this precision.
    assert 1e-12 < rows["clipped by clip_grad_norm_"]["max_rel"] < 1e-6
    assert 1e-12 < rows["the same with clip_grad_norm_"]["max_rel"] < 1e-6
    assert {"logits", "gradient norm", "learning rates", "three AdamW updates", "loss in bfloat16"} <= rows.keys()
    live.plot_live([result], tmp_path / "parity.png")
    assert (tmp_path / "parity.png").stat().st_size > 10_000
    assert "all" in live.format_live(result).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("residual", live.MODELS)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_hundred_updates(residual, seed, dtype):
    jax.config.update("jax_enable_x64", dtype == "float64")
    result = live.compare_live(residual, dtype, steps=100, seed=seed, say=lambda line: None)
    jax.config.update("jax_enable_x64", False)
    assert result["ok"], live.format_live(result)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"norm_epsilon": 1e-4}, marks=pytest.mark.slow),
        {"residual_options": (("depth_scale", "layer"),)},
    ],
)
def test_a_planted_difference_of_the_model_is_found(change, wide):
    pair = live.make_pair("siamese_hybrid", "float64", 0)
    config = pair.config
    pair.config = dataclasses.replace(config, **change)
    pair.to_theirs = dataclasses.replace(pair, config=config).to_theirs  # the names are those of the true model
    rows, _ = live.compare_forward(pair, live.make_batches(1, 0, 96)[0], live.LIMITS["float64"])
    rows = {row.name: row for row in rows}
    assert not rows["logits"].ok and not rows["loss"].ok
    assert rows["state/x_0"].ok  # the embedding is before the fault


def test_a_planted_difference_of_the_optimiser_is_found_where_it_is(wide, monkeypatch):
    pair = live.make_pair("pre", "float64", 0)
    limits = live.LIMITS["float64"]
    gradients = {name: np.ones(p.shape) for name, p in pair.theirs.named_parameters()}
    assert all(row.ok for row in live.compare_update(pair, gradients, limits))
    assert all(row.ok for row in live.compare_decay_groups(pair))
    assert all(row.ok for row in live.compare_schedule(50, limits))

    decayed = pair.theirs.decayed
    pair.theirs.decayed = lambda embedding=True: decayed(embedding) | {"transformer.ln_f.weight"}
    rows = live.compare_decay_groups(pair)
    assert not any(row.ok for row in rows) and all("ln_f" in row.note for row in rows)
    (row,) = live.compare_update(pair, gradients, limits)
    assert not row.ok and "ln_f" in row.note
    assert all(row.ok for row in live.compare_schedule(50, limits))

    monkeypatch.setattr(live, "FLOOR", 0.11)  # of their side only: ours reads the configuration
    config, schedule = live.training_config(50)
    monkeypatch.setattr(live, "training_config", lambda steps: (config, schedule))
    schedule.floor = 0.1
    assert not any(row.ok for row in live.compare_schedule(50, limits))


@pytest.mark.slow
def test_initialisation_has_the_statistics_of_its_formulas():
    rows = live.compare_initialisation(seeds=16, say=lambda line: None)
    assert len(rows) == 6 * 41 and all(row.ok for row in rows)


def test_a_wrong_initialisation_is_found():
    random = np.random.default_rng(0)
    good = random.normal(size=20_000)
    good = good[np.abs(good) < 3]
    assert live.initial_row("", good, 1.0).ok and live.initial_row("", good / 50, 1 / 50).ok
    for wrong in (good * 0.97, good + 0.05, np.append(good, 3.1), good * np.nan, np.clip(good, -1.5, 1.5)):
        assert not live.initial_row("", wrong, 1.0).ok
    assert live.initial_row("", np.ones(3), 0.0).ok and not live.initial_row("", np.array([1.0, 0.99]), 0.0).ok


def test_bfloat16_that_is_not_on_is_found(monkeypatch):
    pair = live.make_pair("pre", "float32", 0)
    tokens = live.make_batches(1, 0, 96)[0]
    exact = live.difference("loss", 1.0, 1.0, "rel", 0.0)
    assert all(row.ok for row in live.compare_bfloat16(pair, tokens, exact))
    wide = lambda config: LanguageModel(dataclasses.replace(config, dtype="float32"))  # noqa: E731
    monkeypatch.setattr(live, "LanguageModel", wide)
    loss, rounding = live.compare_bfloat16(pair, tokens, exact)
    assert loss.ok and not rounding.ok  # the loss alone does not tell
