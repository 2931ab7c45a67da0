"""Request fields that a route does not have: those of SGLang's, vLLM's, OpenAI's and Anthropic's
APIs that no route has, and those of other routes.

Clients send many of them at the value that switches them off, which is as good as leaving them out.
A body, the keywords of `Engine.generate` and sampling parameters all use this table; a field that
one of these declares itself is not looked up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple


class BadParameter(ValueError):
    """An invalid value of the parameter `name`."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Unsupported(BadParameter):
    """A value that asks for a capability that is missing."""


class ForeignField(NamedTuple):
    """`missing`: the capability, and what to do instead; None if every value is ignored. `off`: the
    values that ask for nothing, besides null, empty ones and lists of such values; 0 is not False.
    """

    missing: str | None
    off: tuple[Any, ...] = (False,)


def _refused(missing: str, names: str, off: tuple[Any, ...] = (False,)) -> dict[str, ForeignField]:
    return dict.fromkeys(names.split(), ForeignField(missing, off))


def _ignored(names: str) -> dict[str, ForeignField]:
    return dict.fromkeys(names.split(), ForeignField(None))


_TO_CHATS: Final = "give it to /v1/chat/completions"
_TO_RESPONSES: Final = "give it to /v1/responses"
_TO_GENERATE: Final = "give it to /generate"
_TO_ALL: Final = "give it to a route that generates, beside sampling_params"
_SAMPLING: Final = f"{_TO_CHATS}, or in sampling_params to /generate"
_FORMAT: Final = (
    "give response_format, regex or ebnf to /v1/chat/completions, or json_schema, regex or ebnf in "
    "sampling_params to /generate"
)

# Each of these is built, but not on every route.
ROUTE_FIELDS: Final[dict[str, ForeignField]] = {
    # Prompts.
    **_refused(
        "give it as prompt to /tokenize or /v1/completions, as text to /generate, or in messages",
        "text",
    ),
    **_refused(
        "give messages, or instructions and input, or send a text to /v1/completions: no templates "
        "are kept",
        "prompt",
    ),
    **_refused("chats are rendered from messages: send token ids to /v1/completions", "input_ids"),
    **_refused("send it to /v1/chat/completions or /v1/messages", "messages"),
    **_refused("send it to /v1/responses", "input"),
    **_refused("send it to /detokenize", "tokens"),
    **_refused("give it to /v1/messages, or a system message to a chat", "system"),
    **_refused("give it to /v1/responses, or a system message to a chat", "instructions"),
    **_refused("chat templates set their special tokens themselves", "add_special_tokens"),
    **_refused("an engine has one model: leave it out", "model", ("default",)),
    # How an answer is sampled, and where it ends.
    **_refused("give its fields themselves, or send it to /generate", "sampling_params"),
    **_refused(_SAMPLING, "temperature top_p n repetition_penalty", (1,)),
    **_refused(_SAMPLING, "min_p frequency_penalty presence_penalty", (0,)),
    **_refused(_SAMPLING, "top_k", (-1, 0, 1 << 30)),
    **_refused(_SAMPLING, "logit_bias stop stop_regex stop_token_ids ignore_eos"),
    **_refused(_SAMPLING, "no_stop_trim include_stop_str_in_output"),
    **_refused(_SAMPLING, "skip_special_tokens", (True,)),
    **_refused("give stop, or stop_sequences to /v1/messages", "stop_sequences"),
    **_refused(
        "give seed to /v1/chat/completions, or sampling_seed in sampling_params to /generate",
        "seed sampling_seed",
    ),
    **_refused(
        "give max_tokens to a chat, completion or message, max_output_tokens to /v1/responses, or "
        "max_new_tokens in sampling_params to /generate",
        "max_tokens max_completion_tokens max_output_tokens max_new_tokens",
    ),
    **_refused(
        "give min_tokens to a chat or completion, or min_new_tokens in sampling_params to "
        "/generate",
        "min_tokens min_new_tokens",
        (0,),
    ),
    **_refused("no answers are discarded: ask for n", "best_of", (1,)),
    **_refused(_FORMAT, "json_schema regex ebnf guided_json guided_regex guided_grammar"),
    **_refused(_FORMAT, "guided_choice structured_outputs"),
    **_refused(_FORMAT, "response_format", ({"type": "text"},)),
    **_refused("give it in sampling_params to /generate", "lark"),
    **_refused(
        "give it to /v1/messages, or response_format and reasoning_effort to a chat",
        "output_config output_format",
    ),
    # What is returned.
    **_refused(_TO_ALL, "stream extra_key cache_salt"),
    **_refused(
        "give it to /v1/chat/completions, /v1/completions or /v1/responses",
        "stream_options",
        ({"include_usage": False},),
    ),
    **_refused(
        "give logprobs to a chat or completion, or return_logprob and top_logprobs_num to "
        "/generate",
        "logprobs",
    ),
    **_refused("give it to a chat, or logprobs to a completion", "top_logprobs", (0,)),
    **_refused(f"{_TO_GENERATE}, or logprobs to a chat or completion", "return_logprob"),
    **_refused(_TO_GENERATE, "top_logprobs_num", (0,)),
    **_refused(_TO_GENERATE, "logprob_start_len", (-1,)),
    **_refused(_TO_GENERATE, "token_ids_logprob return_text_in_logprobs"),
    **_refused("give echo to /v1/completions", "echo"),
    **_refused(f"{_TO_CHATS} or /generate", "return_routed_experts"),
    **_refused(f"{_TO_CHATS} or /generate", "routed_experts_start_len", (0,)),
    **_refused(f"{_TO_CHATS} or /generate", "data_parallel_rank routed_dp_rank"),
    **_refused(
        "give rid to /v1/chat/completions or /generate: other routes make ids themselves",
        "rid request_id",
    ),
    **_refused(f"{_TO_CHATS}; meta_info always has them", "return_cached_tokens_details"),
    **_refused(f"{_TO_CHATS}; /generate always returns output_ids", "return_token_ids"),
    **_refused(
        f"{_TO_CHATS} or /generate, or return_token_ids to a completion", "return_prompt_token_ids"
    ),
    **_refused(
        f"{_TO_CHATS}, /v1/completions or /generate", "bootstrap_host bootstrap_port bootstrap_room"
    ),
    # Chats.
    **_refused("give it to a route with messages or input", "tools"),
    **_refused("tools are rendered as they are given", "tool_choice", ("auto",)),
    **_refused(_TO_CHATS, "parallel_tool_calls separate_reasoning stream_reasoning", (True,)),
    **_refused(_TO_CHATS, "include_reasoning add_generation_prompt", (True,)),
    **_refused(_TO_CHATS, "continue_final_message"),
    **_refused(
        "give reasoning_effort or chat_template_kwargs to /v1/chat/completions",
        "reasoning thinking reasoning_effort chat_template_kwargs",
    ),
    # Responses.
    **_refused(_TO_RESPONSES, "background include previous_response_id"),
    **_refused(_TO_RESPONSES, "truncation", ("disabled",)),
}

FOREIGN_FIELDS: Final[dict[str, ForeignField]] = {
    **ROUTE_FIELDS,
    # They label, trace or schedule a request, or are hints: no answer depends on them.
    **_ignored("user metadata store service_tier safety_identifier prompt_cache_key"),
    **_ignored("prompt_cache_retention prediction priority session_id conversation_id routing_key"),
    **_ignored("prompt_cache_options access_programs betas cache_control diagnostics"),
    **_ignored("inference_geo speed user_profile_id workspace_id billing_policy"),
    **_ignored("log_metrics custom_labels external_trace_header received_time"),
    **_ignored("return_flat_raw_top_logprobs_b64"),
    # It limits calls of tools that this server does not have.
    **_ignored("max_tool_calls"),
    # It lets a server drop old turns to save tokens; here the model always reads all of them.
    **_ignored("context_management"),
    # They are about requests that a provider declines: this server declines none.
    **_ignored("fallbacks fallback_credit_token"),
    # Input other than text.
    **_refused(
        "this server reads text and token ids only",
        "image_data video_data audio_data mm_hashes mm_content_hashes use_audio_in_video "
        "video_config images_config mm_processor_kwargs media_io_kwargs max_dynamic_patch "
        "min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch num_items_assigned "
        "need_wait_for_mm_inputs encoder_urls",
    ),
    **_refused(
        "embeddings cannot stand for tokens: send text or token ids",
        "input_embeds prompt_embeds positional_embed_overrides",
    ),
    **_refused("no documents are rendered: put them into a message", "documents"),
    **_refused("prompts are not cut: send one that fits", "truncate_prompt_tokens truncation_side"),
    **_refused("a prompt is continued only at its end", "suffix"),
    **_refused("the chat template is the model's, or --chat-template", "chat_template"),
    # Output other than text.
    **_refused("this server answers in text", "audio image"),
    **_refused(
        'this server answers in text: give ["text"] or leave it out', "modalities", ("text",)
    ),
    **_refused("hidden states never leave the ranks", "return_hidden_states"),
    **_refused("no images are made", "return_bytes"),
    **_refused("no model with an indexer is served", "return_indexer_topk"),
    **_refused("entropies are not computed: give return_logprob", "return_entropy"),
    **_refused(
        "what top-k and top-p leave is not returned: give return_logprob and top_logprobs_num",
        "return_sampling_mask sampling_logprobs_mode",
    ),
    **_refused(
        "logprobs have one form here: give top_logprobs_num",
        "return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs flat_logprobs",
    ),
    **_refused("give token_ids_logprob to /generate", "logprob_token_ids"),
    **_refused("give echo and logprobs to /v1/completions", "prompt_logprobs"),
    **_refused(
        "give return_token_ids to /v1/chat/completions or /v1/completions",
        "return_tokens_as_token_ids",
    ),
    **_refused("send single ids to /detokenize", "return_token_strs"),
    **_refused("give return_token_ids", "return_input_ids_in_sglext return_output_ids_in_sglext"),
    **_refused("/generate returns meta_info", "return_meta_info"),
    **_refused("drafts of single requests are not counted", "return_spec_tokens_details"),
    **_refused("texts are always made: read output_ids of /generate", "detokenize", (True,)),
    **_refused(
        "outputs grow or come whole: give stream",
        "output_kind output_text_buffer_length",
        (False, 0),
    ),
    **_refused("answers are not watermarked", "watermark", (False, {"enabled": False})),
    # The model and how it decodes.
    **_refused("no adapters are served", "lora_path lora_id"),
    **_refused(
        "requests cannot carry code",
        "custom_logit_processor custom_params logits_processors extra_args vllm_xargs",
    ),
    **_refused("there is no beam search", "use_beam_search early_stopping"),
    **_refused("there is no beam search", "beam_width length_penalty", (1,)),
    **_refused("give logit_bias", "allowed_token_ids bad_words"),
    **_refused("give repetition_penalty", "repetition_detection"),
    **_refused(
        "give response_format json_schema, regex or ebnf",
        "structural_tag guided_whitespace_pattern",
    ),
    **_refused("--grammar-backend sets it for all requests", "guided_decoding_backend"),
    **_refused("--stream-interval sets it for all requests", "stream_interval"),
    **_refused(
        "this tokenizer never adds such spaces: leave it out",
        "spaces_between_special_tokens",
        (True,),
    ),
    **_refused("the prefix cache is always read: give cache_salt", "skip_reading_prefix_cache"),
    # Chats.
    **_refused("give tools instead", "functions"),
    **_refused("give tool_choice instead", "function_call", ("none",)),
    **_refused("this server has no web search", "web_search_options"),
    **_refused("ask for it in a message", "verbosity", ("medium",)),
    **_refused("no model with such tasks is served: ask for it in a message", "task"),
    **_refused(
        "give reasoning_effort or chat_template_kwargs to /v1/chat/completions",
        "require_reasoning",
    ),
    **_refused(
        "reasoning has no limit of its own: give max_tokens",
        "max_thinking_tokens thinking_token_budget",
    ),
    # The Responses and Messages APIs.
    **_refused("give previous_response_id, or the whole conversation in input", "conversation"),
    **_refused("this server has no moderation model", "moderation"),
    **_refused("conversations are not summarised: send all messages", "compaction"),
    **_refused("no messages are kept: send the whole conversation", "thread"),
    **_refused("this server runs no code: leave it out", "container"),
    **_refused("this server calls no tools itself: give tools", "mcp_servers"),
    # State on the server, and work that several servers share.
    **_refused("no session is kept: send the whole prompt", "session_params"),
    **_refused("the server's --log-requests decides about logs", "no_logs"),
    **_refused(
        "two instances find each other by bootstrap_host, bootstrap_port and bootstrap_room",
        "bootstrap_pair_key decode_tp_size disagg_prefill_dp_rank kv_transfer_params "
        "ec_transfer_params",
    ),
    **_refused("the prefix cache has no storage behind it", "kv_hints"),
    **_refused("SGLang's processes use it among themselves", "http_worker_ipc"),
    **_refused(
        "scores of several items are not computed at once: send a request for each",
        "multi_item_delimiter_indices token_indices_to_pool",
    ),
}


def drop_foreign(name: str, value: Any) -> bool:
    """Whether the field is one of the table, to be left out; Unsupported if its value asks for
    something."""
    if (field := FOREIGN_FIELDS.get(name)) is None:
        return False
    if field.missing is not None and not _is_off(value, field.off):
        raise Unsupported(name, f"{name} is not supported: {field.missing}")
    return True


def _is_off(value: Any, off: Iterable[Any]) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_off(item, off) for item in value)
    if not isinstance(value, bool | int | float | str | dict | None):
        return False
    return value is None or value in ("", {}) or any(_equal(value, same) for same in off)


def _equal(value: Any, same: Any) -> bool:
    """Unlike in Python, a number is not a boolean."""
    return isinstance(value, bool) == isinstance(same, bool) and bool(value == same)
