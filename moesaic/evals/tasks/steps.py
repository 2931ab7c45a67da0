"""Steps that solutions share."""

from __future__ import annotations

from collections.abc import Sequence


def scan(names: Sequence[str], values: Sequence[str], wanted: str) -> str:
    """Entry by entry until the value is there, as in "Ana 12 no, Ben 41 yes.": a small model finds
    what stands behind a word at once, and what stands before it only so."""
    tried = []
    for name, value in zip(names, values, strict=True):
        tried.append(f"{name} {value} {'yes' if value == wanted else 'no'}")
        if value == wanted:
            break
    return ", ".join(tried) + "."
