"""What `generate` was asked for: one or many prompts, checked before anything is submitted."""

from __future__ import annotations

import operator
import random
import re
import uuid
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from moesaic.core.redact import shown, shown_id
from moesaic.core.request import Request
from moesaic.core.sampling import GRAMMARS, Grammar, SamplingParams
from moesaic.engine.frontend.outputs import num_logprobs
from moesaic.engine.text.grammar_check import GrammarChecker
from moesaic.engine.text.tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 1024
MAX_SAMPLES = 4096
MAX_RID = 256
# What preparing a request costs, in characters of its prompt.
SAMPLE_SIZE = 64
# Of one call that somebody waits for over HTTP; each is about 100 bytes in memory.
MAX_LOGPROBS = 1 << 20
SEED_BITS = 63
SURROGATE = re.compile("[\ud800-\udfff]")


class PromptTooLong(ValueError):
    """The prompt does not fit into the context or the cache."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine can serve."""

    vocab_size: int
    context_length: int
    cache_tokens: int
    eos_ids: frozenset[int]
    seeds: random.Random
    """Where requests without a seed get theirs."""
    grammars: GrammarChecker
    num_groups: int = 1
    longest_token: int = 0
    """In characters; 0 without a tokenizer."""

    @property
    def max_sequence(self) -> int:
        return min(self.context_length, self.cache_tokens)

    def check_chars(self, number: int) -> None:
        """PromptTooLong for a text that cannot fit whatever its tokens are. Nobody should wait
        until it is made into tokens."""
        most = self.max_sequence * self.longest_token
        if number > most:
            raise PromptTooLong(
                f"the text has {number} characters and {self.max_sequence} tokens fit, which are "
                f"{most} characters at most: shorten it"
            )

    def check_tokens(self, number: int) -> None:
        """PromptTooLong for so many of a prompt."""
        if number >= self.context_length:
            raise PromptTooLong(
                f"the prompt has {number} tokens and the context holds {self.context_length}, one "
                "of them for the answer: shorten the prompt, or raise --context-length if the "
                "model allows it"
            )
        if number >= self.cache_tokens:
            raise PromptTooLong(
                f"the prompt has {number} tokens and the KV cache holds {self.cache_tokens}: "
                "shorten the prompt or raise --max-total-tokens or --mem-fraction-static"
            )


@dataclass(frozen=True, slots=True)
class RequestSpec:
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    eos_ids: frozenset[int]
    return_logprob: bool
    logprob_start: int
    top_logprobs_num: int
    rid: str = ""
    part_of: tuple[str, ...] = ()
    """The ids of its prompt and of its call."""
    client: Hashable = None
    group: int | None = None

    def to_request(self, arrival: int) -> Request:
        return Request(
            rid=self.rid,
            prompt_ids=self.prompt_ids,
            params=self.params,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            arrival=arrival,
            eos_ids=self.eos_ids,
            return_logprob=self.return_logprob,
            logprob_start=self.logprob_start,
            top_logprobs_num=self.top_logprobs_num,
            group=self.group,
        )


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """The arguments of one call; each but the prompts is one value for all, or a list of them.
    `rid` as one value is the id of the call. `client`: who asks, if that is known: in whose
    turn new grammars are checked, and who may abort it."""

    prompt: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: Any = None
    return_logprob: Any = False
    logprob_start_len: Any = -1
    top_logprobs_num: Any = 0
    rid: str | list[str] | None = None
    data_parallel_rank: int | list[int] | None = None
    client: Hashable = None

    @property
    def is_single(self) -> bool:
        if self.prompt is not None:
            return isinstance(self.prompt, str)
        rows = self._rows()
        return not (len(rows) and (isinstance(rows[0], Sequence) or getattr(rows[0], "ndim", 0)))

    @property
    def size(self) -> int:
        """Characters or token ids, roughly: how long it takes to prepare. Many prompts count as
        long whatever they are, so that not all are looked at."""
        if isinstance(self.prompt, str):
            total = len(self.prompt)
        else:
            rows = self.input_ids if self.prompt is None else self.prompt
            rows = rows if isinstance(rows, list) else []
            total = len(rows) * (1 if rows and isinstance(rows[0], int) else SAMPLE_SIZE)
            total += sum(len(row) for row in rows[:SAMPLE_SIZE] if isinstance(row, str | list))
        given = self.sampling_params if isinstance(self.sampling_params, list) else []
        total += SAMPLE_SIZE * len(given)
        asked = map(_samples_asked, given[:SAMPLE_SIZE] or [self.sampling_params])
        return total + SAMPLE_SIZE * sum(n - 1 for n in asked if isinstance(n, int))

    def text_of(self, index: int) -> str | None:
        """The prompt of an answer, if it came as text; answers of one prompt follow each other."""
        if self.prompt is None or isinstance(self.prompt, str):
            return self.prompt
        given = self.sampling_params
        counts = [_samples_asked(one) for one in _spread("", given, len(self.prompt))]
        owners = [number for number, count in enumerate(counts) for _ in range(count)]
        return self.prompt[owners[index]]

    @property
    def has_grammar(self) -> bool:
        """Whether any of them is to be structured, which may take a while to check."""
        given = self.sampling_params
        return any(
            _asks_for_grammar(one) for one in (given if isinstance(given, list) else [given])
        )

    def specs(self, tokenizer: Tokenizer | None, limits: EngineLimits) -> list[RequestSpec]:
        """One a sample: `n` of each prompt, next to each other. Grammars are not checked yet."""
        prompts = self._prompts(tokenizer, limits)
        columns = zip(
            prompts,
            _spread("sampling_params", self.sampling_params, len(prompts)),
            _spread("return_logprob", self.return_logprob, len(prompts)),
            _spread("logprob_start_len", self.logprob_start_len, len(prompts)),
            _spread("top_logprobs_num", self.top_logprobs_num, len(prompts)),
            strict=True,
        )
        names = zip(
            self._ids(len(prompts)),
            _spread("data_parallel_rank", self.data_parallel_rank, len(prompts)),
            strict=True,
        )
        found: list[RequestSpec] = []
        for number, (column, (ids, group)) in enumerate(zip(columns, names, strict=True)):
            with self._naming(number):
                _check_group(group, limits.num_groups)
                samples = _samples(*column, tokenizer, limits)
                found += [
                    replace(spec, rid=_rid(ids[0], k), part_of=ids, client=self.client, group=group)
                    for k, spec in enumerate(samples)
                ]
                if len(found) > MAX_SAMPLES:
                    raise ValueError(f"more than {MAX_SAMPLES} answers at once: ask several times")
        _check_distinct(found)
        return found

    def check_grammars(self, requests: Sequence[Request], grammars: GrammarChecker) -> None:
        """Those of the call's own requests."""
        for number, grammar in _grammars(requests):
            with self._naming(number):
                grammars.check(grammar, self.client)

    async def check_grammars_in_turn(
        self, requests: Sequence[Request], grammars: GrammarChecker
    ) -> None:
        for number, grammar in _grammars(requests):
            with self._naming(number):
                await grammars.check_in_turn(grammar, self.client)

    def _ids(self, number: int) -> list[tuple[str, ...]]:
        """The ids of each prompt: its own, and that of the call where it differs."""
        rids = self.rid
        if not isinstance(rids, list):
            self._check_rids([rids])
            if rids is None:
                return [(uuid.uuid4().hex,) for _ in range(number)]
            return [(rids,)] if number == 1 else [(f"{rids}-{i}", rids) for i in range(number)]
        if len(rids) != number:
            raise ValueError(
                f"rid has {len(rids)} ids for {number} prompts: give one for each, or one text for "
                "the whole call"
            )
        self._check_rids(rids)
        return [(rid or uuid.uuid4().hex,) for rid in rids]

    def _check_rids(self, rids: list[Any]) -> None:
        if not all(rid is None or (isinstance(rid, str) and rid) for rid in rids):
            raise ValueError(
                f"rid must be a text that is not empty, or a list, not {shown(self.rid)}"
            )
        if any(rid is not None and len(rid) > MAX_RID for rid in rids):
            raise ValueError(f"rid is too long: give at most {MAX_RID} characters")
        if not all(rid is None or rid.isprintable() for rid in rids):
            # They are in lines of the log, which nobody else is to write.
            raise ValueError(
                "rid must have printable characters alone: no line breaks, no controls"
            )

    def _rows(self) -> Any:
        """`input_ids`, which may also be an array or a tensor."""
        rows: Any = self.input_ids
        if not isinstance(rows, list | tuple) and not getattr(rows, "ndim", 0):
            raise ValueError(f"input_ids must be a list of token ids, not {shown(_plain(rows))}")
        return rows

    def _prompts(self, tokenizer: Tokenizer | None, limits: EngineLimits) -> list[list[int]]:
        """Numbers are checked first: what is far too much must not cost anything."""
        if (self.prompt is None) == (self.input_ids is None):
            raise ValueError("give either prompt or input_ids, and not both")
        if self.input_ids is not None:
            rows = [self._rows()] if self.is_single else self._rows()
            _check_number(rows)
            for number, row in enumerate(rows):
                if hasattr(row, "__len__"):
                    with self._naming(number):
                        limits.check_tokens(len(row))
            return [_token_ids(_plain(row)) for row in rows]
        if tokenizer is None:
            raise ValueError(
                "prompt needs a tokenizer and skip_tokenizer_init is set: give input_ids instead"
            )
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not isinstance(texts, list | tuple):
            raise ValueError(f"prompt must be a text or a list of texts, not {shown(texts)}")
        _check_number(texts)
        for number, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                raise ValueError(
                    f"prompt {number} must be a text that is not empty, not {shown(text)}"
                )
            with self._naming(number):
                limits.check_chars(len(text))
            if SURROGATE.search(text):
                raise ValueError(f"prompt {number} is not valid Unicode: it holds lone surrogates")
        return [tokenizer.encode(text) for text in texts]

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Errors say which of several prompts is at fault."""
        try:
            yield
        except ValueError as error:
            where = "" if self.is_single else f"prompt {number}: "
            error.args = (f"{where}{error}",)
            raise


def _grammars(requests: Sequence[Request]) -> Iterator[tuple[int, Grammar]]:
    """Each with the number of its prompt, whose samples stand next to each other."""
    number = position = 0
    while position < len(requests):
        params = requests[position].params
        if params.grammar is not None:
            yield number, params.grammar
        number, position = number + 1, position + params.n


def _check_number(prompts: Sequence[Any]) -> None:
    if len(prompts) > MAX_SAMPLES:
        raise ValueError(f"{len(prompts)} prompts at once: give at most {MAX_SAMPLES}")


def _check_group(group: Any, num_groups: int) -> None:
    if group is not None and not 0 <= _integer("data_parallel_rank", group) < num_groups:
        raise ValueError(
            f"data_parallel_rank {group} is not one of the {num_groups} groups of this service"
        )


def _samples_asked(sampling: Any) -> int:
    if isinstance(sampling, SamplingParams):
        return sampling.n
    return (sampling.get("n") or 1) if isinstance(sampling, Mapping) else 1


def _asks_for_grammar(sampling: Any) -> bool:
    if isinstance(sampling, SamplingParams):
        return sampling.grammar is not None
    return isinstance(sampling, Mapping) and any(name in sampling for name in GRAMMARS)


def _rid(prompt: str, sample: int) -> str:
    """The first sample has the id of its prompt; further ones get a number behind it."""
    return f"{prompt}-{sample}" if sample else prompt


def _check_distinct(specs: Sequence[RequestSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.rid in seen:
            raise ValueError(
                f"rid {shown_id(spec.rid)} would be the id of two answers of this call (samples of "
                "prompt ID have the ids ID, ID-1, ID-2, ...): give each prompt an id that no other "
                "prompt or sample has"
            )
        seen.add(spec.rid)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _token_ids(row: Any) -> list[int]:
    if not isinstance(row, list | tuple):
        raise ValueError(f"input_ids mixes token ids and lists of them: {shown(row)}")
    return [_integer("input_ids", _plain(token)) for token in row]


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be made of integers, not {shown(value)}")
    return operator.index(value)


def _spread(name: str, value: Any, number: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * number
    if len(value) != number:
        raise ValueError(f"{name} has {len(value)} entries for {number} prompts")
    return value


def _samples(
    prompt_ids: list[int],
    sampling: Any,
    return_logprob: Any,
    logprob_start_len: Any,
    top_logprobs_num: Any,
    tokenizer: Tokenizer | None,
    limits: EngineLimits,
) -> Iterator[RequestSpec]:
    _check_prompt(prompt_ids, limits)
    params = _params(sampling, tokenizer, limits)
    start, top = _logprob_range(logprob_start_len, top_logprobs_num, len(prompt_ids), limits)
    room = limits.max_sequence - len(prompt_ids)
    wanted = room if params.max_new_tokens is None else params.max_new_tokens
    seed = params.sampling_seed
    if seed is None:
        seed = limits.seeds.getrandbits(SEED_BITS)
    for sample in range(params.n):
        yield RequestSpec(
            prompt_ids=prompt_ids,
            params=params,
            seed=seed_of_sample(seed, sample),
            max_new_tokens=min(wanted, room),
            eos_ids=limits.eos_ids,
            return_logprob=bool(return_logprob),
            logprob_start=start,
            top_logprobs_num=top if return_logprob else 0,
        )


def _params(given: Any, tokenizer: Tokenizer | None, limits: EngineLimits) -> SamplingParams:
    if given is not None and not isinstance(given, SamplingParams | Mapping):
        raise ValueError(f"sampling_params must be a dict, not {shown(given)}")
    params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given)
    params.check_vocab(limits.vocab_size)
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer: give stop_token_ids instead")
    if params.n > MAX_SAMPLES:
        raise ValueError(f"n {params.n} is more than {MAX_SAMPLES}: ask several times")
    return params


def seed_of_sample(seed: int, sample: int) -> int:
    """The first sample has the seed that was given; the others are apart from it and each other."""
    return (seed + sample * 0x9E3779B97F4A7C15) % 2**SEED_BITS


def check_token_ids(ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"token id {shown(token)} is out of range: this model has ids 0 to {vocab_size - 1}"
            )


def _check_prompt(ids: list[int], limits: EngineLimits) -> None:
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    limits.check_tokens(len(ids))
    check_token_ids(ids, limits.vocab_size)


def _logprob_range(start: Any, top: Any, prompt_len: int, limits: EngineLimits) -> tuple[int, int]:
    """First prompt position to report, and how many alternatives; None means the default."""
    start = -1 if start is None else _integer("logprob_start_len", start)
    top = 0 if top is None else _integer("top_logprobs_num", top)
    if not -1 <= start < prompt_len:
        raise ValueError(
            f"logprob_start_len {shown(start)} must be -1 or a position in the prompt, which has "
            f"{prompt_len} tokens"
        )
    most = min(MAX_TOP_LOGPROBS, limits.vocab_size)
    if not 0 <= top <= most:
        raise ValueError(f"top_logprobs_num {shown(top)} must be between 0 and {most}")
    return start if start >= 0 else prompt_len - 1, top


def check_logprobs(requests: Sequence[Request]) -> None:
    """ValueError where the logprobs that are asked for would fill the memory."""
    entries = sum(num_logprobs(request, 0, request.max_new_tokens) for request in requests)
    if entries > MAX_LOGPROBS:
        raise ValueError(
            f"this could give {entries} logprobs (tokens times one more than the alternatives at "
            f"each), more than {MAX_LOGPROBS}: lower the number of tokens, of alternatives or of "
            "prompts"
        )
