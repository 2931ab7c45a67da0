"""docs/flags.md from the declarations: `python -m moesaic.config.docs docs/flags.md`."""

import sys
from pathlib import Path

from moesaic.config.args import ServerArgs
from moesaic.config.flags import ALL, FlagSpec, range_words, specs
from moesaic.config.sglang import sglang_flags

HEAD = """\
# Flags

Written by `make docs` from `moesaic/config`; a test compares the two.

Every flag can be given on the command line (`--page-size 32`), as a key of a YAML file named by
`--config` (`page-size: 32`), or as a keyword of `moesaic.Engine` (`page_size=32`). The command
line wins over the file. A switch that a file turns on is turned off by `--no-` in front of its
name. What is not built yet is refused, never ignored: where "built" says no, only the default is
accepted; where it lists values, only those. Numbers of tokens such as `--context-length` may be
written as `128k` or `1Mi`, also in the file and as a keyword (`context_length="128k"`). The
beginning of a flag is enough on the command line where no other flag begins so.
[SGLang's other flags](#sglangs-other-flags) are at the end.
"""
SGLANG = """
## SGLang's other flags

The flags of SGLang 0.5.23 that are not above, so that its command lines can be pasted. Accepted:
Moesaic already does this, or the flag only tunes how fast SGLang works; the log says which. Refused
ones are reported all at once, with the reason. A refused flag that is switched off or has its
default is ignored.

| flags | what happens | why |
|---|---|---|
"""


def markdown() -> str:
    parts = [HEAD]
    group = ""
    for spec in specs(ServerArgs).values():
        if spec.group != group:
            group = spec.group
            parts.append(
                f"\n## {group}\n\n"
                "| flag | also | default | values | built | meaning |\n"
                "|---|---|---|---|---|---|\n"
            )
        parts.append("| " + " | ".join(_cells(spec)) + " |\n")
    return "".join([*parts, SGLANG, *_sglang_rows()])


def _sglang_rows() -> list[str]:
    names: dict[tuple[str, str], list[str]] = {}
    for flag in sglang_flags().values():
        key = "accepted" if flag.accepted else "refused", flag.why
        names.setdefault(key, []).extend(f"`{name}`" for name in flag.spec.names)
    return [f"| {', '.join(found)} | {how} | {why} |\n" for (how, why), found in names.items()]


def _cells(spec: FlagSpec) -> list[str]:
    aliases = ", ".join(f"`{alias}`" for alias in spec.flag.aliases)
    return [f"`{spec.name}`", aliases, _default(spec), _values(spec), _built(spec), spec.flag.help]


def _built(spec: FlagSpec) -> str:
    if isinstance(spec.flag.built, tuple):
        return ", ".join(f"`{value}`" for value in (*spec.flag.built, *spec.flag.idle))
    return "yes" if spec.flag.built is ALL else "no"


def _default(spec: FlagSpec) -> str:
    if spec.kind is bool:
        return "auto" if spec.default is None else "off"
    return "" if spec.default in (None, "", ()) else f"`{spec.default}`"


def _values(spec: FlagSpec) -> str:
    if spec.flag.choices:
        same = [f"`{name}` for `{choice}`" for name, choice in spec.flag.same.items()]
        known = [f"`{choice}`" for choice in spec.flag.choices if choice not in spec.flag.same]
        return ", ".join([*known, *same])
    if spec.flag.json:
        return "JSON object"
    kind = {bool: "switch", int: "whole number", float: "number", str: "text"}[spec.kind]
    several = " (several)" if spec.many else ""
    bounds = range_words(spec.flag)
    return f"{kind}{several}" + (f", {bounds}" if bounds else "")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
