"""Tokens on their way from a leader to the client: alone as two arrays, or in a delta with more."""

import random
from collections import Counter, deque
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise.journal import Journal
from moesaic.comm.supervise.load_balance import LoadBalancer
from moesaic.core.disagg import KVTarget, Ticket
from moesaic.core.messages import Message, RequestDelta, StepOutput, Submit, decode, encode
from moesaic.core.request import FinishReason, NewRequest, Request
from moesaic.core.sampling import MAX_STOP_IDS, SamplingParams
from moesaic.engine.frontend.core_client import CoreClient
from moesaic.engine.schedule.request_state import Progress, RequestState
from moesaic.engine.worker.leader import Leader
from moesaic.engine.worker.local_core import LocalCore
from moesaic.engine.worker.planner import Planner
from moesaic.engine.worker.rank_info import rank_info
from moesaic.engine.worker.stage import SingleStage
from moesaic.engine.worker.step_loop import StepLoop
from tests.unit.test_drafts import Drafter, make_core, requests, serve


class Chain:
    """A leader, the supervisor's journal and a client, joined by encoded messages."""

    def __init__(self, core: LocalCore, drafter: Drafter | None = None) -> None:
        self.planner = Planner(core.args, core.runner, drafter=drafter)
        mesh = Mesh()
        link: Any = SimpleNamespace(mesh=mesh, place=mesh.place(0), send=self.pass_output)
        self.leader = Leader(link, self.planner)
        self.loop = StepLoop(core.runner, SingleStage(self.planner), self.leader, core.stats)
        self.journal = Journal(LoadBalancer(1, "round_robin"))
        self.outputs: list[StepOutput] = []
        self.arrived: deque[Message] = deque()
        facts = asdict(core.planner.facts) | {"ranks": [rank_info(core.runner)]}
        service: Any = SimpleNamespace(
            facts=facts,
            keeper=None,
            send=self.pass_input,
            receive=lambda _: self.arrived.popleft(),
        )
        self.client = CoreClient(core.args, service)
        self.heard: dict[str, list[int]] = {}
        """How many tokens each request had whenever it was heard of."""

    def pass_input(self, message: Message) -> None:
        passed = decode(encode(message), passing=True)
        if isinstance(passed, Submit):
            self.journal.assign(passed.requests)
        self.leader.handle(decode(encode(passed)))

    def pass_output(self, message: Message) -> None:
        output = decode(encode(message), passing=True)
        assert isinstance(output, StepOutput)
        self.journal.record(output)
        self.outputs.append(output)
        self.arrived.append(decode(encode(message)))

    def listen(self, progress: Progress) -> None:
        self.heard.setdefault(progress.rid, []).append(progress.num_output)

    def deliver(self) -> None:
        while self.arrived:
            self.client.step()

    def serve(self, served: list[Request]) -> list[Request]:
        for request in served:
            self.client.add(RequestState(request, None, self.listen, 1))
        while self.planner.scheduler.has_work or self.loop.inflight:
            self.loop.step()
            self.deliver()
            self.check_journal()
        return served

    def check_journal(self) -> None:
        """Whatever the client has of an open request, another rank could continue."""
        assert set(self.journal.open) == set(self.client.states)
        for number, state in self.client.states.items():
            assert self.journal.replay(number).emitted == state.request.output_ids


@pytest.mark.parametrize("why", ["", "its KV cache could not be sent to 127.0.0.1:9"])
def test_what_could_not_be_sent_is_refused(why: str) -> None:
    """The prompt is computed all the same. Leaving twice is harmless."""
    chain, left = Chain(make_core(False)), list[tuple[int, str]]()
    sender: Any = SimpleNamespace(finish=lambda target, result: why)
    lobby: Any = SimpleNamespace(leave=lambda *given: left.append(given), take=list)
    chain.leader._sender, chain.client.lobby = sender, lobby
    request = Request("r", [1, 2, 3], SamplingParams(max_new_tokens=1), 0, 1, 7)
    request.kv_target = KVTarget(Ticket(1, 1), 0, 3, ())
    chain.serve([request])
    assert request.num_output == 1 and request.finish_reason == FinishReason("length", length=1)
    assert left == [(7, why)] * bool(why) + [(7, "")]


def ordinary(outputs: list[StepOutput]) -> Counter[int]:
    return Counter(number for output in outputs for number in output.numbers)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize(
    "flags", [{}, {"max_total_tokens": 72, "chunked_prefill_size": 16}], ids=str
)
@pytest.mark.parametrize("drafts", [False, True])
def test_the_client_has_what_the_ranks_have(
    asynchronous: bool, flags: dict[str, int], drafts: bool
) -> None:
    """With logprobs, routed experts, retractions and steps that yield several tokens."""
    core = make_core(asynchronous, **flags)
    expected = serve(core)
    chain = Chain(core, Drafter(expected, 0.4) if drafts else None)
    for one, other in zip(expected, chain.serve(requests()), strict=True):
        assert other.output_ids == one.output_ids and other.finish_reason == one.finish_reason
        assert other.output_logprobs == pytest.approx(one.output_logprobs, abs=1e-5)
        assert len(other.output_top_logprobs) == len(one.output_top_logprobs)
        assert other.input_logprobs == pytest.approx(one.input_logprobs, abs=1e-5)
        assert other.routed == one.routed
        assert chain.heard[one.rid] == [*range(1, one.num_output + 1)]
    several = [d for o in chain.outputs for d in o.deltas if len(d.token_ids) > 1]
    assert bool(several) == drafts


def test_only_starts_ends_and_what_comes_with_more_are_deltas() -> None:
    core = make_core(False)
    chain = Chain(core)
    served = chain.serve(requests())
    alone = ordinary(chain.outputs)
    for one in served:
        has_more = one.return_logprob or one.routed_start is not None
        assert alone[one.request_no] == (0 if has_more else one.num_output - 2)
    assert sum(alone.values()) > 8


def test_the_client_learns_of_every_retraction() -> None:
    core = make_core(
        False, max_total_tokens=72, chunked_prefill_size=16, schedule_conservativeness=0.01
    )
    chain = Chain(core)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    served = [Request(str(n), [n + 1] * 8, params, n, 20, n) for n in range(4)]
    for request in served:
        chain.client.add(RequestState(request, None, chain.listen, 1))
    ranks = [state.request for state in chain.planner.states.values()]
    while chain.planner.scheduler.has_work:
        chain.loop.step()
        before = {number: state.request.num_output for number, state in chain.client.states.items()}
        chain.deliver()
        for one, other in zip(served, ranks, strict=True):
            if one.num_output > before.get(one.request_no, one.num_output):
                assert one.retractions == other.retractions
    assert sum(one.retractions for one in served) > 0
    assert [one.output_ids for one in served] == [one.output_ids for one in ranks]


def test_tokens_and_deltas_of_a_message_keep_the_order_of_a_request() -> None:
    chain = Chain(make_core(False))
    params = SamplingParams(ignore_eos=True)
    served = [Request(str(n), [1, 2], params, 0, 9, n) for n in range(4)]
    for request in served:
        chain.client.add(RequestState(request, None, chain.listen, 1))
    chain.pass_output(StepOutput([RequestDelta(0, [4, 5]), RequestDelta(1, [6])], [2, 3], [7, 8]))
    end = RequestDelta(2, [], finish=FinishReason("stop"))
    last = StepOutput([end, RequestDelta(1, [9, 10])], [0, 2, 77, 3], [11, 12, 1, 13])
    chain.pass_output(last)  # request 77 is not open
    chain.deliver()
    chain.check_journal()
    found = [request.output_ids for request in served]
    assert found == [[4, 5, 11], [6, 9, 10], [7, 12], [8, 13]]
    assert [chain.heard[str(n)] for n in range(4)] == [[1, 2, 3], [1, 2, 3], [1, 2, 2], [1, 2]]
    assert served[2].finish_reason == FinishReason("stop") and set(chain.client.states) == {0, 1, 3}
    assert chain.journal.balancer.tokens == [3 * 2 + 3 + 3 + 2]


def test_a_token_that_the_client_cannot_process_ends_only_its_request() -> None:
    chain = Chain(make_core(False))
    served = [Request(str(n), [1, 2], SamplingParams(), 0, 9, n) for n in range(2)]
    for request in served:
        chain.client.add(RequestState(request, None, chain.listen, 1))
    watch: Any = SimpleNamespace(end=lambda request: None)  # it has no method for a token
    chain.client.states[0].watch = watch
    chain.pass_output(StepOutput([], [0, 1], [4, 5]))
    chain.deliver()
    assert served[0].failed and "its token could not be processed" in served[0].failure
    assert served[1].output_ids == [5] and set(chain.planner.states) == {1}


@pytest.mark.parametrize("number", [0, 1])
def test_many_stop_ids_stop_at_the_same_token(number: int) -> None:
    core = make_core(False)
    answer = serve(core, [asked(number, ())])[0].output_ids
    stop = next(token for token in reversed(answer) if answer.index(token) > 2)
    others = random.Random(0).sample(range(1000, 10**6), MAX_STOP_IDS - 1)
    for ids in ((stop,), (*others[:500], stop, *others[500:])):
        for found in (serve(core, [asked(number, ids)]), Chain(core).serve([asked(number, ids)])):
            assert found[0].output_ids == answer[: answer.index(stop) + 1]
            assert found[0].finish_reason == FinishReason("stop", matched=stop)


def asked(number: int, stop_ids: tuple[int, ...]) -> Request:
    params = SamplingParams(
        temperature=0.9, sampling_seed=3, ignore_eos=True, stop_token_ids=stop_ids
    )
    return Request("r", [97, 98, 99 + number], params, 3, 12, number)


def test_journal_replays_a_request_that_was_only_passed_on():
    """Its parameters are never decoded here, and are whole where it continues."""
    params = SamplingParams(temperature=0.5, stop_token_ids=(7, 3), stop=("x",), logit_bias={5: 1})
    submitted = NewRequest("mine", [1, 2, 3], params, 11, 9, 4, frozenset([2]), emitted=[5])
    data = encode(Submit([submitted]))
    passed = decode(data, passing=True)
    assert isinstance(passed, Submit) and encode(passed) == data
    (kept,) = passed.requests
    assert isinstance(kept.params, msgspec.Raw) and kept.prompt_ids == [1, 2, 3]
    journal = Journal(LoadBalancer(1, "round_robin"))
    journal.assign([kept])
    journal.record(StepOutput([RequestDelta(4, [6, 7])]))
    journal.record(StepOutput([], [4], [8]))
    again = decode(encode(Submit([journal.replay(4)])))
    assert again == Submit([msgspec.structs.replace(submitted, emitted=[5, 6, 7, 8])])
