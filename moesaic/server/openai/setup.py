"""The server's settings for the OpenAI API, resolved once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from moesaic.config import ServerArgs
from moesaic.core.redact import shown
from moesaic.core.sampling import SamplingParams
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.models.config import RawConfig
from moesaic.models.folder import GenerationConfig, read_as
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.openai.logprobs import VocabularyTexts
from moesaic.server.parsers.formats import Format, choose_format

# Sampling defaults that a folder's generation_config.json may set.
DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# The name that SGLang's clients use for any model.
ANY_MODEL: Final = "default"


class OpenAISetup:
    def __init__(self, context: Context) -> None:
        args = context.args
        folder = Path(args.model_path)
        model_type = str(RawConfig.read(folder).data.get("model_type", ""))
        self.model = args.served_model_name or args.model_path
        self.created = int(time.time())
        self.limits = context.engine.limits
        self.cache_report = args.enable_cache_report
        self.defaults = _defaults(folder / "generation_config.json")
        self._tokenizer = context.engine.tokenizer
        self.format = _format(args, model_type, self._tokenizer)
        self._vocabulary = None if self._tokenizer is None else VocabularyTexts(self._tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise Refusal(
                400, "this server has no tokenizer (--skip-tokenizer-init): send token ids"
            )
        return self._tokenizer

    @property
    def vocabulary(self) -> VocabularyTexts:
        if self._vocabulary is None:
            text = "logprobs need a tokenizer, and this server has none: use /generate"
            raise Refusal(400, text, "logprobs")
        return self._vocabulary

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model, ANY_MODEL):
            raise Refusal(
                404,
                f"the model {shown(name)} does not exist: this server has {self.model!r}",
                "model",
                "model_not_found",
            )


def _format(args: ServerArgs, model_type: str, tokenizer: Tokenizer | None) -> Format:
    flags = args.tool_call_parser, args.reasoning_parser
    if tokenizer is None:
        return choose_format(*flags, model_type)
    return choose_format(
        *flags,
        model_type,
        chat_template="".join(tokenizer.templates.values()),
        added_tokens=tokenizer.backend.get_added_tokens_decoder(),
    )


def _defaults(file: Path) -> dict[str, Any]:
    given = read_as(file, GenerationConfig)
    found = {name: value for name in DEFAULTS if (value := getattr(given, name)) is not None}
    if found.get("top_k") == 0:
        found["top_k"] = -1
    if given.do_sample is False:
        found["temperature"] = 0.0  # transformers ignores the temperature then
    try:
        SamplingParams.from_dict(found)
    except ValueError as error:
        raise ValueError(f"{file} cannot be used: {error}") from error
    return found
