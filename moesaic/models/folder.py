"""Reads the JSON and text files of a Hugging Face folder. They are untrusted: errors are
ValueErrors that name the file, the field and its value. No torch here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

Kind = TypeVar("Kind")

MAX_VALUE_LENGTH: Final = 60
# The field in msgspec's error messages.
_AT: Final = re.compile(r" - at `(?:key` in `)?\$\.?(\w*).*`$")


class TokenEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token with its flags, as in tokenizer_config.json and special_tokens_map.json."""

    content: str
    single_word: bool | None = None
    lstrip: bool | None = None
    rstrip: bool | None = None
    normalized: bool | None = None
    special: bool | None = None


Token = str | TokenEntry


class NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class TokenNames(msgspec.Struct, frozen=True):
    """The tokens that every tokenizer may name; other keys of the same form name more."""

    bos_token: Token | None = None
    eos_token: Token | None = None
    pad_token: Token | None = None
    unk_token: Token | None = None
    sep_token: Token | None = None
    cls_token: Token | None = None
    mask_token: Token | None = None
    additional_special_tokens: list[Token] | None = None
    extra_special_tokens: list[Token] | dict[str, Token] | None = None


class TokenizerConfig(TokenNames, frozen=True):
    """The fields of tokenizer_config.json that we read."""

    added_tokens_decoder: dict[int, TokenEntry] | None = None
    chat_template: str | list[NamedTemplate] | dict[str, str] | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    model_max_length: float | None = None


# No vocabulary is larger: the file has a mistake.
TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class EosTokens(msgspec.Struct, frozen=True):
    eos_token_id: TokenId | list[TokenId] | None = None

    @property
    def ids(self) -> frozenset[int]:
        found = self.eos_token_id
        return frozenset(found if isinstance(found, list) else [] if found is None else [found])


class ModelEosTokens(EosTokens, frozen=True):
    """The end tokens of config.json; multimodal models have those of their text model."""

    text_config: EosTokens | None = None

    @property
    def all_ids(self) -> frozenset[int]:
        inner = frozenset[int]() if self.text_config is None else self.text_config.ids
        return self.ids if self.eos_token_id is not None else inner


class GenerationConfig(ModelEosTokens, frozen=True):
    """The fields of generation_config.json that we read."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    do_sample: bool | None = None


class TensorIndex(msgspec.Struct, frozen=True):
    """model.safetensors.index.json: the file of each tensor."""

    weight_map: dict[str, str]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read as text in UTF-8: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; an empty one if the file does not exist."""
    if not path.is_file():
        return {}
    text = read_text(path)
    try:
        content = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except _Constant as error:
        raise ValueError(f"{path} is not valid JSON: it has {error}, give a number") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_as(path: Path, kind: type[Kind]) -> Kind:
    """Reads and checks the known fields of a file; other fields are ignored."""
    return checked(read_object(path), kind, str(path))


def checked(content: dict[str, Any], kind: type[Kind], source: str) -> Kind:
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        field = _AT.search(str(error))
        name = field[1] if field else ""
        why = _AT.sub("", str(error)).replace("`", "")
        value = f" is {brief(content[name])}" if name in content else ""
        raise ValueError(f"{source}: {name}{value}: {why}: fix the file") from None


def brief(value: Any) -> str:
    """The beginning of a value's repr, for messages."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of very many digits"
    return text if len(text) <= MAX_VALUE_LENGTH else text[:MAX_VALUE_LENGTH] + "…"


class _Constant(Exception):
    """NaN or Infinity, which Python parses and JSON does not allow."""


def _refuse(constant: str) -> None:
    raise _Constant(constant)
