"""Read XLA's text of a compiled program (`compiled.as_text()`): its instructions, loops and estimated cycles."""

import re
from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*)$")
CALLS = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")

# Instructions that only refer to the results of others.
LINKS = ("get-tuple-element", "tuple", "parameter", "constant", "while", "call", "bitcast", "opt-barrier")


class Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    operands: str
    attributes: str


Program = dict[str, list[Instruction]]


def estimated_cycles(hlo_text: str) -> int:
    """Return the sum of XLA:TPU's estimates over a step, loop bodies times their trip counts; 0 for other programs."""
    program, entry = read_program(hlo_text)
    total = 0
    for name, times, _, caller in visits(program, entry, entry):
        for instruction in program[name] if name == caller else []:  # a fusion's estimate covers its instructions
            total += times * instruction_cycles(instruction)
    return total


def instruction_cycles(instruction: Instruction) -> int:
    """Return XLA:TPU's estimate of one execution of an instruction; 0 if it has none."""
    cycles = re.search(r'"estimated_cycles":"?(\d+)', instruction.attributes)
    return int(cycles[1]) if cycles else 0


def traffic(hlo_text: str, of: Callable[[Instruction], bool] = lambda instruction: True) -> int:
    """Return the bytes that instructions (those that are `of` interest) read and write in memory a step, loop bodies
    times their trip counts. Each operand and result counts once, as in a fusion's kernel. On a GPU that bounds the time
    from below."""
    return sum(times * sum(map(type_bytes, (i.type, *reads))) for i, times, reads in kernels(hlo_text) if of(i))


def kernels(hlo_text: str) -> Iterator[tuple[Instruction, int, list[str]]]:
    """Yield instructions that read or write memory, how often a step, and the types of what each reads."""
    program, entry = read_program(hlo_text)
    for name, times, _, caller in visits(program, entry, entry):
        types = {instruction.name: instruction.type for instruction in program[name]}
        for i in program[name] if name == caller else []:  # values inside a fusion stay in registers
            if i.opcode not in LINKS and not i.opcode.endswith(("-done", "-update")):
                yield i, times, [types[operand] for operand in set(names(i.operands)) & types.keys()]


def read_program(hlo_text: str) -> tuple[Program, str]:
    """Return the instructions of each computation, and the name of the entry computation."""
    program, entry, current = {}, "", []
    for line in hlo_text.splitlines():
        if match := COMPUTATION.match(line):
            current = program[match[2]] = []
            entry = match[2] if match[1] else entry
        elif match := INSTRUCTION.match(line):
            current.append(Instruction(*match.groups()))
    return program, entry


def visits(
    program: Program, name: str, caller: str, times: int = 1, in_loop: bool = False
) -> Iterator[tuple[str, int, bool, str]]:
    """Yield (computation, times a step, in a loop, the computation or the one around its fusion), recursively."""
    yield name, times, in_loop, caller
    for instruction in program[name]:
        fusion, loop = instruction.opcode == "fusion", instruction.opcode == "while"
        # The end of an asynchronous pair may name its computation again.
        called = [] if instruction.opcode.endswith(("-done", "-update")) else CALLS.findall(instruction.attributes)
        for callee in [callee for text in called for callee in names(text)]:
            runs = times * trip_count(program, instruction) if loop else times
            yield from visits(program, callee, caller if fusion or name != caller else callee, runs, in_loop or loop)


def trip_count(program: Program, loop: Instruction) -> int:
    """Return a loop's trip count: XLA's note, or the only constant of the condition, since JAX's loops count from 0 by
    1. Raise ValueError if the program has neither."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    limits = [i.operands for i in program[condition[1]] if i.opcode == "constant"] if condition else []
    if len(limits) != 1 or not limits[0].isdigit():
        raise ValueError(f"the trip count of {loop.name} is not in the program; its condition compares with {limits}")
    return int(limits[0])


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def names(text: str) -> list[str]:
    return re.findall(r"[\w.\-]+", re.sub(r"/\*.*?\*/", "", text))


def type_bytes(text: str) -> int:
    """Return the bytes of an HLO type, tuples included; tokens have none."""
    bits = lambda dtype: 8 if dtype == "pred" else next(iter(numbers(dtype)), 0)
    return sum(bits(dtype) * prod(numbers(sizes)) for dtype, sizes in re.findall(r"(\w+)\[([\d,<=]*)\]", text)) // 8
