"""SGLang's flags that are not ours: what each does here, and why.

The files in `sglang_flags` have groups of flags that are `accepted`, because nothing has to be done
for them, or `refused`; the text after the word is the reason. A line of a group is

    NAME, ALIAS KIND = VALUE | VALUE

KIND is switch, int, float, text, json or size (a whole number, also as 128k), and ends with + or *
for several words and with ? for one or none. The values are JSON: those, and the empty ones (null,
false, 0, ""), are as good as leaving the flag out.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moesaic.config.flags import Flag, FlagSpec, convert, has_key, parse_text, unbuilt

FOLDER = Path(__file__).parent / "sglang_flags"
KINDS = {"switch": bool, "int": int, "size": int, "float": float, "text": str, "json": str}


@dataclass(frozen=True)
class SglangFlag:
    spec: FlagSpec
    accepted: bool
    why: str
    arity: str
    """+, * or ? as in argparse; empty: one word, or none for a switch."""
    is_json: bool
    unset: tuple[Any, ...]
    """Values that are as good as leaving it out."""

    def is_unset(self, value: Any) -> bool:
        return value in self.unset or not value

    def typed(self, words: Any) -> Any:
        """The value of the words on a command line."""
        if self.spec.kind is bool or words is None:
            return words
        if isinstance(words, list):
            return tuple(parse_text(self.spec, word) for word in words)
        return _read_json(words) if self.is_json else parse_text(self.spec, words)


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@cache
def sglang_flags() -> dict[str, SglangFlag]:
    """The flags by field, in the order of the files."""
    found: dict[str, SglangFlag] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        for group in tomllib.loads(path.read_text(encoding="utf-8"))["group"]:
            for line in group["flags"].strip().splitlines():
                flag = _read_line(line, group)
                assert flag.spec.field not in found, f"{flag.spec.name} is in two groups"
                found[flag.spec.field] = flag
    return found


def _read_line(line: str, group: Mapping[str, str]) -> SglangFlag:
    left, _, values = line.partition(" = ")
    names, _, kind = left.rpartition(" ")
    name, *aliases = names.split(", ")
    word = kind.rstrip("+*?")
    arity, accepted = kind[len(word) :], "accepted" in group
    flag = Flag("", aliases=tuple(f"--{alias}" for alias in aliases), suffixes=word == "size")
    field, many = name.replace("-", "_"), arity in ("+", "*")
    return SglangFlag(
        FlagSpec(field, KINDS[word], True, many, None, group["title"], flag),
        accepted,
        group["accepted" if accepted else "refused"],
        arity,
        word == "json",
        tuple(json.loads(value) for value in values.split(" | ")) if values else (),
    )


@cache
def _fields_by_key() -> dict[str, str]:
    return {
        name.removeprefix("--").replace("-", "_"): field
        for field, flag in sglang_flags().items()
        for name in flag.spec.names
    }


def takes_sglang_flags(cls: type[Any]) -> bool:
    return getattr(cls, "TAKES_SGLANG_FLAGS", False)


def find_sglang_flag(cls: type[Any], key: str) -> str | None:
    """The field of a file's key or a keyword, if it is one of these flags and not of `cls`."""
    if has_key(cls, key) or not takes_sglang_flags(cls):
        return None
    return _fields_by_key().get(key.replace("-", "_"))


def refuse(values: Mapping[str, Any], args: object, wrong: Sequence[str] = ()) -> None:
    """Raise ValueError for what is wrong and all that is refused; then it also names what is not
    built yet of our own flags."""
    refused = _refusals(values)
    if wrong or refused:
        parts = [
            *wrong,
            *_listed("not supported", refused),
            *_listed("not built yet", unbuilt(args)),
        ]
        raise ValueError("; ".join(parts))
    for field, value in values.items():
        flag = sglang_flags()[field]
        if flag.accepted and not flag.is_json:
            convert(flag.spec, value)


def _listed(title: str, parts: Sequence[str]) -> list[str]:
    return [f"{title}: {'; '.join(parts)}"] if parts else []


def _refusals(values: Mapping[str, Any]) -> list[str]:
    names: dict[str, list[str]] = {}
    for field, value in values.items():
        flag = sglang_flags()[field]
        if not flag.accepted and not flag.is_unset(value):
            names.setdefault(flag.why, []).append(flag.spec.name)
    return [f"{', '.join(given)} ({why})" for why, given in names.items()]


def notes(values: Mapping[str, Any]) -> Iterable[str]:
    """What to log about accepted flags."""
    for field, value in values.items():
        flag = sglang_flags()[field]
        if flag.accepted and not flag.is_unset(value):
            yield f"{flag.spec.name}: {flag.why}"
