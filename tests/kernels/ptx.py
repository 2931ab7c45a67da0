"""A few instructions of PTX in Python: enough for what stands in kernels as such."""

from __future__ import annotations

import re
from collections.abc import Callable

WORD = 0xFFFFFFFF


def _prmt(a: int, b: int, selector: int) -> int:
    """Bytes of b above those of a; the top bit of a choice takes eight times the byte's sign."""
    out = 0
    for place in range(4):
        choice = selector >> 4 * place & 15
        byte = (b << 32 | a) >> 8 * (choice & 7) & 255
        if choice & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << 8 * place
    return out


def _lop3(a: int, b: int, c: int, table: int) -> int:
    out = 0
    for bit in range(32):
        entry = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        out |= (table >> entry & 1) << bit
    return out


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "shl.b32": lambda a, by: a << by & WORD,
    "shr.b32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
}


def run(text: str, inputs: dict[str, int]) -> dict[str, int]:
    """All registers at the end; an instruction that is not known is an error."""
    registers = dict(inputs)

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in re.findall(r"^\s*([a-z0-9.]+ [^;{]*);", text, re.MULTILINE):
        name, _, operands = line.partition(" ")
        if name == ".reg":
            continue
        into, *rest = (operand.strip() for operand in operands.split(","))
        registers[into] = INSTRUCTIONS[name](*map(value, rest))
    return registers
