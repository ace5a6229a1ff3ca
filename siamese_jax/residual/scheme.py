"""The interface of a residual scheme and the registry of schemes.

A scheme decides where normalisation sits and what the residual streams are. It knows nothing of attention,
MLPs or models: a branch is any callable [B, L, D] -> [B, L, D]. Legend: B batch, L length, D width.
"""

import ast
import dataclasses
import difflib
import itertools
import typing
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax

from siamese_jax.errors import InputError
from siamese_jax.layers.norms import RMSNorm
from siamese_jax.residual.functional import identity

Array = jax.Array
Branch = Callable[[Array], Array]


class Residual(nn.Module):
    """One residual scheme as a Linen module; subclasses define norms in `setup` and the three methods.

    The parameters of `layer` exist once per layer (the stack scans over them), those of `open` and `close`
    once per model: Linen creates a norm where it is called, so one class serves both places. Every field
    that a subclass adds is an option of the scheme.
    """

    num_layers: int = 1
    norm: Callable[..., nn.Module] = RMSNorm
    # Whether branches and head normalise what they read (DiT's modulated norms): the scheme leaves these norms out.
    norms_in_branches: bool = False

    stream_names: typing.ClassVar[tuple[str, ...]] = ("stream",)
    # '' where that works with this scheme, or why it does not.
    why_no_norms_in_branches: typing.ClassVar[str] = ""
    # Options, on by default, that switch norms which branches with norms of their own replace.
    replaced_options: typing.ClassVar[tuple[str, ...]] = ()
    # Options that `open` and `close` read: a single layer cannot have its own.
    model_options: typing.ClassVar[tuple[str, ...]] = ()

    def optional_norm(self, wanted: bool) -> Callable[[Array], Array]:
        """A norm module, or no norm."""
        return self.norm() if wanted else identity

    def reading_norm(self, wanted: bool = True) -> Callable[[Array], Array]:
        """The norm directly in front of a branch or the head, unless these have their own."""
        return self.optional_norm(wanted and not self.norms_in_branches)

    def open(self, h_BLD: Array) -> typing.Any:
        """Embedding -> streams."""
        return h_BLD

    def layer(self, streams: typing.Any, attend: Branch, feed: Branch, depth: int | Array) -> typing.Any:
        """One Transformer layer; depth is its 0-based index and may be traced."""
        raise NotImplementedError

    def close(self, streams: typing.Any) -> Array:
        """Streams -> [B, L, D] for the head."""
        return streams

    @classmethod
    def named_streams(cls, streams: typing.Any) -> dict[str, Array]:
        """The streams by name, for tools that watch them."""
        leaves = streams if isinstance(streams, tuple) else (streams,)
        return dict(zip(cls.stream_names, leaves, strict=True))

    @staticmethod
    def branch_gain(num_layers: int) -> float:
        """Factor on the initial W_v, W_o and MLP matrices; 1 unless the scheme prescribes one."""
        del num_layers
        return 1.0


Segments = tuple[tuple[Callable[[], Residual], int], ...]
_SCHEMES: dict[str, type[Residual]] = {}
_COMPOSITES: dict[str, Callable[..., Segments]] = {}


def register(name: str) -> Callable[[type[Residual]], type[Residual]]:
    """Class decorator: makes a scheme known to configurations under `name`."""

    def enter(scheme: type[Residual]) -> type[Residual]:
        if name in known_schemes():
            raise ValueError(f"residual scheme {name!r} is registered twice")
        _SCHEMES[name] = scheme
        return scheme

    return enter


def register_composite(name: str) -> Callable[[Callable[..., Segments]], Callable[..., Segments]]:
    """Decorator of a function (num_layers, norm, **options) -> segments: a stack of several schemes."""

    def enter(compose: Callable[..., Segments]) -> Callable[..., Segments]:
        if name in known_schemes():
            raise ValueError(f"residual scheme {name!r} is registered twice")
        _COMPOSITES[name] = compose
        return compose

    return enter


def known_schemes() -> list[str]:
    """Names of every scheme, in order of registration."""
    return [*_SCHEMES, *_COMPOSITES]


def _find(name: str) -> Callable:
    found = _SCHEMES.get(name) or _COMPOSITES.get(name)
    if found is None:
        near = difflib.get_close_matches(name, known_schemes(), n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise InputError(
            f"unknown residual scheme {name!r}{hint}: model.residual must be one of {', '.join(known_schemes())}"
        )
    return found


def scheme_options(name: str) -> dict[str, tuple[typing.Any, typing.Any]]:
    """{option: (type, default)} of a scheme; a Literal type lists the choices."""
    found = _find(name)
    if isinstance(found, type):
        base = {field.name for field in dataclasses.fields(Residual)}
        hints = typing.get_type_hints(found)
        return {
            field.name: (hints[field.name], field.default)
            for field in dataclasses.fields(found)
            if field.name not in base
        }
    hints = typing.get_type_hints(found)
    defaults = found.__kwdefaults__ or {}
    return {option: (hints[option], default) for option, default in defaults.items()}


def _check_option(scheme: str, option: str, value: typing.Any, kind: typing.Any) -> None:
    where = f"model.residual_options.{option} of scheme {scheme!r}"
    choices = typing.get_args(kind)
    if choices and value not in choices:
        raise InputError(f"{where} is {value!r}: it must be one of {', '.join(map(str, choices))}")
    accepted = (int, float) if kind is float else kind
    if not choices and (not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool)):
        raise InputError(f"{where} is {value!r}: it must be of type {kind.__name__}")


def resolve_options(name: str, options: Mapping[str, typing.Any]) -> dict[str, typing.Any]:
    """All options of a scheme with the given values (None = default) filled in and checked."""
    known = scheme_options(name)
    given = {option: value for option, value in options.items() if value is not None}
    for option, value in given.items():
        if option not in known:
            listed = ", ".join(known) or "it has none"
            raise InputError(f"residual scheme {name!r} has no option {option!r}; its options: {listed}")
        _check_option(name, option, value, known[option][0])
    return {option: given.get(option, default) for option, (_, default) in known.items()}


def layer_rows(text: str, num_layers: int, where: str) -> list[tuple[int, dict]]:
    """[(layer, row), ...] of "{0: {...}, (2, 3): {...}}", a Python literal; InputError where it is not that."""
    try:
        tree = ast.parse(text.strip() or "{}", mode="eval").body
        given = ast.literal_eval(tree)
        rows = [(layers if isinstance(layers, tuple) else (layers,), dict(row)) for layers, row in given.items()]
    except (ValueError, SyntaxError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise InputError(f"{where} is not of the form {{0: {{'option': value}}, (2, 3): {{...}}}}") from error
    if any(len(node.keys) != len(ast.literal_eval(node)) for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        raise InputError(f"{where} has a key twice")
    for layers, _ in rows:
        for layer in layers:
            if type(layer) is not int or not 0 <= layer < num_layers:
                raise InputError(f"{where}: there is no layer {layer!r}; layers are 0 to {num_layers - 1}")
    return [(layer, row) for layers, row in rows for layer in layers]


def parse_overrides(name: str, num_layers: int, text: str) -> dict[int, dict[str, typing.Any]]:
    """{layer: {option: value}} of model.residual_overrides; later rows count where two name one layer."""
    where = f"model.residual_overrides {text!r}"
    rows = layer_rows(text, num_layers, where)
    found = _find(name)
    if rows and not isinstance(found, type):
        raise InputError(f"{where}: the composite scheme {name!r} has layers of its own; override a plain scheme")
    overrides: dict[int, dict[str, typing.Any]] = {}
    for layer, row in rows:
        resolve_options(name, row)  # checks names and values
        for option in row.keys() & set(found.model_options):
            raise InputError(f"{where}: {option} belongs to the whole model; set it in model.residual_options")
        overrides.setdefault(layer, {}).update((k, v) for k, v in row.items() if v is not None)
    return overrides


def make_segments(
    name: str,
    num_layers: int,
    norm: Callable[..., nn.Module] = RMSNorm,
    options: Mapping | None = None,
    overrides: str = "",
    norms_in_branches: bool = False,
) -> Segments:
    """((scheme factory, number of layers), ...) of a whole stack.

    One segment, unless the scheme is a composite or some layers have options of their own (`overrides`, see
    `parse_overrides`): then one for every run of equal layers.
    """
    found = _find(name)
    resolved = resolve_options(name, options or {})
    own = parse_overrides(name, num_layers, overrides)
    if isinstance(found, type):
        layers = [
            SchemeFactory(found, num_layers, norm, tuple(sorted((resolved | own.get(i, {})).items())))
            for i in range(num_layers)
        ]
        segments = [(factory, len(list(equal))) for factory, equal in itertools.groupby(layers)]
    else:
        segments = [(factory, count) for factory, count in found(num_layers, norm, **resolved) if count]
    if norms_in_branches:
        segments = [(_with_norms_in_branches(name, factory), count) for factory, count in segments]
    return tuple(segments)


def _with_norms_in_branches(name: str, factory: "SchemeFactory") -> "SchemeFactory":
    if factory.scheme.why_no_norms_in_branches:
        raise InputError(
            f"model.residual {name!r} does not fit branches with modulated norms of their own: "
            f"{factory.scheme.why_no_norms_in_branches}: choose another scheme, such as siamese or pre"
        )
    for option, value in factory.options:
        if option in factory.scheme.replaced_options and not value:
            raise InputError(
                f"model.residual_options.{option} of scheme {name!r} is off, but this model's modulated norms "
                "stand in the place of that norm, always: leave the option on"
            )
    return dataclasses.replace(factory, norms_in_branches=True)


@dataclasses.dataclass(frozen=True)
class SchemeFactory:
    """Makes one scheme's module; hashable, so that modules holding it can be compared and cached."""

    scheme: type[Residual]
    num_layers: int
    norm: Callable[..., nn.Module]
    options: tuple[tuple[str, typing.Any], ...] = ()
    norms_in_branches: bool = False

    def __call__(self) -> Residual:
        return self.scheme(
            num_layers=self.num_layers, norm=self.norm, norms_in_branches=self.norms_in_branches,
            **dict(self.options),
        )  # fmt: skip
