"""Compiles kernels for a GPU that need not be there, and reads what they would take of it.

Not a test itself: Triton must not be in its interpreter's mode for this, so tests run modules that
use it as programs of their own (test_aot.py).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

HOPPER = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DISASSEMBLER = TOOLS / "cuobjdump"


@dataclass(frozen=True)
class Usage:
    """`local`: bytes of stack a thread needs, which is where spilled registers go."""

    registers: int
    local: int
    shared: int
    ptx: str

    def count(self, instruction: str) -> int:
        return self.ptx.count(instruction)


def build(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    *,
    target: GPUTarget = HOPPER,
    aligned: tuple[str, ...] = (),
    **options: Any,
) -> Usage:
    """`types`: by parameter, like {"x": "*bf16", "n": "i32"}; all others are `constants`.
    `aligned`: integers that are multiples of 16; pointers are taken to be."""
    signature = {
        name: types.get(name, "constexpr") for name in kernel.arg_names if name not in constants
    } | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    divisible = [["tt.divisibility", 16]]
    attributes = {
        (place,): divisible
        for place, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in aligned
    }
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(DISASSEMBLER), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    local = found["STACK"] + found.get("LOCAL", 0)
    return Usage(found["REG"], local, compiled.metadata.shared, compiled.asm["ptx"])
