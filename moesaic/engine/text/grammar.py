"""Structured output: compiles users' grammars to llguidance matchers.

Functions import llguidance themselves: without it an engine serves requests without a grammar.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import tokenizers

from moesaic.core.redact import LONGEST_WORD, quoted
from moesaic.core.sampling import Grammar
from moesaic.engine.text.json_schema import prepare
from moesaic.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_DEPTH: Final = 64
# A bound, because a model may emit white space without end.
WHITE_SPACE: Final = r"[\x20\x0A\x0D\x09]{1,64}"
# A state takes 1 to 2 kB. grammar_check bounds the time and memory of compilation.
MAX_LEXER_STATES: Final = 50_000
SHOWN: Final = 240
# How llguidance begins refusals that only schemas with `strict` get, see `json_schema`.
STRICT_REFUSALS: Final = ("Unimplemented keys:", "Unknown format:", "oneOf constraints")
WITHOUT_STRICT: Final = " (leave it out, or drop strict: then it is not enforced)"
# What llguidance says about an option that clients do not set here, and what they can do.
COERCE: Final = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf"
QUOTES: Final = "\"'`,.:;()[]{}"
# How llguidance says that a reference leads nowhere: with a pointer, an anchor or an address.
NO_TARGET: Final = re.compile(r"(Pointer|Anchor|Resource) '(.*)' (?:does not exist|is not present)")
VOID: Final = "<|moesaic:no-end|>"


def is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


def check_depth(grammar: Grammar) -> None:
    """ValueError for deep nesting, and for a JSON schema that is not JSON."""
    if grammar.kind == "json_schema":
        depth = _json_depth(_parse_json(grammar.text))
    else:
        depth = _bracket_depth(grammar.text)
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested {depth} deep, give at most {MAX_DEPTH}")


def _parse_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"it has {constant}, which is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError(f"it is nested too deep, give at most {MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at character {error.pos}") from None


def _json_depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return depth


def _bracket_depth(text: str) -> int:
    """An upper bound of a parser's depth; escaped brackets do not count."""
    deepest = depth = 0
    escaped = False
    for char in text:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _from_json_schema(matcher: type[LLMatcher], text: str, open_objects: bool) -> str:
    schema = json.loads(text)
    if schema is False:
        raise ValueError("nothing matches it")
    schema = {} if schema is True else schema
    return matcher.grammar_from_json_schema(
        json.dumps(prepare(schema, open_objects).schema),
        defaults={"whitespace_pattern": WHITE_SPACE},
    )


def _from_regex(matcher: type[LLMatcher], text: str, _: bool) -> str:
    """Removes anchors, which llguidance lacks: the whole output must match anyway."""
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise ValueError("it ends with a single backslash")
    text = text.removeprefix("^")
    body = text.removesuffix("$")
    backslashes = len(body) - len(body.rstrip("\\"))
    return matcher.grammar_from_regex(text if backslashes % 2 else body)


def _from_ebnf(matcher: type[LLMatcher], text: str, _: bool) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return matcher.grammar_from_lark(gbnf_to_lark(text))
    except Exception as error:  # gbnf_to_lark raises several types, even Exception
        # The message shows the line after its number.
        why = re.sub(r"(at line \d+), .*", r"\1", str(error), flags=re.DOTALL)
        raise ValueError(f"it is not GBNF: {why}") from error


SOURCES: Final[dict[str, Callable[[type[LLMatcher], str, bool], str]]] = {
    "json_schema": _from_json_schema,
    "regex": _from_regex,
    "ebnf": _from_ebnf,
    "lark": lambda matcher, text, _: matcher.grammar_from_lark(text),
}


class Compiler:
    """Makes matchers for a tokenizer; without `eos_ids` outputs end with the token `void`.
    `open_objects`: see `json_schema.prepare`. It takes seconds to make one for a large vocabulary,
    and llguidance lets no other thread of the process run meanwhile."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: Iterable[int],
        open_objects: bool = False,
    ) -> None:
        from llguidance import LLTokenizer

        self._open_objects = open_objects
        backend = tokenizer.backend
        known = [token for token in sorted(eos_ids) if backend.id_to_token(token) is not None]
        self.eos_ids = [token for token in known if token < vocab_size]
        self.void: int | None = None
        if not self.eos_ids:
            backend = tokenizers.Tokenizer.from_str(backend.to_str())
            backend.add_special_tokens([VOID])
            self.void = backend.token_to_id(VOID)
        highest = max(backend.get_vocab(with_added_tokens=True).values())
        self.num_tokens = max(vocab_size, highest + 1)
        self.mask_bytes = (self.num_tokens + 31) // 32 * 4
        """The size of a mask: one bit per token, in whole words."""
        ends = self.eos_ids if self.void is None else [self.void]
        self._tokens = LLTokenizer(backend.to_str(), n_vocab=self.num_tokens, eos_token=ends)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """ValueError with llguidance's reason, shortened, if it refuses the grammar."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        try:
            source = SOURCES[grammar.kind](LLMatcher, grammar.text, self._open_objects)
        except ValueError as error:
            raise ValueError(shown(str(error), grammar)) from error
        matcher = LLMatcher(self._tokens, source, limits=limits, log_level=0)
        if matcher.is_error():
            raise ValueError(shown(matcher.get_error(), grammar))
        return matcher


def _unquoted(word: str, text: str) -> str:
    """A word of a message; words of the grammar are hidden unless they are plain names."""
    core = word.strip(QUOTES)
    plain = (core + "a").replace("_", "").replace("$", "").isalnum() and len(core) <= LONGEST_WORD
    return word if plain or core not in text else word.replace(core, "…")


def shown(message: str, grammar: Grammar) -> str:
    """A message of llguidance without the grammar's text and without its drawings."""
    if grammar.kind == "json_schema" and (found := NO_TARGET.search(message)):
        is_address = found[1] == "Resource"  # which may hold a secret
        reference = "to another document" if is_address else quoted(f"#{found[2]}", LONGEST_WORD)
        return f"$ref {reference} leads nowhere: references go to the schema itself only"
    text = re.escape(grammar.text)
    if grammar.text.isalnum():  # a short one may be a part of any word
        text = rf"\b{text}\b"
    lines = re.sub(text, "…", message).replace("<non-verbose/>", "").splitlines()
    text = " ".join(line.strip() for line in lines if line.strip(" ^") and " | " not in line)
    text = text.replace(COERCE, ": use anyOf")
    text = text.rpartition("… error: ")[2]  # the regex crate shows the regex before it
    text = " ".join(_unquoted(word, grammar.text) for word in text.split())
    advice = WITHOUT_STRICT if any(one in text for one in STRICT_REFUSALS) else ""
    return (text if len(text) <= SHOWN else text[:SHOWN] + "…") + advice
