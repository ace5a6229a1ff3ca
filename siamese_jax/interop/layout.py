"""How a PyTorch checkpoint lays out our arrays: for every array of ours, the tensors it is made of.

A layout is built from a model configuration and works in both directions, one array at a time, for weights
and for gradients. Legend: D width, H heads, J key/value heads, G = H / J, K head dim, F hidden width, V rows.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import flax.traverse_util
import numpy as np

from siamese_jax.errors import InputError
from siamese_jax.models.stack import segment_rows
from siamese_jax.models.transformer import TransformerConfig

Array = np.ndarray
Shape = tuple[int, ...]
FIXED_TOLERANCE = 1e-5  # tables of sines, computed in several ways
ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}  # of numbers up to 1 stored in these types


@dataclasses.dataclass(frozen=True)
class Rule:
    """One array of ours, of one layer or of the whole model, and the tensors (name -> shape) it is made of."""

    ours: str
    theirs: dict[str, Shape]
    join: Callable[..., Array] = lambda tensor: tensor
    split: Callable[[Array], tuple[Array, ...]] = lambda array: (array,)


@dataclasses.dataclass(frozen=True)
class Layout:
    """whole: arrays that exist once. layers: those of every layer, by its index.

    fixed: tensors of theirs that are no parameters of ours but always the same numbers.
    """

    whole: tuple[Rule, ...]
    layers: tuple[tuple[Rule, ...], ...]
    fixed: Mapping[str, Array] = dataclasses.field(default_factory=dict)

    def tensors(self) -> dict[str, Shape]:
        """Name and shape of every tensor of the PyTorch checkpoint."""
        rules = [*self.whole, *(rule for layer in self.layers for rule in layer)]
        shapes = {name: shape for rule in rules for name, shape in rule.theirs.items()}
        return shapes | {name: array.shape for name, array in self.fixed.items()}

    def check_fixed(self, read: Callable[[str], Array], where: str, types: Mapping[str, str] | None = None) -> None:
        """InputError where a tensor that we compute is another one there; types: in which they are stored."""
        for name, ours in self.fixed.items():
            most = float(np.max(np.abs(np.asarray(read(name), np.float64) - ours)))
            if not most <= FIXED_TOLERANCE + ROUNDING.get((types or {}).get(name, ""), 0.0):
                raise InputError(f"{where}: {name} differs from the frozen one by up to {most:.3g}: it was trained")

    def entries(self, config: TransformerConfig) -> dict[str, "Entry"]:
        """Path of every array of the parameter tree -> how it is made; scanned or unrolled as configured."""
        entries = {rule.ours: Entry((rule,), stacked=False) for rule in self.whole}
        for top, first, count in segment_rows(config.segments()):
            layers = self.layers[first : first + count]
            if config.scan:
                for rules in zip(*layers, strict=True):
                    entries[f"{top}/{rules[0].ours}"] = Entry(rules, stacked=True)
            else:
                for i, rules in enumerate(layers, start=first):
                    entries |= {f"layer_{i}/{rule.ours}": Entry((rule,), stacked=False) for rule in rules}
        return entries


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of the parameter tree: a rule, or one rule for every layer that it stacks."""

    rules: tuple[Rule, ...]
    stacked: bool

    def join(self, read: Callable[[str], Array]) -> Array:
        """The array, from a function that reads a tensor by name; one layer's tensors are held at a time."""
        array = None
        for i, rule in enumerate(self.rules):
            part = rule.join(*(read(name) for name in rule.theirs))
            if not self.stacked:
                return np.ascontiguousarray(part)
            if array is None:
                array = np.empty((len(self.rules), *part.shape), part.dtype)
            array[i] = part
        return array

    def split(self, array: Array) -> Iterator[tuple[str, Array]]:
        """(name, tensor) of everything that the array holds."""
        for rule, part in zip(self.rules, array if self.stacked else [array], strict=True):
            yield from zip(rule.theirs, rule.split(part), strict=True)


def join_all(layout: Layout, config: TransformerConfig, tensors: Mapping[str, Array]) -> dict:
    """The parameter tree of tensors in memory; InputError where they do not fit the layout."""
    check_tensors(layout.tensors(), {name: np.shape(tensor) for name, tensor in tensors.items()}, "the weights")
    layout.check_fixed(tensors.__getitem__, "the weights")
    flat = {path: entry.join(tensors.__getitem__) for path, entry in layout.entries(config).items()}
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def split_all(layout: Layout, config: TransformerConfig, params: Mapping) -> dict[str, Array]:
    """The tensors of a parameter tree in memory."""
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    entries = layout.entries(config)
    return {name: part for path, array in flat.items() for name, part in entries[path].split(np.asarray(array))}


def check_tensors(expected: Mapping[str, Shape], found: Mapping[str, Shape], where: str) -> None:
    """InputError with both sides for missing, extra and wrongly shaped tensors."""
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    wrong = [name for name in expected if name in found and tuple(found[name]) != tuple(expected[name])]
    said = []
    if missing:
        said.append(f"lacks {_some(f'{name} {expected[name]}' for name in missing)}")
    if extra:
        said.append(f"has {_some(f'{name} {tuple(found[name])}' for name in extra)}, which the model does not")
    if wrong:
        said.append(
            "has " + _some(f"{name} of shape {tuple(found[name])}, not {tuple(expected[name])}" for name in wrong)
        )
    if said:
        raise InputError(f"{where} and its configuration do not fit: the file {'; it '.join(said)}")


def _some(words) -> str:
    """The first three of a list, and how many more."""
    words = list(words)
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more


def matrix(ours: str, name: str, shape: Shape) -> Rule:
    """A linear layer's weight: (out, in) in PyTorch, [in, out] here."""
    return Rule(ours, {name: shape}, join=lambda weight: weight.T, split=lambda kernel: (kernel.T,))


def qkv(ours: str, names: tuple[str, ...], config: TransformerConfig, *, bias: bool = False) -> Rule:
    """q | k | v, fused in one tensor or one tensor each, rows head-major <-> [D, J, G + 2, K] ([J, G + 2, K])."""
    kv_heads, key_dim, groups = config.kv_heads, config.key_dim, config.num_heads // config.kv_heads
    rest = () if bias else (config.width,)
    rows = [config.num_heads * key_dim, kv_heads * key_dim, kv_heads * key_dim]
    ends = np.cumsum(rows)[:-1]

    def join(*tensors):
        q, k, v = np.split(tensors[0], ends) if len(tensors) == 1 else tensors
        q = q.reshape(kv_heads, groups, key_dim, *rest)
        k, v = (part.reshape(kv_heads, 1, key_dim, *rest) for part in (k, v))
        joined = np.concatenate([q, k, v], axis=1)
        return joined if bias else np.moveaxis(joined, -1, 0)

    def split(array):
        array = array if bias else np.moveaxis(array, 0, -1)
        q, k, v = array[:, :groups], array[:, groups], array[:, groups + 1]
        parts = [part.reshape(-1, *rest) for part in (q, k, v)]
        return tuple(parts) if len(names) == 3 else (np.concatenate(parts),)

    sizes = [sum(rows)] if len(names) == 1 else rows
    return Rule(ours, {name: (size, *rest) for name, size in zip(names, sizes, strict=True)}, join, split)


def gated(ours: str, names: tuple[str, ...], config: TransformerConfig, *, bias: bool = False) -> Rule:
    """value | gate, fused in one tensor or one tensor each <-> [D, 2, F] ([2, F])."""
    hidden = config.mlp_hidden
    rest = () if bias else (config.width,)

    def join(*tensors):
        value, gate = np.split(tensors[0], 2) if len(tensors) == 1 else tensors
        return np.stack([value, gate]) if bias else np.stack([value.T, gate.T], axis=1)

    def split(array):
        parts = [array[0], array[1]] if bias else [array[:, 0].T, array[:, 1].T]
        return tuple(parts) if len(names) == 2 else (np.concatenate(parts),)

    size = 2 * hidden if len(names) == 1 else hidden
    return Rule(ours, {name: (size, *rest) for name in names}, join, split)


def norm(ours: str, name: str, size: int, kind: str) -> list[Rule]:
    """The gain and the bias that a norm of this kind has; `name` is without `.weight`."""
    rules = [] if kind == "layer_plain" else [Rule(f"{ours}/scale", {f"{name}.weight": (size,)})]
    return [*rules, Rule(f"{ours}/bias", {f"{name}.bias": (size,)})] if kind == "layer" else rules
