"""Request fields of other APIs: as good as left out at their default, refused by name otherwise."""

import inspect
import json
from dataclasses import replace
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from openai.resources.responses import Responses

from moesaic.core.foreign_fields import FOREIGN_FIELDS, ROUTE_FIELDS, Unsupported
from moesaic.core.sampling import ALIASES, SamplingParams
from moesaic.engine.frontend.inputs import PER_PROMPT, GenerateInput, GenerateOptions
from moesaic.server import bodies
from moesaic.server.anthropic.bodies import CountTokensBody, MessagesBody
from moesaic.server.anthropic.translation import chat_body as message_chat
from moesaic.server.errors import Refusal
from moesaic.server.openai.prompts import template_kwargs, tools_of, with_allowed_tools
from moesaic.server.openai.request_types import ChatBody, CompletionBody
from moesaic.server.responses_api.bodies import InputTokensBody, ResponsesBody
from moesaic.server.responses_api.translation import chat_body
from moesaic.server.tokens import DetokenizeBody, TokenizeBody

# The fields of SGLang 0.5.23's requests that are off by null, false, and another default.
GENERATE = {
    **dict.fromkeys(
        "rid session_id text input_embeds image_data video_data audio_data mm_hashes "
        "mm_content_hashes video_config sampling_params watermark return_logprob "
        "logprob_start_len top_logprobs_num token_ids_logprob return_sampling_mask "
        "sampling_logprobs_mode modalities session_params lora_path lora_id "
        "custom_logit_processor positional_embed_overrides bootstrap_host bootstrap_port "
        "bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank "
        "disagg_prefill_dp_rank routing_key conversation_id http_worker_ipc max_thinking_tokens "
        "priority extra_key custom_labels external_trace_header received_time "
        "need_wait_for_mm_inputs num_items_assigned encoder_urls max_dynamic_patch "
        "min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config "
        "mm_processor_kwargs multi_item_delimiter_indices token_indices_to_pool cache_salt "
        "kv_hints".split()
    ),
    **dict.fromkeys(
        "use_audio_in_video return_text_in_logprobs return_flat_raw_top_logprobs "
        "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 stream "
        "return_hidden_states return_routed_experts return_indexer_topk background "
        "require_reasoning no_logs return_bytes return_entropy return_prompt_token_ids".split(),
        False,
    ),
    "input_ids": [1],
    "log_metrics": True,
    "routed_experts_start_len": 0,
}
ROUTING = dict.fromkeys(
    "bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank "
    "data_parallel_rank".split()
)
COMPLETION = {
    **ROUTING,
    **dict.fromkeys(
        "best_of logit_bias logprobs seed stop stream_options suffix user json_schema regex ebnf "
        "stop_token_ids stop_regex lora_path session_id session_params response_format "
        "custom_params custom_logit_processor watermark images_config mm_processor_kwargs rid "
        "extra_key cache_salt priority custom_labels".split()
    ),
    **dict.fromkeys(
        "echo stream return_hidden_states return_routed_experts return_cached_tokens_details "
        "return_spec_tokens_details return_token_ids no_stop_trim ignore_eos".split(),
        False,
    ),
    "model": "default",
    "prompt": "x",
    "frequency_penalty": 0.0,
    "max_tokens": 16,
    "n": 1,
    "presence_penalty": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "routed_experts_start_len": 0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
}
CHAT = {
    **ROUTING,
    **dict.fromkeys(
        "logit_bias top_logprobs max_tokens max_completion_tokens response_format seed stop "
        "stream_options temperature top_p user tools tool_choice sampling_logprobs_mode "
        "reasoning_effort thinking task top_k min_p regex ebnf repetition_penalty stop_token_ids "
        "stop_regex lora_path session_id session_params chat_template_kwargs max_dynamic_patch "
        "min_dynamic_patch images_config video_config mm_processor_kwargs "
        "custom_logit_processor custom_params watermark input_ids rid extra_key cache_salt "
        "priority".split()
    ),
    **dict.fromkeys(
        "logprobs stream return_hidden_states return_routed_experts "
        "return_cached_tokens_details return_spec_tokens_details return_prompt_token_ids "
        "return_token_ids return_meta_info return_input_ids_in_sglext "
        "return_output_ids_in_sglext return_sampling_mask return_flat_raw_output_top_logprobs "
        "no_stop_trim ignore_eos continue_final_message use_audio_in_video".split(),
        False,
    ),
    "messages": [{"role": "user", "content": "x"}],
    "model": "default",
    "frequency_penalty": 0.0,
    "n": 1,
    "presence_penalty": 0.0,
    "parallel_tool_calls": True,
    "routed_experts_start_len": 0,
    "return_flat_raw_top_logprobs_b64": True,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
}
TOKENIZE = {
    **dict.fromkeys("messages tools tool_choice reasoning_effort chat_template_kwargs".split()),
    "prompt": "x",
    "model": "default",
    "continue_final_message": False,
    "add_special_tokens": True,
    "add_generation_prompt": None,
}
SAMPLING = {
    **dict.fromkeys(
        "stop stop_token_ids stop_regex beam_width json_schema regex ebnf structural_tag "
        "stream_interval logit_bias sampling_seed custom_params watermark".split()
    ),
    "max_new_tokens": 128,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 1 << 30,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
}
ROUTES = (
    (bodies.GenerateBody, GENERATE, {"input_ids": [1]}),
    (CompletionBody, COMPLETION, {"prompt": "x"}),
    (ChatBody, CHAT, {"messages": CHAT["messages"]}),
    (TokenizeBody, TOKENIZE, {"prompt": "x"}),
)
# What no answer depends on is ignored, whatever its value.
IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prediction", "priority", "session_id", "conversation_id"),
    *("routing_key", "log_metrics", "custom_labels", "external_trace_header", "received_time"),
    *("prompt_cache_options", "access_programs", "betas", "cache_control", "diagnostics"),
    *("inference_geo", "speed", "user_profile_id", "workspace_id", "billing_policy"),
    *("return_flat_raw_top_logprobs_b64", "max_tool_calls", "context_management"),
    *("fallbacks", "fallback_credit_token"),
}
# vLLM's and OpenAI's fields at the values of their clients.
OTHERS: dict[str, Any] = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "best_of": 1,
    "prompt_logprobs": None,
    "bad_words": [],
    "allowed_token_ids": None,
    "truncate_prompt_tokens": None,
    "detokenize": True,
    "modalities": ["text"],
    "function_call": "none",
    "functions": [],
    "audio": None,
    "web_search_options": None,
    "verbosity": "medium",
    "suffix": "",
    "documents": [],
    "kv_transfer_params": {},
    "return_tokens_as_token_ids": False,
}


# The least that each route takes.
LEAST: dict[Any, dict[str, Any]] = {
    bodies.GenerateBody: {"text": "x"},
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": CHAT["messages"]},
    TokenizeBody: {"prompt": "x"},
    DetokenizeBody: {"tokens": [1]},
    ResponsesBody: {"input": "x"},
    InputTokensBody: {"input": "x"},
    MessagesBody: {"messages": CHAT["messages"], "max_tokens": 1},
    CountTokensBody: {"messages": CHAT["messages"]},
}
SAMPLED = {*SamplingParams.__dataclass_fields__, *ALIASES}
DECLARED = {*GenerateOptions.__annotations__, *SAMPLED}.union(
    *(kind.__struct_fields__ for kind in LEAST)
)
# The values of our fields that ask for nothing, besides null and empty ones; else false.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        "parallel_tool_calls separate_reasoning stream_reasoning include_reasoning "
        "add_generation_prompt skip_special_tokens".split(),
        (True,),
    ),
    **dict.fromkeys("temperature top_p n repetition_penalty best_of".split(), (1, 1.0, [1, 1])),
    **dict.fromkeys(
        "min_p frequency_penalty presence_penalty min_tokens min_new_tokens top_logprobs "
        "top_logprobs_num routed_experts_start_len".split(),
        (0, 0.0),
    ),
    "top_k": (-1, 0, 1 << 30),
    "logprob_start_len": (-1,),
    "response_format": ({"type": "text"},),
    "stream_options": ({"include_usage": False},),
    "tool_choice": ("auto",),
    "truncation": ("disabled",),
    "model": ("default",),
}
EMPTY = (None, "", [], {}, [None], [""])
WRONG = (0, 1, -1, False, True, "other", {"other": 1}, [["other"]])


def decoded(kind: Any, given: dict[str, Any]) -> Any:
    return bodies._decode(json.dumps(given).encode(), kind)


@pytest.mark.parametrize(
    ("kind", "fields", "least"), ROUTES, ids=lambda x: getattr(x, "__name__", "")
)
def test_every_field_of_sglang_has_an_answer(kind, fields, least):
    """At its default each is as good as left out; ours aside, any other value is refused."""
    plain = decoded(kind, least)
    for name, default in fields.items():
        known = decoded(kind, {**least, name: default})
        if name in kind.__struct_fields__:
            assert default is None or name == "messages" or getattr(known, name) == default
            continue
        assert known == plain == decoded(kind, {**least, name: [default, default]})
        assert (FOREIGN_FIELDS[name].missing is None) == (name in IGNORED)
        if name in IGNORED:
            assert decoded(kind, {**least, name: "other"}) == plain
            continue
        with pytest.raises(Refusal) as refused:
            decoded(kind, {**least, name: ["other"]})
        assert (refused.value.status, refused.value.param) == (400, name)
        assert refused.value.code == "unsupported_parameter"
        words = f"{name} is not supported: {FOREIGN_FIELDS[name].missing}"
        assert refused.value.message == words
    assert decoded(kind, {**least, **fields}).model in ("default", None)


def test_ignored_fields_are_listed():
    assert {name for name, field in FOREIGN_FIELDS.items() if field.missing is None} == IGNORED
    for kind, least in LEAST.items():
        others = IGNORED.difference(kind.__struct_fields__)
        assert decoded(kind, {**least, **dict.fromkeys(others, 7)}) == decoded(kind, least)


def asks_for(name: str) -> list[Any]:
    """Values of a field that are not neutral. In JSON 0 is not false."""
    neutral = {json.dumps(value) for value in NEUTRAL.get(name, (False,))}
    return [value for value in WRONG if json.dumps(value) not in neutral]


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_fields_of_other_routes(kind):
    """Off they are as good as left out; otherwise the message names the field and what to do."""
    least = LEAST[kind]
    plain = decoded(kind, least)
    for name in DECLARED.difference(kind.__struct_fields__, IGNORED):
        for value in (*EMPTY, *NEUTRAL.get(name, (False,))):
            assert decoded(kind, {**least, name: value}) == plain, (name, value)
        for value in asks_for(name):
            with pytest.raises(Refusal, match=f"^{name} is not supported: ") as no:
                decoded(kind, {**least, name: value})
            assert (no.value.status, no.value.param) == (400, name)
            assert no.value.code == "unsupported_parameter"


def test_fields_of_routes_as_keywords_and_sampling_parameters():
    def called(options: dict[str, Any]) -> GenerateInput:
        return GenerateInput.from_arguments("x", None, None, options)  # type: ignore[arg-type]

    for make, known, plain in (
        (called, {*GenerateOptions.__annotations__, "prompt", "input_ids"}, called({})),
        (SamplingParams.from_dict, SAMPLED, SamplingParams()),
    ):
        for name in DECLARED.difference(known, IGNORED):
            for value in (*EMPTY, *NEUTRAL.get(name, (False,))):
                assert make({name: value}) == plain, (name, value)
            for value in asks_for(name):
                with pytest.raises(Unsupported, match=f"^{name} is not supported: ") as refused:
                    make({name: value})
                assert refused.value.name == name


def test_responses_give_fields_to_the_chat():
    keys = {"extra_key": "k", "cache_salt": "s", "stop_regex": ["a"]}
    chat = chat_body(decoded(ResponsesBody, {"input": "x", **keys}), [], "id")
    assert {name: getattr(chat, name) for name in keys} == keys


def test_the_table_has_every_field_of_the_routes():
    assert set(ROUTE_FIELDS) == DECLARED - IGNORED
    assert set(NEUTRAL) <= set(ROUTE_FIELDS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_logprobs", 0),
        ("thinking_token_budget", 0),
        ("max_thinking_tokens", 0),
        ("bootstrap_pair_key", 0),
        ("detokenize", 1),
        ("best_of", True),
    ],
)
def test_numbers_are_no_booleans(name, value):
    with pytest.raises(Refusal, match=f"{name} is not supported"):
        decoded(ChatBody, {**LEAST[ChatBody], name: value})
    vllm = {"output_kind": 0, "output_text_buffer_length": 0}
    assert decoded(ChatBody, {**LEAST[ChatBody], **vllm}) == decoded(ChatBody, LEAST[ChatBody])


@pytest.mark.parametrize("name", OTHERS)
def test_fields_of_other_apis(name):
    least = {"messages": CHAT["messages"]}
    assert decoded(ChatBody, {**least, name: OTHERS[name]}) == decoded(ChatBody, least)
    with pytest.raises(Refusal, match=f"{name} is not supported: .") as refused:
        decoded(ChatBody, {**least, name: ["text", "audio"]})
    assert refused.value.param == name


def test_sampling_parameters_and_keywords():
    """In `sampling_params` and as keywords of `Engine.generate` they mean the same."""
    ours = set(SamplingParams.__dataclass_fields__)
    for name, default in SAMPLING.items():
        given = SamplingParams.from_dict({name: default})
        assert name not in ours or default is None or getattr(given, name) == default
        if name not in ours:
            assert given == SamplingParams()
            with pytest.raises(Unsupported, match=f"{name} is not supported"):
                SamplingParams.from_dict({name: {"other": 1}})
    assert SamplingParams.from_dict(SAMPLING | {"top_k": -1}) == SamplingParams()
    off = {"best_of": 1, "length_penalty": 1, "use_beam_search": False, "stop": "", "regex": ""}
    assert SamplingParams.from_dict(off) == SamplingParams()

    def called(options: dict[str, Any]) -> GenerateInput:
        return GenerateInput.from_arguments("x", None, None, options)  # type: ignore[arg-type]

    plain = called({})
    for name, default in GENERATE.items():
        if name in ("text", "input_ids", "sampling_params"):
            continue
        if name in GenerateOptions.__annotations__:
            assert called({name: default}).prompt == "x"
            continue
        assert called({name: default}) == plain == called({name: [default]})
        if name not in IGNORED:
            with pytest.raises(Unsupported, match=f"{name} is not supported"):
                called({name: object()})
    with pytest.raises(TypeError, match="unexpected keyword argument 'imagedata'"):
        called({"imagedata": None})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"top_logprob_num": 1},
            "unknown field `top_logprob_num`: did you mean 'top_logprobs_num'?",
        ),
        ({"colour": "red"}, "unknown field `colour`"),
        ({"colour": None, "lora_path": None}, "unknown field `colour`"),
        ({"stream": 5, "lora_path": None}, "Expected `bool`, got `int` - at `$.stream`"),
    ],
)
def test_unknown_fields(given, words):
    """A hint is given only where a field of the route is close."""
    with pytest.raises(Refusal) as refused:
        decoded(bodies.GenerateBody, {"text": "x", **given})
    assert refused.value.message.endswith(words)
    assert refused.value.param == ("stream" if "stream" in given else next(iter(given)))


def test_null_counts_as_left_out():
    given = decoded(bodies.GenerateBody, {"text": "x", "stream": None, "lora_path": [None, None]})
    assert given == bodies.GenerateBody(text="x")
    with pytest.raises(Refusal, match="missing required field `messages`"):
        decoded(ChatBody, {"messages": None})


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_lists_of_nulls_count_as_left_out(kind):
    """Of required fields they do not: the message says what is wrong with them."""
    least = LEAST[kind]
    plain = decoded(kind, least)
    for field in msgspec.structs.fields(kind):
        for value in ([None], [None, None], [[None], None]):
            if field.name in least:
                continue
            found = getattr(decoded(kind, {**least, field.name: value}), field.name)
            assert found in (getattr(plain, field.name), value), (field.name, value)
    with pytest.raises(Refusal, match=r"Expected `object`, got `null` - at `\$\.messages\[0\]`"):
        decoded(ChatBody, {"messages": [None]})


OFF: Any = dict.fromkeys(("logprob_start_len", "return_logprob", "top_logprobs_num"))


def test_lists_of_nulls_as_keywords():
    """However many there are; a list may also have a value for some prompts only."""
    plain = GenerateInput("x", **OFF)
    for name in (*PER_PROMPT, "rid", "routed_dp_rank"):
        given = GenerateInput("x", **{name: [None, None]})
        assert getattr(given, name) is None
        assert replace(given, **OFF) == plain
    body = {"text": ["x", "y"], "data_parallel_rank": [None, 0], "rid": ["a", None]}
    given = decoded(bodies.GenerateBody, {**body, "top_logprobs_num": [None, 2]}).to_input()
    assert (given.data_parallel_rank, given.rid) == ([None, 0], ["a", None])


def test_fields_of_every_client():
    """All parameters of the clients' methods are declared here or in the table."""
    for method, kind in (
        (openai.resources.chat.Completions.create, ChatBody),
        (openai.resources.Completions.create, CompletionBody),
        (Responses.create, ResponsesBody),
        (anthropic.resources.Messages.create, MessagesBody),
        (anthropic.resources.beta.Messages.create, MessagesBody),
        (anthropic.resources.beta.Messages.count_tokens, CountTokensBody),
    ):
        extra = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
        names = inspect.signature(method).parameters.keys() - extra
        unknown = names - {*kind.__struct_fields__, *FOREIGN_FIELDS}
        assert not unknown, (method, unknown)
        off = dict.fromkeys(names - LEAST[kind].keys())
        assert decoded(kind, {**LEAST[kind], **off}) == decoded(kind, LEAST[kind])


def test_the_highest_effort():
    """OpenAI's and Anthropic's clients have it, and templates do not."""
    chat = decoded(ChatBody, {**LEAST[ChatBody], "reasoning_effort": "max"})
    response = decoded(ResponsesBody, {"input": "x", "reasoning": {"effort": "max"}})
    message = decoded(MessagesBody, {**LEAST[MessagesBody], "output_config": {"effort": "max"}})
    for body in (chat, chat_body(response, [], "id"), message_chat(message, "id")):
        assert template_kwargs(body) == {"reasoning_effort": "xhigh"}


FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in ("lay", "lift", "turn")]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_of_a_chat(mode):
    allowed = {"mode": mode, "tools": FUNCTIONS[:2]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {**LEAST[ChatBody], "tools": FUNCTIONS, "tool_choice": choice}
    chat = with_allowed_tools(decoded(ChatBody, body))
    tools, found = tools_of(chat)
    assert ([tool.name for tool in tools], found) == (["lay", "lift"], mode)
    assert len(chat.tools) == 2  # the template renders these
    for wrong, words in (
        ({"tools": FUNCTIONS[1:]}, "allows a tool that is not in tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "needs allowed_tools, with mode and tools"),
        ({"tool_choice": {"type": "function"}}, "needs function.name"),
    ):
        with pytest.raises(Refusal, match=words) as refused:
            tools_of(with_allowed_tools(decoded(ChatBody, {**body, **wrong})))
        assert refused.value.param == "tool_choice"


def test_refused_fields_are_not_documented():
    """openapi.json is made of the fields of these types."""
    nowhere = FOREIGN_FIELDS.keys() - ROUTE_FIELDS.keys()
    refused = {name for name in nowhere if FOREIGN_FIELDS[name].missing is not None}
    for kind in LEAST:
        assert not refused & set(kind.__struct_fields__)
