"""Command line and YAML file to a dataclass of flags: command line over file over default."""

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from moesaic.config.flags import (
    ALL,
    ONLY_DEFAULT,
    FlagSpec,
    build_and_check,
    find_field,
    has_key,
    nearest_flag,
    parse_text,
    refuse_unbuilt,
    remedy,
    specs,
)
from moesaic.config.sglang import find_sglang_flag, refuse, sglang_flags, takes_sglang_flags

Args = TypeVar("Args")


class FlagParser(argparse.ArgumentParser):
    """An argparse parser that raises ValueError in one line. As with SGLang's, the beginning of a
    flag is enough where no other begins so."""

    def __init__(self, prog: str, usage: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.flags: list[str] = ["--config"]
        self.left_out: dict[str, str] = {}
        self._classes: list[type[Any]] = []
        self._takes_sglang_flags = False
        self.add_argument(
            "--config",
            metavar="FILE",
            type=Path,
            help="YAML file with the same flags as keys; the command line wins over it",
        )

    def add_flags(self, cls: type[Any], leave_out: Collection[str] = ()) -> None:
        """Add the flags of a dataclass, except the groups in leave_out. A name that is already
        taken keeps its meaning: an alias elsewhere may be a command's own flag."""
        self._classes.append(cls)
        self._takes_sglang_flags |= takes_sglang_flags(cls)
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
        """The given flags as text; an unknown flag is an error with a hint, which also names what
        else is refused."""
        if self._takes_sglang_flags:
            self._add_sglang_flags()
        for word in argv:  # before it is taken for the beginning of another
            name = word.split("=")[0]
            if name in self.left_out and name not in self._option_string_actions:
                raise ValueError(self._complaint(name))
        namespace, rest = self.parse_known_args(list(argv))
        if rest:
            # A word without dashes is most likely the value of an unknown flag.
            flags = [word for word in rest if word.startswith("-")] or rest[:1]
            unknown = [self._complaint(word.split("=")[0]) for word in flags]
            raise ValueError("; ".join([*unknown, *self._refusals(vars(namespace))]))
        return vars(namespace)

    def without_secrets(self, argv: Sequence[str]) -> list[str]:
        """The words of a command line that parses, without secrets and their flags."""
        flags = [spec for cls in self._classes for spec in specs(cls).values()]
        secret = [name for spec in flags if spec.flag.secret for name in spec.names]
        kept, words = [], iter(argv)
        for word in words:
            name, equals, _ = word.partition("=")
            begins = len(name) > 2 and any(flag.startswith(name) for flag in secret)
            if name not in secret and (name in self.flags or not begins):
                kept.append(word)
            elif not equals:
                next(words)
        return kept

    def _refusals(self, given: Mapping[str, Any]) -> Iterator[str]:
        for cls in self._classes:
            try:
                refuse_unbuilt(merge(cls, given, {}))
            except ValueError as error:
                yield str(error)

    def _add_sglang_flags(self) -> None:
        """Add those that no other flag is called by, without help, once."""
        self._takes_sglang_flags = False
        for flag in sglang_flags().values():
            if names := [name for name in flag.spec.names if name not in self.flags]:
                _add_flag(self, flag.spec, names, flag.arity)
                self.flags.extend(names)

    def _complaint(self, word: str) -> str:
        if word in self.left_out:
            return f"{word} is a flag of the {self.left_out[word]}: {self.prog} does not take it"
        kind = "unknown flag" if word.startswith("-") else "unexpected argument"
        return f"{kind} {word}{nearest_flag(word, self.flags)}"

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _add_flag(
    group: argparse._ActionsContainer,
    spec: FlagSpec,
    names: Sequence[str],
    arity: str | None = None,
) -> None:
    """`arity`: of a flag without help."""
    shown = _help(spec) if arity is None else argparse.SUPPRESS
    common: dict[str, Any] = {"dest": spec.field, "default": argparse.SUPPRESS}
    if spec.kind is bool:
        group.add_argument(*names, action="store_true", help=shown, **common)
        # The command line can override a file that switches the flag on.
        off = [f"--no-{name.removeprefix('--')}" for name in names]
        group.add_argument(*off, action="store_false", help=argparse.SUPPRESS, **common)
        return
    if spec.many or arity or spec.flag.rest:
        common |= {"action": "append"} if spec.flag.repeat else {"nargs": arity or "+"}
    group.add_argument(*names, metavar=_metavar(spec), help=shown, **common)


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
            field = find_sglang_flag(cls, str(key)) or find_field(cls, str(key))
        except KeyError as error:
            raise ValueError(f"--config {path}: unknown key {error.args[0]}") from None
        if value and values.get(field):
            raise ValueError(f"--config {path}: {field!r} is given twice, once as {key!r}")
        values[field] = values.get(field) or value
    return values


def merge(cls: type[Args], given: Mapping[str, Any], file: Mapping[str, Any]) -> Args:
    """Build the dataclass from the command line's text and the file's values."""
    own, typed, wrong = specs(cls), dict[str, Any](), list[str]()
    for field in given:
        if field in own:
            try:
                typed[field] = _typed(own[field], given[field])
            except ValueError as error:
                wrong.append(str(error))
    layers = {field: file[field] for field in file if field in own}, typed
    args, more = build_and_check(cls, *layers)
    refuse(sglang_values(cls, given, file), args, [*wrong, *more])
    return args


def sglang_values(
    cls: type[Any], given: Mapping[str, Any], file: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of SGLang's other flags, by field."""
    if not takes_sglang_flags(cls):
        return {}
    flags = sglang_flags()
    theirs = {field for field in {*file, *given} if field in flags and not has_key(cls, field)}
    typed = {field: flags[field].typed(given[field]) for field in given if field in theirs}
    return {field: file[field] for field in file if field in theirs} | typed


def _typed(spec: FlagSpec, given: Any) -> Any:
    if spec.kind is bool:
        return given
    if spec.many or spec.flag.rest:
        return tuple(parse_text(spec, word) for word in given)
    return parse_text(spec, given)
