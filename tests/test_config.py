"""The configuration: defaults that work, the round trip through config.json, and what a run may not change."""

import json

import pytest

from siamese_jax.config import (
    FREE,
    base_config,
    check_config,
    differences,
    flat_items,
    from_resolved,
    model_config,
    nearest_key,
    resolved,
)
from siamese_jax.errors import InputError
from siamese_jax.residual.scheme import known_schemes, scheme_options


def changed(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + "x" if isinstance(value, str) else value + 1


def test_every_key_has_a_default_and_the_defaults_work():
    check_config(base_config())
    values = flat_items(base_config())
    missing = {key for key, value in values.items() if value is None}
    options = {f"model.residual_options.{name}" for scheme in known_schemes() for name in scheme_options(scheme)}
    assert missing == options  # None is the default of the scheme


@pytest.mark.parametrize("scheme", known_schemes())
def test_the_round_trip_through_json(scheme):
    config = base_config()
    config.model.residual = scheme
    config.schedule.peak = 2e-3
    config.training.steps = 7_000
    plain = json.loads(json.dumps(resolved(config)))
    again = from_resolved(plain, "config.json")
    assert resolved(again) == plain == resolved(config)
    assert model_config(again) == model_config(config)
    assert plain["model"]["residual_options"].keys() == scheme_options(scheme).keys()


def test_a_configuration_is_locked():
    config = base_config()
    with pytest.raises(AttributeError):
        config.model.widht = 3
    with pytest.raises(TypeError):
        config.model.width = "wide"


def test_keys_that_came_later_keep_their_defaults():
    plain = resolved(base_config())
    del plain["training"]["z_loss"], plain["mesh"]
    assert resolved(from_resolved(plain, "config.json")) == resolved(base_config())


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({"model": {"breadth": 3}}, "config.json has the key model.breadth"),
        ({"training": {"steps": "many"}}, "config.json has training.steps = 'many'"),
    ],
)
def test_a_stored_configuration_of_another_version_is_named(plain, words):
    with pytest.raises(InputError, match=words):
        from_resolved(plain, "config.json")


LOCKED = {key for key in flat_items(resolved(base_config())) if not key.startswith(FREE)}


@pytest.mark.parametrize("key", sorted(flat_items(resolved(base_config()))))
def test_differences_lists_exactly_the_locked_keys(key):
    stored, wanted = resolved(base_config()), resolved(base_config())
    *groups, name = key.split(".")
    group = wanted
    for step in groups:
        group = group[step]
    old, group[name] = group[name], changed(group[name])
    told = [line for line in differences(stored, wanted) if line.startswith(f"{key}: ")]
    assert told == ([f"{key}: {old!r} -> {group[name]!r}"] if key in LOCKED else [])
    assert len(differences(stored, wanted)) == len(told)


def test_the_keys_that_matter_are_locked_and_the_others_free():
    assert {"model.width", "data.source", "data.length", "training.steps", "optimizer.kind", "seed"} <= LOCKED
    free = {"checkpoint.every", "eval.every", "mesh.data", "logging.every", "data.cache_dir", "model.remat"}
    assert not free & LOCKED


def test_options_of_two_schemes_are_not_compared():
    stored, wanted = base_config(), base_config()
    wanted.model.residual = "pre"
    assert differences(resolved(stored), resolved(wanted)) == ["model.residual: 'siamese_hybrid' -> 'pre'"]


@pytest.mark.parametrize(("key", "nearest"), [("model.widht", "model.width"), ("warmup", "schedule.warmup_steps")])
def test_the_nearest_key_is_named(key, nearest):
    assert nearest_key(key) == f" (nearest: {nearest})"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eval.temperature", float("nan")),
        ("eval.temperature", float("inf")),
        ("training.z_loss", -1.0),
        ("checkpoint.keep", 0),
        ("logging.every", 0),
    ],
)
def test_values_out_of_range_are_named(key, value):
    config = base_config()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(InputError, match=f"{key} is {value}"):
        check_config(config)


def test_a_prompt_that_is_no_text_is_named_before_the_training():
    config = base_config()
    config.eval.prompt = "caf\udce9"  # as bytes of a command line that are no UTF-8
    with pytest.raises(InputError, match=r"eval\.prompt is not UTF-8"):
        check_config(config)
