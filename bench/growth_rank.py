"""A rank's step loop without its model, for the host's part of a step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest.mock import patch

import torch
from torch import Tensor

from moesaic.comm.launch.rank_link import RankLink
from moesaic.comm.mesh import Mesh
from moesaic.config import ServerArgs
from moesaic.config.resolve import resolve
from moesaic.core.messages import Submit, encode
from moesaic.core.request import NewRequest
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner import device_penalties, steps
from moesaic.engine.runner.attention import BACKENDS
from moesaic.engine.runner.graphs import CapturedGraphs
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.sampling import gpu_sampler
from moesaic.engine.schedule.inflight import InflightStep
from moesaic.engine.schedule.plan_codec import PlanReceiver, PlanSender
from moesaic.engine.worker.leader import Leader
from moesaic.engine.worker.planner import Planner
from moesaic.engine.worker.rank_stats import RankStatsReporter
from moesaic.engine.worker.stage import SingleStage
from moesaic.engine.worker.step_loop import StepLoop
from moesaic.models.blocks import CausalLM
from moesaic.models.tiny import materialise

# Sampling is the device's work, so that it gets few tokens to choose from.
SMALL_VOCAB, LARGE_VOCAB = 258, 2048
# The smallest model that has all parts: its sizes do not matter, as it is never computed.
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 16384,
}
CHUNK = 65536
DEVICE_WORK: Final = (
    (CapturedGraphs, "run"),
    (steps, "greedy_rows"),
    (gpu_sampler, "greedy_rows"),
    (gpu_sampler, "sample_rows"),
    (device_penalties, "penalise_rows"),
)
MAX_NEW_TOKENS = 512
MIXED_PROMPT = 512
WARM_STEPS = 4


class InstantModel:
    """Answers at once: the token 7 is a little more likely than all others."""

    def __init__(self, hidden: int, rows: int, vocab: int) -> None:
        self._hidden_TH = torch.zeros(CHUNK + rows, hidden)
        self._logits_RV = torch.zeros(rows, vocab)
        self._logits_RV[:, 7] = 1.0

    def __call__(self, ids_T: Tensor, *_: Any) -> Tensor:
        return self._hidden_TH[: len(ids_T)]

    def logits(self, x_RH: Tensor, *_: Any) -> Tensor:
        return self._logits_RV[: len(x_RH)]


class DeviceTime:
    """CPU time of what a GPU does beside the model, which the host computes here: the bodies of
    graphs, and the kernels that follow them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start

        return call

    @contextmanager
    def counting(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in DEVICE_WORK:
                work = self.timed(getattr(owner, name))
                stack.enter_context(patch.object(owner, name, work))
            yield


class CodecStage(SingleStage):
    """A single rank that also sends its plans to a follower, which decodes them."""

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner)
        self._sender, self._receiver = PlanSender(), PlanReceiver()
        self.decode_seconds = 0.0
        """CPU time of the follower."""

    def agree(self, step: InflightStep) -> None:
        super().agree(step)
        if not step.plan.has_work:
            return
        data = self._sender.encode(step.plan)
        start = time.thread_time()
        self._receiver.decode(data)
        self.decode_seconds += time.thread_time() - start


@dataclass(frozen=True)
class Load:
    """Requests that run at once. `emitted`: tokens that each has from another rank, all different;
    `penalised`: sampling looks at them."""

    running: int
    context: int
    emitted: int = 0
    penalised: bool = False

    @property
    def vocab(self) -> int:
        return LARGE_VOCAB if self.emitted else SMALL_VOCAB


@dataclass(frozen=True)
class StepCost:
    """CPU seconds of a step on a leader, for its plan on a follower, and of what a GPU would do."""

    leader: float
    follower: float
    device: float


def make_runner(load: Load) -> ModelRunner:
    """The runner of a GPU, on host tensors and with an instant model."""
    sizes = ",".join(
        f"{name}={value}" for name, value in (SIZES | {"vocab_size": load.vocab}).items()
    )
    room = load.context + load.emitted + 2 * MAX_NEW_TOKENS
    args = resolve(
        ServerArgs.from_kwargs(
            model_path=f"tiny:qwen3_moe,{sizes}",
            device="cpu",
            dtype="bfloat16",
            max_running_requests=load.running + 1,
            max_total_tokens=2 * load.running * room,
            chunked_prefill_size=CHUNK,
            cuda_graph_bs=[load.running + 1],
            cuda_graph_bs_prefill=[load.running + MIXED_PROMPT],
            skip_server_warmup=True,
            skip_tokenizer_init=True,
            log_level="warning",
        )
    )
    args = replace(args, model_path=materialise(args.model_path))
    of_cpu = BACKENDS["cpu"]
    BACKENDS["cpu"] = BACKENDS["cuda"]
    try:
        return ModelRunner(args, asynchronous=True)
    finally:
        BACKENDS["cpu"] = of_cpu


class RankLoop:
    """The step loop of a rank that leads a serving group, from messages to messages."""

    def __init__(self, load: Load) -> None:
        self.load, runner = load, make_runner(load)
        # Steps are bounded as on a GPU, but so far that no prompt is cut.
        bound = {"max_step_ms": 1e6, "decode_log_interval": 1 << 30}
        args = ServerArgs.from_kwargs(model_path="unused", **bound)
        self.planner = Planner(args, runner)
        mesh = Mesh()
        link = SimpleNamespace(mesh=mesh, place=mesh.place(0), send=encode)
        self.leader = Leader(cast(RankLink, link), self.planner)
        self.stage = CodecStage(self.planner)
        self.loop = StepLoop(runner, self.stage, self.leader, RankStatsReporter(runner))
        model = InstantModel(runner.model.config.hidden_size, max(load.running + 1, 8), load.vocab)
        runner.model = cast(CausalLM, model)
        self._numbers = count()
        gc.collect()
        gc.freeze()  # as a rank does

    @property
    def num_tokens(self) -> int:
        return sum(len(state.request.token_ids) for state in self.planner.states.values())

    def submit(self, number: int, length: int) -> None:
        """Prompts differ from their first token on, so that they share no pages."""
        penalty = 1.0 if self.load.penalised else 0.0
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, frequency_penalty=penalty, presence_penalty=penalty
        )
        for request_no in (next(self._numbers) for _ in range(number)):
            body = [0] * (length - 2)
            prompt = [request_no % 256, request_no // 256, *body]
            emitted = list(range(8, 8 + self.load.emitted))
            new = NewRequest("", prompt, params, 0, self.load.emitted + MAX_NEW_TOKENS, request_no)
            new.emitted = emitted
            self.leader.handle(Submit([new]))

    def step(self) -> StepCost:
        """Steps until all requests have another token: twice if steps do not overlap."""
        wanted = self.num_tokens + self.load.running
        return self._cost(lambda: self.num_tokens < wanted)

    def mixed_step(self) -> StepCost:
        """A step with the prompt of a new request, which is then aborted, beside all decodes."""
        number, steps_before = len(self.planner.states), self.planner.num_steps
        self.submit(1, MIXED_PROMPT)
        cost = self._cost(lambda: self.planner.num_steps == steps_before)
        assert self.loop.inflight[-1].prompt_tokens == MIXED_PROMPT
        self.planner.abort(max(self.planner.states))
        assert len(self.planner.states) == number
        self.step()  # what is left of it
        return cost

    def _cost(self, goes_on: Callable[[], bool]) -> StepCost:
        decoded, seconds, device = self.stage.decode_seconds, 0.0, DeviceTime()
        with device.counting():
            while goes_on():
                start = time.thread_time()
                self.loop.step()
                seconds += time.thread_time() - start
        decoded = self.stage.decode_seconds - decoded
        return StepCost(seconds - decoded - device.seconds, decoded, device.seconds)

    def admit(self) -> float:
        """CPU seconds from the first message until all requests of the load have a token."""
        start = time.thread_time()
        self.submit(self.load.running, self.load.context)
        while not self._all_decode():
            self.loop.step()
        return time.thread_time() - start

    def _all_decode(self) -> bool:
        states = self.planner.states.values()
        return all(state.request.first_token is not None for state in states)

    def decode(self, steps: int) -> list[StepCost]:
        """All requests decode one token in every step."""
        for _ in range(WARM_STEPS):
            self.step()
        before = self.num_tokens
        costs = [self.step() for _ in range(steps)]
        assert self.num_tokens - before == steps * self.load.running
        return costs

    def close(self) -> None:
        gc.unfreeze()
