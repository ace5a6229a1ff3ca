"""The text of a compiled program (optimised HLO), parsed into its computations, and the trip counts of its loops.

A line that is no instruction is left out; a loop whose count cannot be read counts once.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

ROLES = "calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations"
SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
DEFINITION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
OPCODE = re.compile(r"\s*([a-z][\w-]*)\(")
CALLED = re.compile(rf"\b({ROLES})=(\{{[^{{}}]*\}}|%?[\w.-]+)")
HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
KERNEL_NOTES = re.compile(r'\{\n(?:".*\n)+\}(?=\})')  # of a Pallas kernel, over several lines of its instruction
SPACE = re.compile(r"S\((\d+)\)")
TRIP_COUNT = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)"?\}')
FREE = ("bitcast", "reshape")  # the same bytes under another shape, inside a fusion
SAME_VALUE = (*FREE, "copy", "convert", "copy-start", "copy-done", "optimization-barrier")
FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


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


@dataclass(eq=False)
class Program:
    """All computations of a text, and who calls each."""

    computations: dict[str, Computation] = field(default_factory=dict)
    entry: str = ""
    callers: dict[str, list[tuple[Computation, Instruction]]] = field(default_factory=dict)

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                yield computation, instruction


@lru_cache(maxsize=2)
def parse(hlo_text: str) -> Program:
    """The computations of an optimised HLO text."""
    program, current = Program(), None
    for line in KERNEL_NOTES.sub("{}", hlo_text).splitlines():
        if line[:1] not in ("", " ", "}") and "->" in line and (header := HEADER.match(line)):
            current = program.computations.setdefault(header.group(2), Computation(header.group(2)))
            program.entry = current.name if header.group(1) else program.entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (instruction := _parse_instruction(line)):
            current.instructions[instruction.name] = instruction
            current.root = instruction.name if line.lstrip().startswith("ROOT ") else current.root
    for computation, instruction in program.instructions():
        for _, name in instruction.called:
            program.callers.setdefault(name, []).append((computation, instruction))
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


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int:
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
