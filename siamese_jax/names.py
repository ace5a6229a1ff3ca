"""Parameters by name: rules go by the ends of their paths, and every path is matched by exactly one row.

A path is `layers/mlp/up/kernel`; in an ending `*` stands for one path part.
"""

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from siamese_jax.errors import InputError


def path_name(path: Sequence[Any]) -> str:
    """The name of a jax.tree_util path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def map_paths(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """jax.tree.map of function(path, leaf)."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(path_name(path), leaf), tree)


def ends_with(path: str, ending: str) -> bool:
    """Whether the last parts of the path match those of the ending."""
    parts, patterns = path.split("/"), ending.split("/")
    return len(parts) >= len(patterns) and all(map(fnmatch.fnmatchcase, parts[-len(patterns) :], patterns))


def is_stacked(path: str) -> bool:
    """Whether a scanned stack (`layers`, `layers_from_K`) gave the parameter a leading layer axis."""
    return any(re.fullmatch(r"layers(_from_\d+)?", part) for part in path.split("/"))


def one_row(path: str, rows: Sequence[tuple[str, Any]], table: str) -> Any:
    """What the table's one row for the path holds; InputError unless exactly one row matches.

    `table` is its name and file, for the message: 'GROUP_RULES in training/optimizer.py'.
    """
    found = [(ending, value) for ending, value in rows if ends_with(path, ending)]
    if len(found) != 1:
        matches = " and ".join(ending for ending, _ in found) or "no row"
        raise InputError(f"parameter {path} is matched by {matches} of {table}: give it exactly one row there")
    return found[0][1]
