"""A request that is sent again gets the answer of the first, from the journal."""

from __future__ import annotations

import msgspec

from moesaic.comm.supervise.journal import Journal
from moesaic.comm.supervise.kept_answers import KeptAnswers
from moesaic.comm.supervise.load_balance import LoadBalancer
from moesaic.comm.supervise.restarts import Restarts
from moesaic.core.messages import RequestDelta, StepOutput, decode
from moesaic.core.request import FinishReason, NewRequest, Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.frontend.answer_key import answer_key

LENGTH = FinishReason("length", length=3)


def request(number: int, key: str = "", **fields: object) -> NewRequest:
    made = NewRequest(f"r{number}", [5, 6], SamplingParams(), 1, 8, number, key=key)
    return msgspec.structs.replace(made, **fields)


def journal() -> Journal:
    return Journal(LoadBalancer(1, "auto", 0))


def answer(found: tuple[int, bytes] | None) -> tuple[int, RequestDelta]:
    assert found is not None
    output = decode(found[1])
    assert isinstance(output, StepOutput) and len(output.deltas) == 1
    assert output.deltas[0].request_no == found[0]
    return found[0], output.deltas[0]


def test_an_open_request_is_continued_by_one_client_only() -> None:
    made = journal()
    made.assign([request(1, "a"), request(2)])
    made.record(StepOutput([RequestDelta(1, [7], [-0.5], [[(-0.5, 7)]], cached_tokens=2)]))
    made.record(StepOutput([], [1, 2], [8, 9]))
    assert made.attach(request(3, "a")) is None  # its client has it
    assert made.lose_client() == [2]
    number, told = answer(made.attach(request(3, "a")))
    assert (number, told.token_ids, told.finish, told.cached_tokens) == (1, [7, 8], None, 2)
    assert made.attach(request(4, "a")) is None
    assert made.attach(request(5, "b")) is None and made.attach(request(6)) is None
    made.record(StepOutput([RequestDelta(1, [9], finish=LENGTH)]))
    assert 1 not in made.open
    number, told = answer(made.attach(request(7, "a")))
    assert (number, told.token_ids, told.finish) == (1, [7, 8, 9], LENGTH)


def test_logprobs_of_all_deltas_are_kept() -> None:
    made = journal()
    made.assign([request(1, "a", return_logprob=True)])
    first = RequestDelta(1, [7], [-0.5], [[]], [-1.0, -2.0], [[], []], queue_seconds=0.25)
    made.record(StepOutput([first]))
    made.record(StepOutput([RequestDelta(1, [8, 9], [-1.5, -2.5], [[], []], finish=LENGTH)]))
    _, told = answer(made.attach(request(2, "a")))
    assert (told.token_ids, told.logprobs) == ([7, 8, 9], [-0.5, -1.5, -2.5])
    assert (told.input_logprobs, told.queue_seconds) == ([-1.0, -2.0], 0.25)
    assert first.token_ids == [7]


def test_what_is_not_an_answer_is_not_kept() -> None:
    """An abort, and logprobs of tokens that another supervisor has seen."""
    made = journal()
    made.assign([request(1, "a"), request(2, "b", return_logprob=True, emitted=[7])])
    made.record(StepOutput([RequestDelta(1, [7], finish=FinishReason("abort", message="no"))]))
    made.record(StepOutput([RequestDelta(2, [8], [-1.0], [[]], finish=LENGTH)]))
    assert made.attach(request(3, "a")) is None and made.attach(request(4, "b")) is None
    made.assign([request(5, "c", emitted=[7])])
    made.record(StepOutput([], [5], [8]))
    made.keep(5)  # a stop string has ended it
    _, told = answer(made.attach(request(6, "c")))
    assert (told.token_ids, told.finish) == ([7, 8], None)


def test_answers_are_kept_for_a_time_and_up_to_a_size() -> None:
    kept = KeptAnswers(seconds=10, nbytes=400)
    for number in range(8):
        kept.add(str(number), RequestDelta(number, [1000] * 20), now=number)
    assert kept.nbytes <= 400 and len(kept) < 8
    assert kept.find("0") is None and kept.find("7") is not None
    kept.expire(16.5)
    assert len(kept) == 1 and kept.find("7") is not None
    kept.expire(17.0)
    assert (len(kept), kept.nbytes) == (0, 0)
    kept.add("big", RequestDelta(9, [1000] * 1000), now=20.0)
    assert (len(kept), kept.nbytes) == (0, 0)


def test_a_key_depends_on_all_that_the_answer_does() -> None:
    def key(name: str = "id", sample: int = 0, **fields: object) -> str:
        made = request(int(fields.pop("number", 1)), **fields)  # type: ignore[call-overload]
        return answer_key(name, Request(*msgspec.structs.astuple(made)), sample)

    same = {key(), key(number=2), key(rid="other")}
    others = [key("id2"), key(sample=1), key(prompt_ids=[5, 7]), key(seed=2)]
    others += [key(params=SamplingParams(temperature=0.5)), key(max_new_tokens=9)]
    assert len(same) == 1 and len({*same, *others}) == 1 + len(others)


def test_pauses_grow_with_short_lives() -> None:
    restarts = Restarts()
    lives = [0.1, 0.1, 5.0, 0.5, 0.5, 0.5]
    assert [restarts.next_pause(one, 4) for one in lives] == [0.0, 0.5, 0.0, 0.5, 1.0, 2.0]
    assert restarts.next_pause(0.0, 4) is None and restarts.next_pause(0.0, 0) == 8.0
    assert restarts.total == 8
