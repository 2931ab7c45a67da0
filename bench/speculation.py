"""Tokens a second with drafts against none, in one engine, whose text follows a script.

    python -m bench.speculation --model-path shape:qwen3-30b-a3b --load-format dummy \
        --dtype bfloat16

No drafter predicts the text of random weights. Here the next token is a function of the
newest one: its logit gets a large amount, in all steps alike, so that the script costs the same
with and without drafts. The function decides the text: `loops` repeats after 64 tokens, `free`
never. Graphs of steps with prompts are off, as they keep no row's token.

- `simulated`: drafts that follow the script, each with a given probability. They cost nothing to
  make, so that this is what verifying costs and gives.
- `ngram`: the drafter that looks for repetitions, on both texts.
- `layer`: as simulated, but the drafts are those of a model of one of the target's layers, with an
  embedding and a head, which computes each of them first; what it proposes is replaced. Only with
  `--only layer`, as the model takes memory.

Of each batch, text and probability it measures steps without drafts, with each fixed number of
them, and with as many as the controller chooses, one after the other. Each figure has new requests,
as a step takes longer the longer its texts have become. All must give the script's tokens.
`--out` has the rows of a case as soon as that is measured.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bench.common import (
    Distinct,
    check_out,
    complaints_in_a_line,
    engine_flags,
    merge,
    positive,
    print_table,
)
from moesaic.cli.common import read_args
from moesaic.config.args import ServerArgs
from moesaic.config.resolve import resolve
from moesaic.core.draft_shape import DraftShape, chains
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan import StepHandle, StepPlan, StepResult
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.speculate.controller import DraftController
from moesaic.engine.speculate.drafters import Drafter
from moesaic.engine.speculate.ngram import NgramDrafter
from moesaic.engine.speculate.ngram_index import NgramIndex
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.blocks import CausalLM
from moesaic.models.config import RawConfig
from moesaic.models.tiny import materialise

# Tokens of a loop, and loops.
LOOP: Final = 64
LOOPS: Final = 16
# From the beginning of a free text to the next one's.
FREE_TOKENS: Final = 4000
# Added to the logit of the script's next token.
AMOUNT: Final = 1e4
NGRAM_DRAFTS: Final = 11
# Without --quick.
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STEPS: Final = (1, 2, 3, 4)
RATES: Final = (0.9, 0.5, 0.7)
# Chances follow each other by this share, so that few of them have the wanted mean.
GOLDEN: Final = (math.sqrt(5) - 1) / 2
QUICK_BATCHES: Final = (1, 8, 32, 128)
QUICK_NGRAM: Final = (1, 8, 32)
# So that few graphs are captured; those of steps with drafts have more rows.
QUICK_GRAPHS: Final = "1 2 4 8 16 32 64 128"
DRAFTERS: Final = ("ngram", "simulated", "layer")


@dataclass(frozen=True)
class Case:
    drafter: str  # one of DRAFTERS
    text: str  # loops or free
    rate: float  # probability that a simulated draft is right
    drafts: tuple[int, ...]  # of a request, at most: each of these, and up to the last as they pay
    batch: int


@dataclass(frozen=True)
class Row:
    """Tokens a second of requests that all decode. `adaptive`: with up to the most drafts of the
    case, of whose fixed numbers `drafts` is one."""

    model: str
    device: str
    drafter: str
    text: str
    rate: float
    drafts: int
    batch: int
    context: int
    plain_tok_s: float
    fixed_tok_s: float
    adaptive_tok_s: float
    accept_len: float
    plain_ms: float
    fixed_ms: float
    chosen: int  # drafts that the controller allows at last

    @property
    def key(self) -> tuple[Any, ...]:
        return self.model, self.device, self.drafter, self.text, self.rate, self.drafts, self.batch


class Script:
    """The next token of every token."""

    def __init__(self, vocab: int) -> None:
        ids, room = torch.arange(vocab), 1 << (vocab.bit_length() - 1)
        loops = ids // LOOP % LOOPS * LOOP + (ids + 1) % LOOP
        # All tokens below a power of two in one long loop.
        free = (ids % room * 1_664_525 + 1_013_904_223) % room
        self._tables = {"loops": loops % vocab, "free": free}
        self._loop_tokens = min(vocab, LOOP * LOOPS)
        self.rows: Tensor | None = None
        """The rows of the launched step whose logits are needed."""
        self.text, self.next_V = "free", free.clone()
        self._host: list[int] = free.tolist()

    def choose(self, text: str) -> None:
        """In place, as graphs read the table."""
        self.text = text
        self.next_V.copy_(self._tables[text])
        self._host = self._tables[text].tolist()

    def start_of_loop(self, number: int) -> int:
        return number * 7919 % self._loop_tokens

    def follow(self, token: int, count: int) -> list[int]:
        """The tokens after `token`."""
        found = list[int]()
        for _ in range(count):
            token = self._host[token]
            found.append(token)
        return found

    @contextmanager
    def patched(self, device: torch.device) -> Iterator[None]:
        """Models that run meanwhile follow the script."""
        self.next_V = self.next_V.to(device)
        forward, logits, latest = CausalLM.forward, CausalLM.logits, list[Tensor]()

        def note(model: CausalLM, ids_T: Tensor, *rest: Any) -> Tensor:
            if not _is_draft(model):
                latest[:] = [ids_T]
            return forward(model, ids_T, *rest)

        def scripted(model: CausalLM, x_RH: Tensor, rows: Sequence[int] = ()) -> Tensor:
            logits_RV = logits(model, x_RH, rows)
            if _is_draft(model):
                return logits_RV
            ids_R = latest[0]
            if len(ids_R) != len(logits_RV):
                if self.rows is None:  # a step of the warm-up
                    return logits_RV
                ids_R = ids_R[self.rows.to(device)][: len(logits_RV)]
            next_R1 = self.next_V[ids_R][:, None]
            amount_R1 = torch.full_like(next_R1, AMOUNT, dtype=logits_RV.dtype)
            return logits_RV.scatter(1, next_R1, amount_R1)

        CausalLM.forward, CausalLM.logits = note, scripted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            CausalLM.forward, CausalLM.logits = forward, logits  # type: ignore[method-assign]


def _is_draft(model: CausalLM) -> bool:
    return len(model.model.layers) == 1


class ScriptDrafter:
    """Drafts that are right with probability `rate`."""

    def __init__(self, script: Script, rate: float, drafts: int) -> None:
        self._script, self._rate, self._drafts = script, rate, drafts
        self._chance = 0.5

    def propose(self, requests: Sequence[Request], shape: DraftShape) -> None:
        for request in requests:
            request.drafts = self.drafts(request)

    def drafts(self, request: Request) -> list[int]:
        found = self._script.follow(request.token_ids[-1], self._drafts)
        self._chance = (self._chance + GOLDEN) % 1
        right = int(math.log(max(self._chance, 1e-9)) / math.log(self._rate))
        return found[:right] + [token ^ 1 for token in found[right:]]


@dataclass(frozen=True)
class Measured:
    tok_s: float
    step_ms: float
    accept_len: float


class Runs:
    def __init__(self, core: LocalCore, script: Script, options: argparse.Namespace) -> None:
        self.core, self.script = core, script
        self.context, self.seconds, self.settle = options.context, options.seconds, options.settle
        self.model: str = options.model
        self._number, self._start, self._begin = 0, 1, core.runner.begin
        self._requests = list[Request]()
        self._steps = core.planner.drafts.steps
        self._replaced: ScriptDrafter | None = None
        self._apply = core.planner.apply
        core.runner.begin = self._noting_begin  # type: ignore[method-assign]
        core.planner.apply = self._replacing_apply  # type: ignore[method-assign]
        self._use(None, DraftController(chains(1), adaptive=False))

    def _noting_begin(self, plan: StepPlan, *rest: Any) -> StepHandle:
        self.script.rows = torch.from_numpy(plan.logit_rows())
        return self._begin(plan, *rest)

    def _replacing_apply(self, step: InflightStep, result: StepResult) -> None:
        self._apply(step, result)
        if self._replaced is not None:
            for request in self._requests:
                if request.drafts:
                    request.drafts = self._replaced.drafts(request)[: len(request.drafts)]

    def _use(
        self, drafter: Drafter | None, controller: DraftController, layer: bool = False
    ) -> None:
        """All steps in flight are completed."""
        while self.core.loop.inflight:
            self.core.loop.complete_oldest()
        planner = self.core.planner
        self._replaced = drafter if layer and isinstance(drafter, ScriptDrafter) else None
        planner.drafts.drafter = None if layer else drafter
        planner.drafts.controller = controller
        planner.drafts.steps = self._steps if layer else 0
        config = replace(planner.scheduler.config, has_draft_model=layer)
        planner.scheduler.config = config

    def _open(self, batch: int) -> None:
        """New requests that all decode."""
        self.close()
        self._requests = [self._request() for _ in range(batch)]
        while any(not request.num_output for request in self._requests):
            self.core.step()

    def close(self) -> None:
        self._use(None, DraftController(chains(1), adaptive=False))
        for request in self._requests:
            self.core.abort(request.request_no)
        while self.core.has_work:
            self.core.step()
        self._requests = []

    def measure(
        self,
        batch: int,
        drafter: Drafter | None,
        controller: DraftController,
        layer: bool = False,
        settles: bool = False,
    ) -> Measured:
        """Times steps in which all requests decode. If it `settles`, the controller has seen others
        before."""
        seconds = [self.settle] if settles else []
        for uncounted in (*seconds, self.settle / 8):
            self._open(batch)
            self._use(drafter, controller, layer)
            self._run_for(uncounted)
        before = self._totals(self._requests)
        self._run_for(self.seconds)
        after = self._totals(self._requests)
        self._check(self._requests)
        when, tokens, steps, verified, accepted = (
            b - a for a, b in zip(before, after, strict=True)
        )
        return Measured(tokens / when, 1e3 * when / steps, 1 + accepted / max(1, verified))

    def _run_for(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.core.step()

    def _totals(self, requests: Sequence[Request]) -> tuple[float, ...]:
        """All steps are completed, so that a step that is in flight counts to neither side."""
        while self.core.loop.inflight:
            self.core.loop.complete_oldest()
        return (
            time.perf_counter(),
            sum(r.num_output for r in requests),
            self.core.planner.num_steps,
            sum(r.draft_counts[0] for r in requests),
            sum(r.draft_counts[2] for r in requests),
        )

    def _request(self) -> Request:
        """Its prompt follows the script, too."""
        self._number += 1
        number, room = self._number, self.core.facts.context_length - self.context
        first = self._next_start(number)
        prompt = [first, *self.script.follow(first, self.context - 1)]
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        request = Request(str(number), prompt, params, number, room - 1, number)
        self.core.add(RequestState(request, None, lambda progress: None))
        return request

    def _next_start(self, number: int) -> int:
        """Of free text: far behind that of the request before on the loop of all tokens."""
        if self.script.text != "free":
            return self.script.start_of_loop(number)
        self._start = self.script.follow(self._start, FREE_TOKENS)[-1]
        return self._start

    def _check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            answer = request.output_ids
            if answer != self.script.follow(request.prompt_ids[-1], len(answer)):
                raise SystemExit(f"request {request.rid} does not follow the script")


def run_case(runs: Runs, case: Case, args: ServerArgs) -> list[Row]:
    """A row of each fixed number of drafts."""
    if runs.script.text != case.text:
        runs.close()
        runs.script.choose(case.text)
    most, layer = max(case.drafts), case.drafter == "layer"

    def measured(drafts: int, controller: DraftController, settles: bool = False) -> Measured:
        drafter: Drafter | None = None
        if drafts and case.drafter == "ngram":
            drafter = NgramDrafter(NgramIndex(10_000_000, 18), drafts)
        elif drafts:
            drafter = ScriptDrafter(runs.script, case.rate, drafts)
        return runs.measure(case.batch, drafter, controller, layer and drafts > 0, settles)

    chosen = DraftController(chains(most), adaptive=True)
    plain = measured(0, DraftController(chains(1), adaptive=False))
    found = {k: measured(k, DraftController(chains(k), adaptive=False)) for k in case.drafts}
    adaptive = measured(most, chosen, settles=True)
    return [
        Row(
            model=runs.model,
            device=torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            drafter=case.drafter,
            text=case.text,
            rate=case.rate,
            drafts=drafts,
            batch=case.batch,
            context=runs.context,
            plain_tok_s=round(plain.tok_s, 1),
            fixed_tok_s=round(fixed.tok_s, 1),
            adaptive_tok_s=round(adaptive.tok_s, 1),
            accept_len=round(fixed.accept_len, 3),
            plain_ms=round(plain.step_ms, 3),
            fixed_ms=round(fixed.step_ms, 3),
            chosen=chosen.shape.drafts,
        )
        for drafts, fixed in found.items()
    ]


def cases(options: argparse.Namespace) -> list[Case]:
    """The most important ones first."""
    drafters = options.only or ("ngram", "simulated")
    batches = QUICK_BATCHES if options.quick else BATCHES
    short = QUICK_NGRAM if options.quick else BATCHES
    rates = RATES[:1] if options.quick and "layer" in drafters else RATES
    texts = [("ngram", t, 0.0, (NGRAM_DRAFTS,), b) for t in ("free", "loops") for b in short]
    guessed = [(d, "free", r, STEPS, b) for r in rates for b in batches for d in DRAFTERS[1:]]
    found = [Case(*one) for one in (*texts, *guessed) if one[0] in drafters]
    return [case for case in found if case.batch <= options.most]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m bench.speculation",
        description=(__doc__ or "").splitlines()[0],
        epilog="Flags of the engine are taken, too: --model-path, --device and all others.",
        allow_abbrev=False,
    )
    made.add_argument("--quick", action="store_true", help="the most important cases")
    made.add_argument("--most", type=positive, default=256, help="leave larger batches out")
    made.add_argument("--context", type=positive, default=512, help="tokens of each prompt")
    made.add_argument("--seconds", type=float, default=0.4, help="for each figure")
    made.add_argument("--settle", type=float, default=1.2, help="for the controller, before it is")
    made.add_argument("--only", nargs="+", action=Distinct, choices=DRAFTERS)
    made.add_argument("--out", type=Path, help="JSON list of rows, to which new ones are added")
    return made


def read_flags(rest: Sequence[str], options: argparse.Namespace) -> ServerArgs:
    given = engine_flags("speculation", rest)
    most = max(case.batch for case in cases(options))
    defaults = {
        "max_running_requests": str(most),
        "log_level": "warning",
        "random_seed": "0",
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": str(NGRAM_DRAFTS + 1),
    }
    if options.quick:
        defaults["cuda_graph_bs"] = QUICK_GRAPHS.split()
    if options.only and "layer" in options.only:
        path = str(given.get("model_path", ""))
        layer = path + (":" if ":" not in path else ",") + "num_hidden_layers=1"
        defaults |= {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": materialise(layer),
        }
    read = resolve(read_args(defaults | given))
    if read.tp_size * read.pp_size * read.dp_size > 1:
        raise ValueError("this measures one rank: leave out --tp-size, --pp-size and --dp-size")
    options.model = read.model_path.partition(":")[2] or Path(read.model_path).name
    folder = materialise(read.model_path)
    changes: dict[str, Any] = {"disable_radix_cache": True, "skip_tokenizer_init": True}
    return replace(read, model_path=folder, disable_prefill_cuda_graph=True, **changes)


def report(row: Row) -> list[str]:
    return [
        row.drafter + " " + row.text,
        f"{row.rate:g}",
        str(row.drafts),
        str(row.batch),
        f"{row.plain_tok_s:,.0f}",
        f"{row.fixed_tok_s:,.0f}",
        f"{row.adaptive_tok_s:,.0f}",
        f"{row.fixed_tok_s / row.plain_tok_s:.2f}",
        f"{row.adaptive_tok_s / row.plain_tok_s:.3f}",
        f"{row.accept_len:.2f}",
        f"{row.plain_ms:.2f}",
        f"{row.fixed_ms:.2f}",
        str(row.chosen),
    ]


HEADER: Final = [
    *("case", "rate", "drafts", "batch", "plain tok/s", "fixed tok/s", "adaptive tok/s", "fixed"),
    *("adaptive", "accept len", "plain ms", "fixed ms", "chosen"),
]


def main(words: Sequence[str] | None = None) -> None:
    options, rest = parser().parse_known_args(words)
    logging.basicConfig(level=logging.WARNING)
    with complaints_in_a_line():
        if options.out is not None:
            check_out(options.out)
        args = read_flags(rest, options)
        chosen = cases(options)
        device = torch.device("cuda" if args.device == "cuda" else "cpu")
        rows = list[Row]()
        make: Callable[[ServerArgs], LocalCore] = LocalCore
        script = Script(RawConfig.read(Path(args.model_path)).integer("vocab_size"))
        with script.patched(device):
            runs = Runs(make(args), script, options)
            for case in chosen:
                made = run_case(runs, case, args)
                rows += made
                for row in made:
                    print(*report(row), flush=True)
                if options.out is not None:
                    merge(options.out, rows)
    print_table(HEADER, [report(row) for row in rows])


if __name__ == "__main__":
    main()
