"""What a compiled program does, read from its text (optimised HLO) and from its jaxpr.

Arithmetic, collectives and memory traffic of one execution on one device, loops times their trip counts.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from jax.extend.core import ClosedJaxpr, Jaxpr

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ROLES = "calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations"
SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
DEFINITION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
OPCODE = re.compile(r"\s*([a-z][\w-]*)\(")
CALLED = re.compile(rf"\b({ROLES})=(\{{[^{{}}]*\}}|%?[\w.-]+)")
HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
SPACE = re.compile(r"S\((\d+)\)")
TRIP_COUNT = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)"?\}')
FREE = ("bitcast", "reshape")  # the same bytes under another shape, inside a fusion
SAME_VALUE = (*FREE, "copy", "convert", "copy-start", "copy-done", "optimization-barrier")
SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = ("dynamic-update-slice", "scatter")
MARKERS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")  # custom calls that move nothing
FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
NO_TRAFFIC = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"),
    *("after-all", "partition-id", "replica-id", "optimization-barrier", "add-dependency", "domain"),
    *("async-start", "async-update"),
}


@dataclass(frozen=True)
class Shape:
    """One array: its type, its dimensions and its memory space (0: main memory)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        width = int(bits.group()) if bits else 8 * (self.dtype == "pred")
        return -(-math.prod(self.dims) * width // 8)

    @property
    def traffic(self) -> int:
        """Bytes of main memory: none for what lies in vector, scalar or host memory."""
        return 0 if self.space else self.bytes


@dataclass(frozen=True)
class Instruction:
    """One line of a computation; `results` are the arrays of the result, nested tuples flattened."""

    name: str
    opcode: str
    results: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    called: tuple[tuple[str, str], ...]
    attributes: str

    def callees(self, *roles: str) -> list[str]:
        return [name for role, name in self.called if role in roles]

    def attribute(self, key: str) -> str:
        found = re.search(rf'\b{key}="?([\w.-]+)', self.attributes)
        return found.group(1) if found else ""


@dataclass
class Computation:
    """Instructions in order, with the name of the root."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def parameters(self) -> dict[int, str]:
        return {int(i.arguments): i.name for i in self.instructions.values() if i.opcode == "parameter"}

    def users(self, name: str) -> list[Instruction]:
        return [i for i in self.instructions.values() if name in i.operands]

    def marked(self, target: str) -> bool:
        return any(i.attribute("custom_call_target") == target for i in self.instructions.values())


@dataclass
class Program:
    """All computations of a text, and who calls each."""

    computations: dict[str, Computation] = field(default_factory=dict)
    entry: str = ""
    callers: dict[str, list[tuple[Computation, Instruction]]] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)  # the collectives that are no later part of a chain


def program_flops(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """FLOPs of all matrix products and convolutions of a jaxpr, over all devices.

    A scan counts times its length, a shard_map times its devices, the dearest branch of a cond, a while once.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def collectives(hlo_text: str) -> dict[str, dict[str, int]]:
    """Per kind of collective: how often it runs in one execution, and the bytes that one device receives."""
    program = parse(hlo_text)
    total = _total(program, program.entry, _collective_cost, ("call", "async-start", "fusion"))
    return {kind: {key: total[kind, key] for key in ("count", "bytes")} for kind in KINDS}


def gathered_shapes(hlo_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Type and shape of every all-gather's result; one inside a loop appears once."""
    program = parse(hlo_text)
    return [
        (shape.dtype, shape.dims)
        for computation, instruction in _instructions(program)
        if _kind(computation, instruction) == "all-gather" and instruction.name in program.counted
        for shape in _received(instruction)
    ]


def memory_traffic(hlo_text: str) -> int:
    """Estimate of the bytes that one device reads and writes in its main memory in one execution."""
    program = parse(hlo_text)
    return _total(program, program.entry, _traffic_cost, ("call", "async-start"))["traffic"]


@lru_cache(maxsize=2)
def parse(hlo_text: str) -> Program:
    """The computations of an optimised HLO text."""
    program, current = Program(), None
    for line in hlo_text.splitlines():
        if line[:1] not in ("", " ", "}") and "->" in line and (header := HEADER.match(line)):
            current = program.computations.setdefault(header.group(2), Computation(header.group(2)))
            program.entry = current.name if header.group(1) else program.entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (instruction := _parse_instruction(line)):
            current.instructions[instruction.name] = instruction
            current.root = instruction.name if line.lstrip().startswith("ROOT ") else current.root
    for computation, instruction in _instructions(program):
        for _, name in instruction.called:
            program.callers.setdefault(name, []).append((computation, instruction))
    program.counted = _counted(program)
    return program


def _parse_instruction(line: str) -> Instruction | None:
    line = re.sub(r"/\*index=\d+\*/", "", line)
    start = DEFINITION.match(line)
    if not start:
        return None
    cut = _closing(line, start.end()) if line[start.end()] == "(" else line.index(" ", start.end())
    opcode = OPCODE.match(line, cut)
    if not opcode:
        return None
    end = _closing(line, opcode.end() - 1)
    arguments, attributes = line[opcode.end() : end - 1], line[end:]
    called = [(role, name) for role, names in CALLED.findall(attributes) for name in re.findall(r"[\w.-]+", names)]
    return Instruction(
        name=start.group(2),
        opcode=opcode.group(1),
        results=tuple(_shapes(line[start.end() : cut])),
        operands=tuple(re.findall(r"%([\w.-]+)", arguments)),
        arguments=arguments,
        called=tuple(called),
        attributes=attributes,
    )


def _closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found.group() == "(" else -1
        if not depth:
            return found.end()
    return len(text)


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims, layout in SHAPE.findall(text):
        space = SPACE.search(layout)
        sizes = tuple(int(size) for size in re.findall(r"\d+", dims))
        yield Shape(dtype, sizes, int(space.group(1)) if space else 0)


def _instructions(program: Program) -> Iterator[tuple[Computation, Instruction]]:
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            yield computation, instruction


# The loops: each instruction runs once per trip of the loops around it.


Cost = Callable[[Program, Computation, Instruction], Counter]


def _total(program: Program, name: str, cost: Cost, enter: tuple[str, ...]) -> Counter:
    """The cost of one execution of a computation; `enter`: opcodes whose callees cost on their own."""
    total: Counter = Counter()
    computation = program.computations.get(name, Computation(name))
    for instruction in computation.instructions.values():
        total.update(cost(program, computation, instruction))
        if instruction.opcode == "while":
            trips = _trip_count(program, computation, instruction)
            once = _total(program, instruction.callees("body")[0], cost, enter)
            total.update({key: value * trips for key, value in once.items()})
        elif instruction.opcode == "conditional":
            dearest: Counter = Counter()
            for _, branch in instruction.called:
                dearest |= _total(program, branch, cost, enter)
            total.update(dearest)
        elif instruction.opcode in enter:
            for _, callee in instruction.called:
                total.update(_total(program, callee, cost, enter))
    return total


def _trip_count(program: Program, computation: Computation, loop: Instruction) -> int:
    """What the compiler noted, or what the condition's comparison with a constant tells, or 1."""
    if known := TRIP_COUNT.search(loop.attributes):
        return int(known.group(1))
    condition = program.computations[loop.callees("condition")[0]]
    body = program.computations[loop.callees("body")[0]]
    where, compare = _origin(program, condition, condition.root)
    if compare.opcode != "compare" or len(compare.operands) != 2:
        return 1
    left, right = compare.operands
    direction = compare.attribute("direction")
    guesses = []
    for counter, limit, sense in ((left, right, direction), (right, left, FLIPPED.get(direction, ""))):
        index, last = _carried(program, where, counter), _constant(program, where, limit)
        if index is None or last is None:
            continue
        step = _step(program, body, index)
        first = _initial(program, computation, loop, index) or 0
        guesses.append((step is None, _trips(first, last, step or 1, sense)))
    return min(guesses)[1] if guesses else 1


def _trips(first: int, last: int, step: int, direction: str) -> int:
    if direction in ("LE", "GE"):
        last += 1 if direction == "LE" else -1
    return max(0, -((first - last) // step)) if direction in ("LT", "LE", "GT", "GE", "NE") else 1


def _step(program: Program, body: Computation, index: int) -> int | None:
    """By how much the loop's value `index` grows in one trip."""
    where, root = _origin(program, body, body.root)
    if root.opcode != "tuple":
        return None
    where, change = _origin(program, where, root.operands[index])
    if change.opcode not in ("add", "subtract"):
        return None
    for value, by in (change.operands, change.operands[::-1]):
        amount = _constant(program, where, by)
        if _carried(program, where, value) == index and amount is not None:
            return amount if change.opcode == "add" else -amount
    return None


def _initial(program: Program, computation: Computation, loop: Instruction, index: int) -> int | None:
    where, start = _origin(program, computation, loop.operands[0])
    return _constant(program, where, start.operands[index]) if start.opcode == "tuple" else None


def _constant(program: Program, computation: Computation, name: str) -> int | None:
    """A scalar's value; of a value that a loop carries, the one it starts with."""
    where, origin = _origin(program, computation, name)
    if origin.opcode == "constant":
        return int(origin.arguments) if re.fullmatch(r"-?\d+", origin.arguments) else None
    index = _carried(program, computation, name)
    if index is None:
        return None
    outer, loop = program.callers[where.name][0]
    return _initial(program, outer, loop, index)


def _carried(program: Program, computation: Computation, name: str) -> int | None:
    """The position of a value among those that the loop around it carries."""
    where, origin = _origin(program, computation, name)
    source = where.instructions.get(origin.operands[0]) if origin.operands else None
    callers = program.callers.get(where.name)
    if origin.opcode != "get-tuple-element" or source is None or source.opcode != "parameter":
        return None
    return int(origin.attribute("index")) if callers and callers[0][1].opcode == "while" else None


def _origin(program: Program, computation: Computation, name: str) -> tuple[Computation, Instruction]:
    """The instruction that makes a value, through copies, tuples and the borders of fusions."""
    instruction = computation.instructions[name]
    callers = program.callers.get(computation.name, [])
    if instruction.opcode in SAME_VALUE and instruction.operands:
        return _origin(program, computation, instruction.operands[0])
    if instruction.opcode in ("fusion", "call") and len(instruction.results) == 1:
        callee = program.computations[instruction.callees("calls", "to_apply")[0]]
        return _origin(program, callee, callee.root)
    if instruction.opcode == "parameter" and callers and callers[0][1].opcode in ("fusion", "call"):
        return _origin(program, callers[0][0], callers[0][1].operands[int(instruction.arguments)])
    if instruction.opcode == "get-tuple-element":
        where, source = _origin(program, computation, instruction.operands[0])
        if source.opcode == "tuple":
            return _origin(program, where, source.operands[int(instruction.attribute("index"))])
    return computation, instruction


# Collectives


def _collective_cost(program: Program, computation: Computation, instruction: Instruction) -> Counter:
    kind = _kind(computation, instruction)
    if not kind or instruction.name not in program.counted:
        return Counter()
    shapes = _received(instruction)
    if instruction.opcode.startswith("reduce-scatter"):
        shapes = [shape for name in instruction.operands for shape in computation.instructions[name].results]
    return Counter({(kind, "count"): 1, (kind, "bytes"): sum(shape.bytes for shape in shapes)})


def _kind(computation: Computation, instruction: Instruction) -> str:
    kind = instruction.opcode.removesuffix("-start")
    # on TPU a reduce-scatter is a fusion of an all-reduce and the slice each device keeps
    if kind == "all-reduce" and "all-reduce-scatter" in computation.name:
        return "reduce-scatter"
    return kind if kind in KINDS else ""


def _received(instruction: Instruction) -> list[Shape]:
    """The arrays that an instruction makes; a start's tuple also holds its operands and contexts."""
    if instruction.opcode == "copy-start":
        return list(instruction.results[:1])
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return list(instruction.results)
    count = len(instruction.operands)
    return list(instruction.results[count : 2 * count])


def _counted(program: Program) -> set[str]:
    """Names of the collectives to count.

    On TPU an asynchronous one is repeated in each fusion that it overlaps, under one chain_id: the first counts.
    """
    names, chains = set(), {}
    started = {name for name, part in program.computations.items() if part.marked("AsyncCollectiveStart")}
    started |= {callee for name in started for i in _fusions(program, name) for callee in i.callees("calls")}
    for computation, instruction in _instructions(program):
        if not _kind(computation, instruction):
            continue
        chain = instruction.attribute("chain_id")
        if not chain:
            names.add(instruction.name)
            continue
        key = (instruction.opcode, chain, instruction.attribute("channel_id"))
        chains.setdefault(key, []).append((computation.name in started, instruction.name))
    for links in chains.values():
        names |= {name for first, name in links if first} or {links[0][1]}
    return names


def _fusions(program: Program, name: str) -> list[Instruction]:
    return [i for i in program.computations[name].instructions.values() if i.opcode == "fusion"]


# Memory traffic


def _traffic_cost(program: Program, computation: Computation, instruction: Instruction) -> Counter:
    return Counter({"traffic": _traffic(program, computation, instruction)})


def _traffic(program: Program, computation: Computation, instruction: Instruction) -> int:
    opcode, operands = instruction.opcode, instruction.operands
    marker = instruction.attribute("custom_call_target") in MARKERS
    if opcode in NO_TRAFFIC or opcode.endswith("-done") or marker:
        return 0
    if opcode == "fusion":
        return _fusion_traffic(program, computation, instruction)
    made = _received(instruction)
    if opcode in UPDATES:
        update = _results(computation, _update(instruction))
        into = sum(shape.bytes for shape in update if not made[0].space)
        return into + sum(shape.traffic for shape in update)
    if opcode.removesuffix("-start") in SLICES:
        source = _results(computation, operands[0])
        read = sum(shape.bytes for shape in made) if any(shape.traffic for shape in source) else 0
        operands = operands[1:]
    else:
        read = 0
    read += sum(shape.traffic for name in operands for shape in _results(computation, name))
    return read + sum(shape.traffic for shape in made)


def _results(computation: Computation, name: str) -> tuple[Shape, ...]:
    found = computation.instructions.get(name)
    return found.results if found else ()


def _update(instruction: Instruction) -> str:
    return instruction.operands[1 if instruction.opcode == "dynamic-update-slice" else -1]


def _fusion_traffic(program: Program, computation: Computation, instruction: Instruction) -> int:
    fused = program.computations[instruction.callees("calls")[0]]
    if fused.marked("AsyncCollectiveDone"):
        return 0
    parameters = fused.parameters()
    leaves = _leaves(program, fused, fused.root)
    in_place = {leaf.name for _, leaf in leaves if leaf.opcode in UPDATES}
    read = 0
    for position, name in enumerate(instruction.operands):
        whole = sum(shape.traffic for shape in _results(computation, name))
        if whole:
            read += min(whole, _bytes_read(program, fused, parameters[position], whole, in_place))
    if fused.marked("AsyncCollectiveStart"):  # the first result is the operand itself
        return read + sum(shape.traffic for shape in instruction.results[1:])
    if len(leaves) != len(instruction.results):
        return read + sum(shape.traffic for shape in instruction.results)
    written = zip(instruction.results, leaves, strict=True)
    return read + sum(_bytes_written(program, shape, *leaf) for shape, leaf in written if not shape.space)


def _leaves(program: Program, computation: Computation, name: str) -> list[tuple[Computation, Instruction]]:
    """What makes each array of a fusion's result."""
    instruction = computation.instructions[name]
    if instruction.opcode == "tuple":
        return [leaf for operand in instruction.operands for leaf in _leaves(program, computation, operand)]
    source = computation.instructions[instruction.operands[0]] if instruction.operands else None
    if instruction.opcode in FREE and source and source.opcode != "parameter":
        return _leaves(program, computation, source.name)
    if instruction.opcode == "fusion" and len(instruction.results) == 1:
        callee = program.computations[instruction.callees("calls")[0]]
        leaves = _leaves(program, callee, callee.root)
        return leaves if leaves[0][1].opcode in UPDATES else [(computation, instruction)]
    return [(computation, instruction)]


def _bytes_written(program: Program, shape: Shape, computation: Computation, leaf: Instruction) -> int:
    if leaf.opcode in UPDATES:
        return sum(part.bytes for part in _results(computation, _update(leaf)))
    return 0 if leaf.opcode == "parameter" or _continued(program, computation, leaf) else shape.bytes


def _continued(program: Program, computation: Computation, instruction: Instruction) -> bool:
    """Whether this is a later part of a collective that another fusion started."""
    return bool(_kind(computation, instruction)) and instruction.name not in program.counted


def _bytes_read(program: Program, fused: Computation, name: str, whole: int, in_place: set[str]) -> int:
    """Bytes of one operand that a fusion reads: slices only, where nothing else is taken."""
    read = 0
    for user in fused.users(name):
        if user.opcode in FREE and user.name != fused.root:
            read += _bytes_read(program, fused, user.name, whole, in_place)
        elif user.opcode in SLICES and user.operands[0] == name:
            read += sum(shape.bytes for shape in user.results)
        elif user.opcode == "fusion":
            callee = program.computations[user.callees("calls")[0]]
            for position in (at for at, operand in enumerate(user.operands) if operand == name):
                read += _bytes_read(program, callee, callee.parameters()[position], whole, in_place)
        elif not _aliased(program, fused, user, name, in_place):
            return whole
    return read


def _aliased(program: Program, fused: Computation, user: Instruction, name: str, in_place: set[str]) -> bool:
    """Whether the user passes its operand's buffer on, rather than reading it."""
    if user.name in in_place:
        return user.operands[0] == name
    if user.opcode == "tuple":
        return user.name == fused.root
    handed_on = user.attribute("custom_call_target").startswith("AsyncCollective")
    return handed_on or _continued(program, fused, user)


# Arithmetic


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
