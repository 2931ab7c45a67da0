"""The input of `generate`: one prompt or a list, validated before anything is submitted."""

from __future__ import annotations

import re
import uuid
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, TypedDict

from moesaic.core.foreign_fields import BadParameter, drop_foreign
from moesaic.core.redact import shown
from moesaic.core.request import Request
from moesaic.core.request_id import seed_of
from moesaic.core.sampling import ALIASES, GRAMMARS, Grammar, SamplingParams
from moesaic.engine.frontend.answer_key import answer_key
from moesaic.engine.frontend.engine_limits import EngineLimits
from moesaic.engine.frontend.input_checks import (
    MAX_SAMPLES,
    check_distinct,
    check_group,
    check_number,
    check_prompt,
)
from moesaic.engine.frontend.request_options import (
    MAX_TOP_LOGPROBS,
    cache_namespace,
    integer,
    meeting_room,
    only_nulls,
    room_of_sample,
    tokens_to_score,
)
from moesaic.engine.frontend.routed_experts import first_position
from moesaic.engine.text.grammar_check import GrammarChecker
from moesaic.engine.text.stop_regex import check_stop_patterns
from moesaic.engine.text.tokenizer import Tokenizer

MAX_RID = 256
# The cost of preparing a request, in characters of its prompt.
SAMPLE_SIZE = 64
SEED_BITS = 63
SURROGATE = re.compile("[\ud800-\udfff]")
BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
# Arguments of a call that are one value for all prompts, or a list with one for each.
PER_PROMPT = (
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "data_parallel_rank",
    "extra_key",
    "cache_salt",
    *BOOTSTRAP,
)
# Arguments of which a list of nulls is as good as left out.
NULLABLE = (*PER_PROMPT, "rid", "routed_dp_rank")

# The ids of a prompt: its own, and that of its call if the call has several prompts.
PromptIds = tuple[str, ...]


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `Engine.generate`; see GenerateInput."""

    return_logprob: bool | list[bool]
    logprob_start_len: int | list[int]
    top_logprobs_num: int | list[int]
    stream: bool
    return_text_in_logprobs: bool
    return_routed_experts: bool
    routed_experts_start_len: int
    rid: str | list[str] | None
    data_parallel_rank: int | list[int] | None
    routed_dp_rank: int | list[int] | None
    token_ids_logprob: list[int] | list[list[int]] | None
    extra_key: str | list[str] | None
    cache_salt: str | list[str] | None
    return_prompt_token_ids: bool
    bootstrap_host: str | list[str] | None
    bootstrap_port: int | list[int] | None
    bootstrap_room: int | list[int] | None


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """The arguments of one call; those in PER_PROMPT are one value for all prompts, or a list."""

    prompt: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: Any = None
    return_logprob: Any = False
    logprob_start_len: Any = -1
    top_logprobs_num: Any = 0
    rid: str | list[str] | None = None
    """One id for the call, or a list with one for each prompt."""
    data_parallel_rank: int | list[int] | None = None
    client: Hashable = None
    """Waits in its own line for new grammars to be checked, and may abort the call."""
    stream: bool = False
    """Whether outputs come while they grow, or once at the end."""
    request_id: str = ""
    """By which the client may ask for the answers again; requests without a seed take theirs from
    it."""
    return_text_in_logprobs: bool = False
    return_routed_experts: Any = False
    routed_experts_start_len: Any = 0
    routed_dp_rank: int | list[int] | None = None
    """SGLang's other name of `data_parallel_rank`."""
    token_ids_logprob: Any = None
    """Token ids, or a list of them for each prompt."""
    extra_key: Any = None
    """Only prompts with the same `extra_key` and `cache_salt` share cached pages."""
    cache_salt: Any = None
    return_prompt_token_ids: bool = False
    bootstrap_host: Any = None
    """The host of the prefill instance that computes the prompt."""
    bootstrap_port: Any = None
    """Its --disaggregation-bootstrap-port."""
    bootstrap_room: Any = None
    """What the requests to the two instances have in common, and no others."""

    def __post_init__(self) -> None:
        for name in NULLABLE:
            if isinstance(value := getattr(self, name), list) and only_nulls(value):
                object.__setattr__(self, name, None)
        if self.routed_dp_rank is None:
            return
        if self.data_parallel_rank not in (None, self.routed_dp_rank):
            text = "data_parallel_rank and routed_dp_rank differ: give one of them"
            raise BadParameter("routed_dp_rank", text)
        object.__setattr__(self, "data_parallel_rank", self.routed_dp_rank)
        object.__setattr__(self, "routed_dp_rank", None)

    def sent_by(self, client: Hashable, stream: bool, request_id: str = "") -> GenerateInput:
        """The call of this client. It is not checked again, unlike by `replace`."""
        call = object.__new__(GenerateInput)
        for name in _FIELDS:
            object.__setattr__(call, name, getattr(self, name))
        object.__setattr__(call, "client", client)
        object.__setattr__(call, "stream", stream)
        object.__setattr__(call, "request_id", request_id)
        return call

    @classmethod
    def from_arguments(
        cls, prompt: Any, sampling_params: Any, input_ids: Any, options: GenerateOptions
    ) -> GenerateInput:
        known = GenerateOptions.__annotations__
        for name, value in options.items():
            if name not in known and not drop_foreign(name, value):
                raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
        chosen: Any = {name: value for name, value in options.items() if name in known}
        return cls(prompt, input_ids, sampling_params, **chosen)

    @property
    def is_single(self) -> bool:
        if self.prompt is not None:
            return isinstance(self.prompt, str)
        rows = self._rows()
        return not (len(rows) and (isinstance(rows[0], Sequence) or getattr(rows[0], "ndim", 0)))

    @property
    def size(self) -> int:
        """The rough cost of preparing it, in characters or ids, measured by the first prompts."""
        if isinstance(self.prompt, str):
            total = len(self.prompt)
        else:
            rows = self.input_ids if self.prompt is None else self.prompt
            rows = rows if isinstance(rows, list) else []
            total = len(rows) * (1 if rows and isinstance(rows[0], int) else SAMPLE_SIZE)
            total += sum(len(row) for row in rows[:SAMPLE_SIZE] if isinstance(row, str | list))
        given = self.sampling_params if isinstance(self.sampling_params, list) else []
        total += SAMPLE_SIZE * len(given)
        asked = map(_num_samples, given[:SAMPLE_SIZE] or [self.sampling_params])
        return total + SAMPLE_SIZE * sum(n - 1 for n in asked if isinstance(n, int))

    def output_prompts(self) -> list[str] | None:
        """The prompt of each output of a valid call, if prompts are texts."""
        if self.prompt is None:
            return None
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        params = _per_prompt("sampling_params", self.sampling_params, len(texts))
        pairs = zip(texts, params, strict=True)
        return [text for text, one in pairs for _ in range(_num_samples(one))]

    @property
    def has_grammar(self) -> bool:
        given = self.sampling_params
        return any(map(_has_grammar, given if isinstance(given, list) else [given]))

    def requests(
        self, tokenizer: Tokenizer | None, limits: EngineLimits
    ) -> list[tuple[Request, PromptIds]]:
        """A request for each sample, `n` of each prompt. Grammars are not checked yet."""
        prompts = self._prompts(tokenizer, limits)
        ids_of_prompts = self._ids(len(prompts))
        found: list[tuple[Request, PromptIds]] = []
        calls = self._calls(len(prompts))
        _check_rooms(calls)
        for number, (prompt_ids, call) in enumerate(zip(prompts, calls, strict=True)):
            if number and call.request_id:  # equal prompts have different answers
                call = call.sent_by(call.client, call.stream, f"{call.request_id}/{number}")
            with self._locate_errors(number):
                ids, most = ids_of_prompts[number], MAX_SAMPLES - len(found)
                samples = call._samples(prompt_ids, ids[0], tokenizer, limits, most)
                found += [(request, ids) for request in samples]
        check_distinct([request for request, _ in found])
        if self.request_id:
            for number, (request, _) in enumerate(found):
                request.key = answer_key(self.request_id, request, number)
        return found

    def _calls(self, number: int) -> list[GenerateInput]:
        """The arguments for each of the prompts, as a call of its own."""
        if not any(isinstance(getattr(self, name), list) for name in PER_PROMPT):
            return [self] * number
        columns = [self._column(name, number) for name in PER_PROMPT]
        return [
            replace(self, **dict(zip(PER_PROMPT, values, strict=True)))
            for values in zip(*columns, strict=True)
        ]

    def _column(self, name: str, number: int) -> list[Any]:
        """The value of an argument for each prompt."""
        value = getattr(self, name)
        if name in BOOTSTRAP and isinstance(value, list) and len(value) != number:
            value = self._of_first_samples(value, number)
        if name == "token_ids_logprob" and not _has_lists(value):
            value = [value] * number  # one list is for all prompts
        return _per_prompt(name, value, number)

    def _of_first_samples(self, values: list[Any], number: int) -> list[Any]:
        """SGLang's router gives each sample a room: samples of a prompt follow the first one's."""
        counts = [
            _num_samples(params)
            for params in _per_prompt("sampling_params", self.sampling_params, number)
        ]
        if not all(isinstance(n, int) and n > 0 for n in counts) or sum(counts) != len(values):
            return values  # which is refused
        return [values[first] for first in accumulate(counts[:-1], initial=0)]

    def _samples(
        self,
        prompt_ids: list[int],
        rid: str,
        tokenizer: Tokenizer | None,
        limits: EngineLimits,
        most: int,
    ) -> Iterator[Request]:
        """The requests of one prompt; no argument has a value for each of several prompts."""
        check_group(self.data_parallel_rank, limits.num_groups)
        check_prompt(prompt_ids, limits)
        params = _params(self.sampling_params, tokenizer, limits)
        start, top = self._logprob_range(len(prompt_ids), limits)
        routed = integer("routed_experts_start_len", self.routed_experts_start_len or 0)
        routed_start = first_position(self.return_routed_experts, routed, len(prompt_ids))
        further = tokens_to_score(self.token_ids_logprob, limits.vocab_size)
        namespace = cache_namespace(self.extra_key, self.cache_salt)
        if params.n > most:
            raise ValueError(f"more than {MAX_SAMPLES} outputs at once: ask several times")
        room = limits.max_sequence - len(prompt_ids)
        length = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
        meeting = meeting_room(self, limits.role, limits.bootstrap_hosts) if length else None
        seed = params.sampling_seed
        if seed is None and self.request_id:
            seed = seed_of(self.request_id)
        if seed is None:  # both instances have the same
            seed = limits.seeds.getrandbits(SEED_BITS) if meeting is None else meeting.number
        if meeting is not None and limits.role == "prefill":
            length = 1
        for sample in range(params.n):
            yield Request(
                rid=f"{rid}-{sample}" if sample else rid,
                prompt_ids=prompt_ids,
                params=params,
                seed=_seed_of_sample(seed, sample),
                max_new_tokens=length,
                request_no=next(limits.request_numbers),
                eos_ids=limits.eos_ids,
                return_logprob=bool(self.return_logprob),
                logprob_start=start,
                top_logprobs_num=top if self.return_logprob else 0,
                group=self.data_parallel_rank,  # type: ignore[arg-type]
                routed_start=routed_start,
                routed_row=limits.routed_row,
                cache_namespace=namespace,
                token_ids_logprob=further if self.return_logprob else (),
                room=None if meeting is None else room_of_sample(meeting, sample),
            )

    def _logprob_range(self, prompt_len: int, limits: EngineLimits) -> tuple[int, int]:
        """The first prompt position to report, and the number of alternatives."""
        start, top = self.logprob_start_len, self.top_logprobs_num
        start = -1 if start is None else integer("logprob_start_len", start)
        top = 0 if top is None else integer("top_logprobs_num", top)
        if not -1 <= start < prompt_len:
            raise BadParameter(
                "logprob_start_len",
                f"logprob_start_len {shown(start)} must be -1 or a position in the prompt, which "
                f"has {prompt_len} tokens",
            )
        most = min(MAX_TOP_LOGPROBS, limits.vocab_size)
        if not 0 <= top <= most:
            text = f"top_logprobs_num {shown(top)} must be between 0 and {most}"
            raise BadParameter("top_logprobs_num", text)
        return start if start >= 0 else prompt_len - 1, top

    def check_grammars(self, requests: Sequence[Request], grammars: GrammarChecker) -> None:
        for number, grammar in _grammars(requests):
            with self._locate_errors(number):
                grammars.check(grammar, self.client)

    async def check_grammars_in_turn(
        self, requests: Sequence[Request], grammars: GrammarChecker
    ) -> None:
        for number, grammar in _grammars(requests):
            with self._locate_errors(number):
                await grammars.check_in_turn(grammar, self.client)

    def _ids(self, number: int) -> list[PromptIds]:
        rids = self.rid
        if not isinstance(rids, list):
            self._check_rids([rids])
            if rids is None:
                return [(uuid.uuid4().hex,) for _ in range(number)]
            return [(rids,)] if number == 1 else [(f"{rids}-{i}", rids) for i in range(number)]
        if len(rids) != number:
            raise ValueError(
                f"rid has {len(rids)} ids for {number} prompts: give one for each, or one for the "
                "whole call"
            )
        self._check_rids(rids)
        return [(rid or uuid.uuid4().hex,) for rid in rids]

    def _check_rids(self, rids: list[Any]) -> None:
        given = [rid for rid in rids if rid is not None]
        if not all(isinstance(rid, str) and rid for rid in given):
            raise ValueError(f"rid must be a non-empty text or a list, not {shown(self.rid)}")
        if any(len(rid) > MAX_RID for rid in given):
            raise ValueError(f"rid is too long: give at most {MAX_RID} characters")
        if not all(rid.isprintable() for rid in given):
            # Ids are logged: a line break would forge a log line.
            raise ValueError("rid must have printable characters only")

    def _rows(self) -> Any:
        """`input_ids`, which may also be an array or a tensor."""
        rows: Any = self.input_ids
        if not isinstance(rows, list | tuple) and not getattr(rows, "ndim", 0):
            raise ValueError(f"input_ids must be a list of token ids, not {shown(_plain(rows))}")
        return rows

    def _prompts(self, tokenizer: Tokenizer | None, limits: EngineLimits) -> list[list[int]]:
        """Sizes are checked first, so that excessive input is refused cheaply."""
        if (self.prompt is None) == (self.input_ids is None):
            raise ValueError("give exactly one of prompt and input_ids")
        if self.input_ids is None:
            return self._encoded(tokenizer, limits)
        rows = [self._rows()] if self.is_single else self._rows()
        check_number(rows)
        for number, row in enumerate(rows):
            if hasattr(row, "__len__"):
                with self._locate_errors(number):
                    limits.check_tokens(len(row))
        return [_token_ids(_plain(row)) for row in rows]

    def _encoded(self, tokenizer: Tokenizer | None, limits: EngineLimits) -> list[list[int]]:
        if tokenizer is None:
            raise ValueError(
                "prompt needs a tokenizer, but skip_tokenizer_init is set: give input_ids instead"
            )
        texts: Any = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not isinstance(texts, list | tuple):
            raise ValueError(f"prompt must be a text or a list of texts, not {shown(texts)}")
        check_number(texts)
        for number, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                raise ValueError(f"prompt {number} must be a non-empty text, not {shown(text)}")
            with self._locate_errors(number):
                limits.check_chars(len(text))
            if SURROGATE.search(text):
                raise ValueError(f"prompt {number} is not valid Unicode: it has lone surrogates")
        return [tokenizer.encode(text) for text in texts]

    @contextmanager
    def _locate_errors(self, number: int) -> Iterator[None]:
        """Names the prompt in error messages of calls with several."""
        try:
            yield
        except ValueError as error:
            prefix = "" if self.is_single else f"prompt {number}: "
            error.args = (f"{prefix}{error}",)
            raise


_FIELDS = tuple(field.name for field in fields(GenerateInput))


def _check_rooms(calls: Sequence[GenerateInput]) -> None:
    rooms = [call.bootstrap_room for call in calls if isinstance(call.bootstrap_room, int)]
    if len({*rooms}) < len(rooms):
        text = (
            f"bootstrap_room: {len(rooms)} prompts need {len(rooms)} different rooms: give a list"
        )
        raise BadParameter("bootstrap_room", text)


def _grammars(requests: Sequence[Request]) -> Iterator[tuple[int, Grammar]]:
    """The grammar of each prompt that has one, with the prompt's number."""
    number = position = 0
    while position < len(requests):
        params = requests[position].params
        if params.grammar is not None:
            yield number, params.grammar
        number, position = number + 1, position + params.n


def _num_samples(sampling: Any) -> int:
    if isinstance(sampling, SamplingParams):
        return sampling.n
    return (sampling.get("n") or 1) if isinstance(sampling, Mapping) else 1


def _has_grammar(sampling: Any) -> bool:
    if isinstance(sampling, SamplingParams):
        return sampling.grammar is not None
    return isinstance(sampling, Mapping) and any(name in sampling for name in GRAMMARS)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _token_ids(row: Any) -> list[int]:
    if not isinstance(row, list | tuple):
        raise ValueError(f"input_ids mixes token ids and lists of them: {shown(row)}")
    if set(map(type, row)) == {int}:
        return list(row)
    return [integer("input_ids", _plain(token)) for token in row]


def _has_lists(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, list) for item in value)


def _per_prompt(name: str, value: Any, number: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * number
    if len(value) != number:
        raise BadParameter(name, f"{name} has {len(value)} entries for {number} prompts")
    return value


def _params(given: Any, tokenizer: Tokenizer | None, limits: EngineLimits) -> SamplingParams:
    if given is not None and not isinstance(given, SamplingParams | Mapping):
        text = f"sampling_params must be a dict, not {shown(given)}"
        raise BadParameter("sampling_params", text)
    if limits.preferred and not isinstance(given, SamplingParams):
        given = _with_preferred(given or {}, limits.preferred)
    params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given)
    params.check_vocab(limits.vocab_size)
    if tokenizer is None and (params.stop or params.stop_regex):
        text = "stop strings need a tokenizer: give stop_token_ids instead"
        raise BadParameter("stop" if params.stop else "stop_regex", text)
    check_stop_patterns(params.stop_regex)
    if params.n > MAX_SAMPLES:
        raise BadParameter("n", f"n {params.n} is more than {MAX_SAMPLES}: ask several times")
    return params


def _with_preferred(given: Mapping[str, Any], preferred: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the preferred parameters that are not given, also not by another name."""
    names = {ALIASES.get(name, name) for name, value in given.items() if value is not None}
    left_out = {k: v for k, v in preferred.items() if ALIASES.get(k, k) not in names}
    return left_out | {name: value for name, value in given.items() if value is not None}


def _seed_of_sample(seed: int, sample: int) -> int:
    """The first sample has the given seed; the seeds of the others are far from it."""
    return (seed + sample * 0x9E3779B97F4A7C15) % 2**SEED_BITS
