"""Reading other people's configurations: every key known, every value of its type, nothing said twice."""

import collections
import difflib
import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from siamese_jax.errors import InputError


class Doubled(ValueError):
    """A key that a table has twice, of which its last value would count without a word."""


def _single(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    for name, count in collections.Counter(name for name, _ in pairs).items():
        if count > 1:
            raise Doubled(f"{name!r} stands there twice")
    return dict(pairs)


def read_json(text: str | bytes) -> Any:
    """JSON; Doubled or ValueError where it is not."""
    return json.loads(text, object_pairs_hook=_single)


class _Loader(yaml.SafeLoader):
    """YAML as OLMo reads it: 1e-6 is a number (to PyYAML it is a string), a key stands once."""

    def construct_mapping(self, node, deep=False):
        _single([(self.construct_object(key, deep=True), None) for key, _ in node.value])
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def read_yaml(text: str) -> Any:
    """YAML; Doubled or yaml.YAMLError where it is not."""
    return yaml.load(text, _Loader)


def check_known(given: Mapping[str, Any], known: Collection[str], only: Mapping[str, Any], hint: str = "") -> None:
    """InputError for an unknown key, with the nearest one, and for a value of `only` that is another one."""
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise InputError(f"unknown key {key!r} in the configuration (nearest: {near}){hint}")
        if key in only and value != only[key]:
            raise InputError(f"{key} is {value!r} in the configuration: this model has {only[key]!r} only")


def whole(given: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number above 0; the default where the key is missing or null."""
    value = default if given.get(key) is None else given[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{key} is {value!r} in the configuration: it must be a whole number above 0")
    return value


def number(given: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number above 0; the default where the key is missing or null."""
    value = default if given.get(key) is None else given[key]
    try:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < float(value) < math.inf
    except OverflowError:
        fits = False
    if not fits:
        raise InputError(f"{key} is {str(value)[:40]!r} in the configuration: it must be a number above 0")
    return float(value)


def flag(given: Mapping[str, Any], key: str, default: bool | None = None) -> bool:
    """true or false; the default where the key is missing or null."""
    value = default if given.get(key) is None else given[key]
    if not isinstance(value, bool):
        raise InputError(f"{key} is {value!r} in the configuration: it must be true or false")
    return value


def word(given: Mapping[str, Any], key: str, choices: Collection[str], default: str | None = None) -> str:
    """One of the choices; the default where the key is missing or null."""
    value = default if given.get(key) is None else given[key]
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{key} is {value!r} in the configuration: this model has {', '.join(choices)}")
    return value
