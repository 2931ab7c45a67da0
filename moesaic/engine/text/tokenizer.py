"""The tokenizer and chat templates of a Hugging Face folder.

It reads only data: tokenizer.json, JSON settings and Jinja templates (chat_template.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from moesaic.engine.text.chat_template import ChatTemplateError as ChatTemplateError
from moesaic.engine.text.chat_template import ChatTemplates
from moesaic.models.folder import (
    GenerationConfig,
    ModelEosTokens,
    Token,
    TokenizerConfig,
    TokenNames,
    checked,
    read_as,
    read_object,
    read_text,
)

logger = logging.getLogger(__name__)

TOKEN_FILES = "tokenizer_config.json or special_tokens_map.json"
BROKEN = "\ufffd"
# From this number on, ids are decoded without holding the GIL.
MANY_IDS = 2048
# The most characters that a normaliser joins to one.
MAX_JOINED = 4


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers' characters: printable bytes are themselves, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    named = {chr(byte): byte for byte in plain}
    return named | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
# The name of a byte in tokenizers with byte fallback.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenForm:
    text: str = ""
    """As decoded alone."""
    known: bool = True
    """False for an id without a token."""
    special: bool = False
    is_byte: bool = False
    """A byte-fallback token, which is decoded together with its neighbours."""
    raw: bytes | None = None
    """The bytes of such a token, of a part of a character, or of any token whose text does not
    depend on others."""
    plain: str | None = None
    """The text of a token that is not special, if it does not depend on others and its characters
    are whole."""


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        eos_ids: frozenset[int],
        templates: Mapping[str, str],
        folder: str = "",
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.eos_ids = eos_ids
        self.chat = ChatTemplates(templates, special_tokens, folder)
        self.folder = folder
        self._token_texts: dict[int, str] = {}
        self._forms: dict[int, TokenForm] = {}
        self.plain_texts: dict[int, str] = {}
        """`TokenForm.plain` of the tokens that were seen and have one."""

    @classmethod
    def from_folder(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """`chat_template`: a file, the name of one of the folder's templates, or Jinja itself."""
        folder = Path(path)
        backend = _load_backend(folder)
        settings = read_object(folder / "tokenizer_config.json")
        config = checked(settings, TokenizerConfig, str(folder / "tokenizer_config.json"))
        legacy = read_object(folder / "special_tokens_map.json")
        checked(legacy, TokenNames, str(folder / "special_tokens_map.json"))
        named = _named_tokens(config, settings, legacy)
        _add_tokens(backend, config, named)
        special = {name: token.content for name, token in named.items()}
        _apply_bos_eos(backend, config, special)
        templates = _templates(folder, config)
        if chat_template is not None:
            templates = {"default": _chosen_template(chat_template, templates)}
        eos_ids = _eos_ids(folder, backend, special.get("eos_token"))
        return cls(backend, special, eos_ids, templates, str(folder))

    @property
    def vocab_size(self) -> int:
        """The number of tokens with text; the model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def warn_beyond(self, model_ids: int) -> None:
        """Warns of tokens that the model does not have."""
        if (most := max(self.backend.get_vocab(with_added_tokens=True).values()) + 1) > model_ids:
            logger.warning(
                "%s has ids below %d, but the model only ids below %d: prompts with higher ids are "
                "refused",
                *(self.folder, most, model_ids),
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A rendered chat already has its special tokens: pass `add_special_tokens=False`."""
        # For a single text the backend would hold the GIL all the time.
        batch = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(ids) < MANY_IDS:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    @cached_property
    def longest_token(self) -> int:
        """An upper bound of a token's characters; byte-level names have one for each byte."""
        longest = max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)
        return longest * (1 if self.backend.normalizer is None else MAX_JOINED)

    def id_to_token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def token_text(self, token_id: int) -> str:
        """The text that a token adds to other text, U+FFFD for a part of a character."""
        if (text := self._token_texts.get(token_id)) is None:
            text = self._token_texts[token_id] = self._text_after_another(token_id)
        return text

    def _text_after_another(self, token_id: int) -> str:
        if self.anchor is None:
            return self.form(token_id).text
        both = self.decode([self.anchor, token_id], skip_special_tokens=False)
        return both.removeprefix(self.form(self.anchor).text)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of `token_text`; for a part of a character its own bytes."""
        raw = self.form(token_id).raw
        return self.token_text(token_id).encode() if raw is None else raw

    def form(self, token_id: int) -> TokenForm:
        if (form := self._forms.get(token_id)) is None:
            form = self._forms[token_id] = self._form(token_id)
            if form.plain is not None:
                self.plain_texts[token_id] = form.plain
        return form

    def _form(self, token_id: int) -> TokenForm:
        name = self.id_to_token(token_id)
        if name is None:
            return TokenForm(known=False)
        special = name in self._special_names
        text = self.decode([token_id], skip_special_tokens=False)
        if (found := _BYTE_TOKEN.fullmatch(name)) and text != name:
            raw = bytes([int(found[1], 16)])
            return TokenForm(text, special=special, is_byte=True, raw=raw)
        if BROKEN in text and all(char in _BYTE_OF for char in name):
            raw = bytes(_BYTE_OF[char] for char in name)
            return TokenForm(text, special=special, raw=raw)
        if not self._is_byte_level:
            return TokenForm(text, special=special)
        return TokenForm(text, special=special, raw=text.encode(), plain=None if special else text)

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether the text of a token does not depend on the tokens around it."""
        return isinstance(self.backend.decoder, tokenizers.decoders.ByteLevel)

    @cached_property
    def _special_names(self) -> frozenset[str]:
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def anchor(self) -> int | None:
        """A token with text of its own, which serves as context for others."""
        return next((i for i in range(self.vocab_size) if self._is_plain(i)), None)

    def _is_plain(self, token_id: int) -> bool:
        form = self.form(token_id)
        if form.special or form.is_byte:
            return False
        return bool(form.text.strip()) and BROKEN not in form.text

    @property
    def templates(self) -> dict[str, str]:
        return self.chat.texts

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt as text; encode it with `add_special_tokens=False`."""
        return self.chat.submit(None, messages, add_generation_prompt, tools, kwargs).result()


def load_tokenizer(folder: str | None, chat_template: str | None) -> Tokenizer | None:
    """Loads the tokenizer and checks its chat template, which may be another file."""
    if folder is None:
        return None
    template = None if chat_template is None else _read_template(Path(chat_template))
    tokenizer = Tokenizer.from_folder(folder, chat_template=template)
    tokenizer.chat.check()
    return tokenizer


def _read_template(file: Path) -> str:
    if not file.is_file():
        raise ValueError(
            f"--chat-template {file} is not a file: give one with a Jinja template (SGLang's names "
            "of templates are not known), or leave it out for the model's own"
        )
    return read_text(file)


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json: convert its tokenizer to the tokenizers format, give "
            "another folder with tokenizer_path, or set skip_tokenizer_init and send token ids"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ValueError(f"{file} cannot be read as a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _named_tokens(
    config: TokenizerConfig, settings: dict[str, Any], legacy: dict[str, Any]
) -> dict[str, AddedToken]:
    """bos_token, eos_token and so on; special_tokens_map.json has precedence in old folders."""
    flags = {entry.content: entry for entry in (config.added_tokens_decoder or {}).values()}
    merged = legacy | settings if flags else settings | legacy
    extra = merged.get("extra_special_tokens")
    if isinstance(extra, dict):
        merged = merged | extra
    named = {}
    for name, value in merged.items():
        if name.endswith("_token") and isinstance(value, str | dict):
            token = checked({name: value}, dict[str, Token], TOKEN_FILES)[name]
            content = token if isinstance(token, str) else token.content
            named[name] = _added_token(flags.get(content, token), special=True)
    return named


def _added_token(entry: Token, special: bool) -> AddedToken:
    if isinstance(entry, str):
        return AddedToken(entry, special=special, normalized=False)
    known = {"single_word", "lstrip", "rstrip", "normalized"}
    given = {name: value for name, value in msgspec.to_builtins(entry).items() if name in known}
    return AddedToken(entry.content, special=special, **given)


def _add_tokens(
    backend: tokenizers.Tokenizer, config: TokenizerConfig, named: dict[str, AddedToken]
) -> None:
    """Adds tokens of the settings that tokenizer.json may lack, in the order of their ids."""
    for number, entry in sorted((config.added_tokens_decoder or {}).items()):
        special = bool(entry.special)
        add = backend.add_special_tokens if special else backend.add_tokens
        add([_added_token(entry, special)])
        if (found := backend.token_to_id(entry.content)) != number:
            logger.warning(
                "tokenizer_config.json gives token %r the id %d, tokenizer.json gives it %s",
                entry.content,
                number,
                found,
            )
    extra = config.extra_special_tokens or config.additional_special_tokens or []
    more = [] if isinstance(extra, dict) else [_added_token(entry, special=True) for entry in extra]
    backend.add_special_tokens([*named.values(), *more])


def _apply_bos_eos(
    backend: tokenizers.Tokenizer, config: TokenizerConfig, special: dict[str, str]
) -> None:
    """add_bos_token and add_eos_token override tokenizer.json, as DeepSeek's folders need."""
    frame = backend.encode("").ids
    bos, eos = (special.get(name) for name in ("bos_token", "eos_token"))
    has_bos = bos is not None and frame[:1] == [backend.token_to_id(bos)]
    has_eos = eos is not None and frame[int(has_bos) :][-1:] == [backend.token_to_id(eos)]
    use_bos = bos is not None and _or(config.add_bos_token, has_bos)
    use_eos = eos is not None and _or(config.add_eos_token, has_eos)
    if (use_bos, use_eos) == (has_bos, has_eos):
        return
    parts = [str(bos)] * use_bos + ["$A"] + [str(eos)] * use_eos
    tokens = [(part, backend.token_to_id(part)) for part in parts if part != "$A"]
    backend.post_processor = TemplateProcessing(single=parts, special_tokens=tokens)


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> frozenset[int]:
    found = set[int]()
    if eos_token is not None and (token_id := backend.token_to_id(eos_token)) is not None:
        found.add(token_id)
    for name, kind in (
        ("generation_config.json", GenerationConfig),
        ("config.json", ModelEosTokens),
    ):
        found |= read_as(folder / name, kind).all_ids
    return frozenset(found)


def _or(given: bool | None, default: bool) -> bool:
    return default if given is None else given


def _templates(folder: Path, config: TokenizerConfig) -> dict[str, str]:
    """Template files take precedence over tokenizer_config.json."""
    found = {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = folder / "chat_template.jinja"
    if found:
        return {name: read_text(file) for name, file in found.items()}
    entry = config.chat_template
    if isinstance(entry, list):
        return {named.name: named.template for named in entry}
    if isinstance(entry, dict):
        return dict(entry)
    return {} if entry is None else {"default": entry}


def _chosen_template(choice: str, templates: Mapping[str, str]) -> str:
    if choice in templates:
        return templates[choice]
    if "{" in choice:
        return choice
    if Path(choice).is_file():
        return read_text(Path(choice))
    raise ValueError(
        f"chat_template={choice!r} is neither a file nor one of this model's templates "
        f"{sorted(templates)}, nor is it Jinja"
    )
