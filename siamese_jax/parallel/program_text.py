"""What a compiled program moves, read from its text (optimised HLO): collectives and memory traffic.

Both are those of one execution on one device, loops times their trip counts.
"""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from siamese_jax.parallel.hlo import FREE, Computation, Instruction, Program, Shape, parse, trip_count

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = ("dynamic-update-slice", "scatter")
MARKERS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")  # custom calls that move nothing
NO_TRAFFIC = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"),
    *("after-all", "partition-id", "replica-id", "optimization-barrier", "add-dependency", "domain"),
    *("async-start", "async-update"),
}
Cost = Callable[[Program, Computation, Instruction], Counter]


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
        for computation, instruction in program.instructions()
        if _kind(computation, instruction) == "all-gather" and instruction.name in _counted(program)
        for shape in _received(instruction)
    ]


def memory_traffic(hlo_text: str) -> int:
    """Estimate of the bytes that one device reads and writes in its main memory in one execution."""
    program = parse(hlo_text)
    return _total(program, program.entry, _traffic_cost, ("call", "async-start"))["traffic"]


def _total(program: Program, name: str, cost: Cost, enter: tuple[str, ...]) -> Counter:
    """The cost of one execution of a computation; `enter`: opcodes whose callees cost on their own."""
    total: Counter = Counter()
    computation = program.computations.get(name, Computation(name))
    for instruction in computation.instructions.values():
        total.update(cost(program, computation, instruction))
        if instruction.opcode == "while":
            trips = trip_count(program, computation, instruction)
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


# Collectives


def _collective_cost(program: Program, computation: Computation, instruction: Instruction) -> Counter:
    kind = _kind(computation, instruction)
    if not kind or instruction.name not in _counted(program):
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


@lru_cache(maxsize=2)
def _counted(program: Program) -> set[str]:
    """Names of the collectives to count.

    On TPU an asynchronous one is repeated in each fusion that it overlaps, under one chain_id: the first counts.
    """
    names, chains = set(), {}
    started = {name for name, part in program.computations.items() if part.marked("AsyncCollectiveStart")}
    started |= {callee for name in started for i in _fusions(program, name) for callee in i.callees("calls")}
    for computation, instruction in program.instructions():
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
    return bool(_kind(computation, instruction)) and instruction.name not in _counted(program)


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
