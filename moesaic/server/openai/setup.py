"""The server's settings for the OpenAI API, resolved once."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from moesaic.config import ServerArgs
from moesaic.config.flags import json_object
from moesaic.core.redact import quoted
from moesaic.core.sampling import SamplingParams
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.models.config import RawConfig
from moesaic.models.folder import GenerationConfig, read_as
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.openai.logprobs import VocabularyTexts
from moesaic.server.parsers.formats import Format, choose_format

logger = logging.getLogger(__name__)

HIDDEN_TOOLS: Final = (
    "the chat template of %s does not render tools, so the model does not see them: give another "
    "with --chat-template if it knows tools"
)
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
        self.names = (self.model, *args.served_model_aliases)
        self.created = int(time.time())
        self.limits = context.engine.limits
        self.cache_report = args.enable_cache_report
        self.streams_end_with_usage = args.stream_response_default_include_usage
        self.defaults: dict[str, Any] = {}
        if args.sampling_defaults == "model":
            self.defaults = _defaults(folder / "generation_config.json")
        self.defaults |= self.limits.preferred
        self.template_kwargs = json_object(args, "default_chat_template_kwargs")
        self._tokenizer = context.engine.tokenizer
        self.format = _format(args, model_type, self._tokenizer)
        self.hides_tools = _hides_tools(self._tokenizer)
        """The model does not see the tools of a request."""
        if self.hides_tools and self.format.tools is not None:
            logger.warning(HIDDEN_TOOLS, args.model_path)
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
        """An empty name counts as left out."""
        if name and name not in (*self.names, ANY_MODEL):
            served = ", ".join(map(quoted, self.names))
            text = f"the model {quoted(name)} does not exist; served: {served}"
            raise Refusal(404, text, "model", "model_not_found")


def _format(args: ServerArgs, model_type: str, tokenizer: Tokenizer | None) -> Format:
    flags = args.tool_call_parser, args.reasoning_parser
    if tokenizer is None:
        return choose_format(*flags, model_type)
    found = choose_format(
        *flags,
        model_type,
        chat_template="".join(tokenizer.templates.values()),
        added_tokens=tokenizer.backend.get_added_tokens_decoder(),
    )
    return replace(found, open_objects=args.constrained_json_allow_additional_properties)


def _hides_tools(tokenizer: Tokenizer | None) -> bool:
    return tokenizer is not None and bool(tokenizer.templates) and not tokenizer.chat.renders_tools


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
