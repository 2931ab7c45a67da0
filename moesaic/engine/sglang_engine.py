"""What programs written for SGLang's Engine expect of ours besides `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moesaic.config import ServerArgs
from moesaic.core.redact import shown
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.models.folder import TokenizerConfig, read_as

NO_EMBEDDINGS: Final = "this engine generates text and computes no embeddings or scores of pairs"
FIXED_WEIGHTS: Final = "weights are read once, at the start: make a new Engine"
NO_ADAPTERS: Final = "no adapters are served"
NO_SESSIONS: Final = "no session is kept: send the whole prompt, whose prefix is cached"
KEPT_MEMORY: Final = "memory is held until shutdown()"
# Methods of SGLang's Engine that are not offered.
MISSING_METHODS: Final[dict[str, str]] = {
    **dict.fromkeys(("encode", "async_encode", "rerank", "score", "async_score"), NO_EMBEDDINGS),
    **dict.fromkeys(("open_session", "close_session"), NO_SESSIONS),
    **dict.fromkeys(("load_lora_adapter", "unload_lora_adapter"), NO_ADAPTERS),
    **dict.fromkeys(("async_load_lora_adapter", "async_unload_lora_adapter"), NO_ADAPTERS),
    "load_lora_adapter_from_tensors": NO_ADAPTERS,
    **dict.fromkeys(("update_weights_from_disk", "update_weights_from_tensor"), FIXED_WEIGHTS),
    **dict.fromkeys(("update_weights_from_distributed", "update_weights_from_ipc"), FIXED_WEIGHTS),
    **dict.fromkeys(("init_weights_update_group", "destroy_weights_update_group"), FIXED_WEIGHTS),
    **dict.fromkeys(("begin_weight_update", "end_weight_update"), FIXED_WEIGHTS),
    **dict.fromkeys(
        ("get_weights_by_name", "save_remote_model", "save_sharded_model"), FIXED_WEIGHTS
    ),
    **dict.fromkeys(("release_memory_occupation", "resume_memory_occupation"), KEPT_MEMORY),
}
# Options of transformers' tokenizers that are not offered; None and False are as good as left out.
MISSING_OPTIONS: Final = frozenset(
    (
        *("return_tensors", "padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("chat_template", "continue_final_message", "sanitize_control_tokens"),
        "return_assistant_tokens_mask",
    )
)
# As transformers has it for a folder that names no length.
NO_MAX_LENGTH: Final = 1e30


class TokenizedTexts(dict[str, Any]):
    """As transformers' BatchEncoding: a dict whose items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class TransformersTokenizer:
    """A tokenizer with the names and defaults of transformers: ids are plain lists."""

    def __init__(self, tokenizer: Tokenizer, folder: str) -> None:
        self._tokenizer = tokenizer
        self.special_tokens_map = dict(tokenizer.special_tokens)
        self.bos_token, self.bos_token_id = self._special("bos_token")
        self.eos_token, self.eos_token_id = self._special("eos_token")
        self.pad_token, self.pad_token_id = self._special("pad_token")
        self.unk_token, self.unk_token_id = self._special("unk_token")
        self.chat_template = tokenizer.templates.get("default")
        self.name_or_path = folder
        config = read_as(Path(tokenizer.folder) / "tokenizer_config.json", TokenizerConfig)
        self.model_max_length = int(config.model_max_length or NO_MAX_LENGTH)

    @property
    def vocab_size(self) -> int:
        """Without added tokens."""
        return self._tokenizer.backend.get_vocab_size(with_added_tokens=False)

    @property
    def all_special_ids(self) -> list[int]:
        names = dict.fromkeys(self.special_tokens_map.values())
        return [found for name in names if (found := self._id(name)) is not None]

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        self._check(options)
        return self._tokenizer.encode(text, add_special_tokens)

    def __call__(
        self, text: str | list[str], add_special_tokens: bool = True, **options: Any
    ) -> TokenizedTexts:
        self._check(options)
        if isinstance(text, str):
            return _tokenized(self.encode(text, add_special_tokens))
        return _tokenized([self.encode(one, add_special_tokens) for one in text])

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in sequences]

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """None for a text that is not a token."""
        return self._id(tokens) if isinstance(tokens, str) else [self._id(one) for one in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        known = self._tokenizer.id_to_token
        return known(ids) if isinstance(ids, int) else [known(int(one)) for one in ids]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The ids of the prompt, or without `tokenize` its text, or a list of either for a list of
        conversations; `kwargs` go to the template."""
        kwargs = self._without_missing(kwargs)
        single = not conversation or isinstance(conversation[0], Mapping)
        chats: Any = [conversation] if single else conversation
        render = self._tokenizer.apply_chat_template
        texts = [render(chat, add_generation_prompt, tools, **kwargs) for chat in chats]
        if not tokenize:
            return texts[0] if single else texts
        rows = [self.encode(text, add_special_tokens=False) for text in texts]
        ids = rows[0] if single else rows
        return _tokenized(ids) if return_dict else ids

    def _check(self, options: Mapping[str, Any]) -> None:
        if rest := self._without_missing(options):
            names = ", ".join(sorted(rest))
            raise TypeError(f"this tokenizer has no option {names}: it takes add_special_tokens")

    def _without_missing(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """ValueError for an option that is not offered, unless it is off."""
        for name in MISSING_OPTIONS & options.keys():
            if options[name] not in (None, False):
                raise ValueError(
                    f"{name}={shown(options[name])} is not supported by this tokenizer, which "
                    f"gives plain lists: use transformers' AutoTokenizer on {self.name_or_path}"
                )
        return {name: value for name, value in options.items() if name not in MISSING_OPTIONS}

    def _special(self, name: str) -> tuple[str | None, int | None]:
        token = self.special_tokens_map.get(name)
        return token, None if token is None else self._id(token)

    def _id(self, token: str) -> int | None:
        return self._tokenizer.backend.token_to_id(token)


def _tokenized(ids: list[Any]) -> TokenizedTexts:
    """`ids`: of one text, or a list of those of several."""
    if ids and isinstance(ids[0], list):
        return TokenizedTexts(input_ids=ids, attention_mask=[[1] * len(row) for row in ids])
    return TokenizedTexts(input_ids=ids, attention_mask=[1] * len(ids))


@dataclass(frozen=True, slots=True)
class TokenizerManager:
    """The attributes of SGLang's that programs read."""

    tokenizer: TransformersTokenizer | None
    server_args: ServerArgs

    @property
    def model_path(self) -> str:
        return self.server_args.model_path

    @property
    def served_model_name(self) -> str:
        return self.server_args.served_model_name or self.server_args.model_path
