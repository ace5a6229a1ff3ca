"""Learning-rate tables, worked out by hand; update u (from 0) is k = u + 1 of the formulas."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_collections
import pytest

from siamese_jax.errors import InputError
from siamese_jax.training.schedule import check_schedule, make_schedule

NUM_STEPS = 20


def config(**fields):
    default = {"kind": "cosine", "peak": 2.0, "warmup_steps": 4, "floor": 0.1, "decay_steps": 10}
    return SimpleNamespace(**{**default, "decay_shape": "linear", **fields})


def cosine(fraction):
    return 0.2 + 1.8 * (1 + math.cos(math.pi * fraction)) / 2


# kind, fields, {update: learning rate}
TABLES = [
    ("cosine", {}, {0: 0.5, 1: 1.0, 3: 2.0, 4: cosine(1 / 16), 11: 1.1, 19: 0.2}),
    ("cosine", {"warmup_steps": 0}, {0: cosine(1 / 20), 9: 1.1, 19: 0.2}),
    ("cosine", {"warmup_steps": 1, "floor": 0.0}, {0: 2.0, 19: 0.0}),
    ("wsd", {}, {0: 0.5, 2: 1.5, 3: 2.0, 4: 2.0, 9: 2.0, 10: 1.82, 14: 1.1, 19: 0.2}),
    ("wsd", {"warmup_steps": 0}, {0: 2.0, 9: 2.0, 10: 1.82, 19: 0.2}),
    ("wsd", {"decay_steps": 16}, {3: 2.0, 4: 2.0 - 1.8 / 16, 11: 1.1, 19: 0.2}),
    ("wsd", {"decay_steps": 16, "decay_shape": "1-sqrt"}, {3: 2.0, 4: 1.55, 7: 1.1, 12: 0.65, 19: 0.2}),
    ("wsd", {"warmup_steps": 0, "decay_shape": "1-sqrt", "decay_steps": 4}, {0: 2.0, 15: 2.0, 16: 1.1}),
    ("constant", {}, {0: 0.5, 2: 1.5, 3: 2.0, 4: 2.0, 11: 2.0, 19: 2.0}),
    ("constant", {"warmup_steps": 0}, {0: 2.0, 19: 2.0}),
    ("constant", {"warmup_steps": 20}, {0: 0.1, 9: 1.0, 19: 2.0}),
]


@pytest.mark.parametrize("kind, fields, table", TABLES)
def test_table(kind, fields, table):
    schedule = make_schedule(config(kind=kind, **fields), NUM_STEPS)
    counts = jnp.array(list(table), jnp.int32)
    rates = jax.jit(jax.vmap(schedule))(counts)
    assert rates.dtype == jnp.float32
    assert rates.tolist() == pytest.approx(list(table.values()), rel=1e-6, abs=1e-7)
    assert float(schedule(counts[0])) == pytest.approx(float(rates[0]), rel=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 7, 2000])
def test_peak_and_floor_are_exact(kind, warmup):
    schedule = make_schedule(config(kind=kind, peak=1e-3, warmup_steps=warmup, decay_steps=777), 9973)
    last = float(schedule(jnp.int32(9972)))
    assert last == pytest.approx(1e-4, rel=2e-7)
    assert float(schedule(jnp.int32(20_000))) == last
    if warmup:
        assert float(schedule(jnp.int32(warmup - 1))) == pytest.approx(1e-3, rel=2e-7)


def test_config_dict_works():
    fields = ml_collections.ConfigDict(vars(config()))
    assert float(make_schedule(fields, NUM_STEPS)(3)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"kind": "cosin"}, ["'cosin'", "'wsd'", "nearest: 'cosine'"]),
        ({"kind": "wsd", "decay_shape": "sqrt"}, ["'sqrt'", "nearest: '1-sqrt'"]),
        ({"peak": -1.0}, ["schedule.peak", "-1.0"]),
        ({"peak": math.nan}, ["schedule.peak", "nan"]),
        ({"warmup_steps": -3}, ["schedule.warmup_steps", "-3"]),
        ({"decay_steps": -3}, ["schedule.decay_steps", "-3"]),
        ({"floor": 1.5}, ["schedule.floor", "1.5"]),
        ({"warmup_steps": 21}, ["21", "20 updates"]),
        ({"warmup_steps": 20}, ["is 20", "20 updates", "'constant'"]),
        ({"kind": "wsd", "warmup_steps": 11}, ["11 + decay_steps 10 = 21", "20 updates"]),
        ({"kind": "wsd", "decay_steps": 0}, ["'constant'"]),
    ],
)
def test_wrong_config_is_one_line(fields, words):
    with pytest.raises(InputError) as caught:
        check_schedule(config(**fields), NUM_STEPS)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    with pytest.raises(InputError):
        make_schedule(config(**fields), NUM_STEPS)


def test_a_run_without_updates():
    with pytest.raises(InputError, match="0 updates"):
        check_schedule(config(), 0)
