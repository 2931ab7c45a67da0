"""Command line and YAML file to a dataclass of flags: command line over file over default."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from moesaic.config.flags import (
    ALL,
    ONLY_DEFAULT,
    FlagSpec,
    build,
    find_field,
    nearest,
    parse_text,
    remedy,
    specs,
)

Args = TypeVar("Args")


class FlagParser(argparse.ArgumentParser):
    """An argparse parser that raises ValueError in one line and accepts no abbreviations."""

    def __init__(self, prog: str, usage: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.flags: list[str] = ["--config"]
        self.left_out: dict[str, str] = {}
        self.add_argument(
            "--config",
            metavar="FILE",
            type=Path,
            help="YAML file with the same flags as keys; the command line wins over it",
        )

    def add_flags(self, cls: type[Any], leave_out: Collection[str] = ()) -> None:
        """Add the flags of a dataclass, except the groups in leave_out. A name that is already
        taken keeps its meaning: an alias elsewhere may be a command's own flag."""
        groups: dict[str, argparse._ArgumentGroup] = {}
        for spec in specs(cls).values():
            if spec.group in leave_out:
                self.left_out |= dict.fromkeys(spec.names, spec.group)
                continue
            if spec.group not in groups:
                groups[spec.group] = self.add_argument_group(spec.group)
            if names := [name for name in spec.names if name not in self.flags]:
                _add_flag(groups[spec.group], spec, names)
                self.flags.extend(names)

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """The given flags as text; an unknown flag is an error with a hint."""
        namespace, rest = self.parse_known_args(list(argv))
        if rest:
            raise ValueError(self._complaint(rest[0].split("=")[0]))
        return vars(namespace)

    def _complaint(self, word: str) -> str:
        if word in self.left_out:
            return f"{word} is a flag of the {self.left_out[word]}: {self.prog} does not take it"
        kind = "unknown flag" if word.startswith("-") else "unexpected argument"
        return f"{kind} {word}{nearest(word, self.flags)}"

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _add_flag(group: argparse._ArgumentGroup, spec: FlagSpec, names: Sequence[str]) -> None:
    common: dict[str, Any] = {"dest": spec.field, "default": argparse.SUPPRESS}
    if spec.kind is bool:
        group.add_argument(*names, action="store_true", help=_help(spec), **common)
        # The command line can override a file that switches the flag on.
        off = f"--no-{spec.name.removeprefix('--')}"
        group.add_argument(off, action="store_false", help=argparse.SUPPRESS, **common)
        return
    if spec.many:
        common |= {"action": "append"} if spec.flag.repeat else {"nargs": "+"}
    group.add_argument(*names, metavar=_metavar(spec), help=_help(spec), **common)


def _metavar(spec: FlagSpec) -> str:
    if spec.flag.choices:
        return "{" + ",".join(map(str, spec.flag.choices)) + "}"
    return spec.flag.metavar or {int: "N", float: "X", str: "TEXT"}[spec.kind]


def _help(spec: FlagSpec) -> str:
    plain = spec.default in (None, "", ()) or spec.kind is bool
    default = "" if plain else f" [default: {spec.default}]"
    return (spec.flag.help + default + _built(spec)).replace("%", "%%")


def _built(spec: FlagSpec) -> str:
    if spec.flag.built is ALL:
        return ""
    return " [not built yet]" if spec.flag.built is ONLY_DEFAULT else f" [{remedy(spec)}]"


def read_config(cls: type[Any], path: Path | None) -> dict[str, Any]:
    """Field values from a YAML file, if given, whose keys are flags without the leading dashes."""
    if path is None:
        return {}
    import yaml  # most runs have no file, and --help must be quick

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config {path} is not readable: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: expected lines 'flag: value', found {content!r}")
    values: dict[str, Any] = {}
    for key, value in content.items():
        try:
            field = find_field(cls, str(key))
        except KeyError as error:
            raise ValueError(f"--config {path}: unknown key {error.args[0]}") from None
        if field in values:
            raise ValueError(f"--config {path}: {field!r} is given twice, once as {key!r}")
        values[field] = value
    return values


def merge(cls: type[Args], given: Mapping[str, Any], file: Mapping[str, Any]) -> Args:
    """Build the dataclass from the command line's text and the file's values."""
    typed = {
        field: _typed(spec, given[field]) for field, spec in specs(cls).items() if field in given
    }
    return build(cls, file, typed)


def _typed(spec: FlagSpec, given: Any) -> Any:
    if spec.kind is bool:
        return given
    if spec.many:
        return tuple(parse_text(spec, word) for word in given)
    return parse_text(spec, given)
