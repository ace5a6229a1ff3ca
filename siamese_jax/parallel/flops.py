"""The arithmetic of a program, read from its jaxpr, so before any compiler has changed it.

Matrix products and convolutions only, of one execution over all devices.
"""

import math
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr


def program_flops(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """FLOPs of all matrix products and convolutions of a jaxpr, over all devices.

    A scan counts times its length, a shard_map times its devices, the dearest branch of a cond, a while once.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation) -> int:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot_flops(equation)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        outputs = kernel[parameters["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // outputs
    inner = [program_flops(jaxpr) for value in parameters.values() for jaxpr in _jaxprs(value)]
    if name == "cond":
        return max(inner, default=0)
    if name == "scan":
        return parameters["length"] * sum(inner)
    return sum(inner) * (_devices(parameters) if name == "shard_map" else 1)


def _dot_flops(equation) -> int:
    left = equation.invars[0].aval.shape
    (contracted, _), _ = equation.params["dimension_numbers"]
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _jaxprs(value) -> Iterator[Jaxpr | ClosedJaxpr]:
    if isinstance(value, Jaxpr | ClosedJaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _jaxprs(part)


def _devices(parameters: dict) -> int:
    """How many times the body of a shard_map runs."""
    sizes = parameters["mesh"].shape
    axes = parameters.get("newly_manual_axes", parameters.get("manual_axes")) or sizes
    return math.prod(sizes[axis] for axis in axes)
