"""Which serving group gets a request."""

import itertools
import random

import pytest

from moesaic.comm.supervise.load_balance import LoadBalancer, PrefixIndex
from moesaic.core.request import NewRequest
from moesaic.core.sampling import SamplingParams

PAGE = 4
numbers = itertools.count()


def request(prompt: list[int] | int, **fields: object) -> NewRequest:
    ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    new = NewRequest("r", ids, SamplingParams(), 0, 8, next(numbers))
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def one(balancer: LoadBalancer, new: NewRequest) -> int:
    return balancer.assign([new])[0]


def test_round_robin_takes_turns():
    balancer = LoadBalancer(3, "round_robin")
    assert [one(balancer, request(9 - i)) for i in range(5)] == [0, 1, 2, 0, 1]
    assert balancer.assign([request(1), request(50), request(2)]) == [2, 0, 1]


def test_total_requests_takes_the_fewest():
    balancer = LoadBalancer(2, "total_requests")
    new = [request(9), request(1), request(1), request(1)]
    assert balancer.assign(new) == [0, 1, 0, 1]
    for number in (1, 3):
        balancer.finish(new[number].request_no, [1])
    assert [one(balancer, request(3)) for _ in range(2)] == [1, 1]
    assert (balancer.requests, balancer.tokens) == ([2, 2], [10, 6])


def test_total_tokens_counts_what_is_emitted():
    balancer = LoadBalancer(2, "total_tokens")
    new = [request(n) for n in (9, 2, 2)]
    assert [one(balancer, each) for each in new] == [0, 1, 1]
    balancer.note_tokens(new[1].request_no, 6)
    assert balancer.tokens == [9, 10]
    assert one(balancer, request(1)) == 0
    # Equal tokens: fewer requests.
    assert balancer.tokens == [10, 10] and balancer.requests == [2, 2]
    balancer.note_tokens(new[0].request_no, 1)
    balancer.finish(new[2].request_no, [])
    assert (balancer.tokens, balancer.requests) == ([11, 8], [2, 1])


@pytest.mark.parametrize("method", ["auto", "total_tokens"])
def test_prompts_of_one_message_are_split_by_tokens(method: str):
    """In turn, group 0 would get all long ones."""
    lengths = [4000 if i % 4 == 0 else 1000 for i in range(16)]
    balancer = LoadBalancer(4, method, PAGE)
    groups = balancer.assign([request(prompt_of(i, n)) for i, n in enumerate(lengths)])
    by_group = [
        sum(n for n, g in zip(lengths, groups, strict=True) if g == group) for group in range(4)
    ]
    assert by_group == [7000] * 4


def test_a_request_that_names_its_group_counts_there():
    balancer = LoadBalancer(2, "total_tokens")
    assert balancer.assign([request(5), request(5), request(9, group=0)]) == [1, 1, 0]
    assert balancer.tokens == [9, 10]


def test_a_resumed_request_counts_what_it_emitted():
    balancer = LoadBalancer(2, "auto", PAGE)
    resumed = request(3, emitted=[5] * 40)
    assert balancer.assign([resumed]) == [0]
    assert (balancer.tokens, balancer.uncomputed) == ([43, 0], [43, 0])
    balancer.note_tokens(resumed.request_no, 0)
    assert balancer.uncomputed == [43, 0]
    balancer.note_tokens(resumed.request_no, 1)
    assert (balancer.tokens, balancer.uncomputed) == ([44, 0], [0, 0])
    balancer.finish(resumed.request_no, [5] * 41)
    assert (balancer.requests, balancer.tokens, balancer.uncomputed) == ([0, 0], [0, 0], [0, 0])


def serve(balancer: LoadBalancer, new: NewRequest, emitted: list[int]) -> int:
    """Assigns a request and ends it."""
    group = one(balancer, new)
    balancer.note_tokens(new.request_no, len(emitted))
    balancer.finish(new.request_no, emitted)
    return group


def test_a_chat_stays_with_the_group_that_has_its_history():
    balancer = LoadBalancer(4, "auto", PAGE)
    chats = {chat: prompt_of(chat, 40) for chat in range(8)}
    home = {chat: serve(balancer, request(ids), [chat] * 8) for chat, ids in chats.items()}
    assert sorted(home.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    for chat in (5, 2, 7, 0):
        turn = [*chats[chat], *[chat] * 8, *prompt_of(100 + chat, 20)]
        new = request(turn)
        assert one(balancer, new) == home[chat]
        assert balancer.uncomputed[home[chat]] == 20
        balancer.finish(new.request_no, [])


def test_load_beats_a_cached_prefix_that_saves_less():
    balancer = LoadBalancer(2, "auto", PAGE)
    shared = prompt_of(1, 2000)
    first = request(shared)
    assert one(balancer, first) == 0
    balancer.note_tokens(first.request_no, 1)
    # Each open request counts 128 + 2001 / 8 = 378: five are less than the 2000 that are cached.
    assert [one(balancer, request([*shared, n])) for n in range(6)] == [0, 0, 0, 0, 0, 1]
    assert balancer.uncomputed == [5, 2001]
    # Now both have it, and the load alone decides: 2274 to 2379, and 379 for each more.
    assert [one(balancer, request([*shared, n])) for n in range(10, 14)] == [0, 1, 0, 1]


def test_nothing_is_cached_across_namespaces_or_for_what_must_be_computed():
    shared = prompt_of(2, 400)
    cases = [
        ({}, 400 - 1 - 3),
        ({"cache_namespace": "b"}, 0),
        ({"return_logprob": True, "logprob_start": 9}, 9),
        ({"routed_start": 5}, 5),
    ]
    for fields, cached in cases:
        balancer = LoadBalancer(2, "auto", PAGE)
        serve(balancer, request(shared, cache_namespace="a", group=0), [])
        new = request(shared[:399], **({"cache_namespace": "a"} | fields))
        balancer.assign([new])
        assert max(balancer.uncomputed) == 399 - cached


def test_flushed_and_disabled_caches_hold_nothing():
    shared = prompt_of(3, 400)
    for page, flush in ((0, False), (PAGE, True)):
        balancer = LoadBalancer(2, "auto", page)
        assert serve(balancer, request(shared), []) == 0
        if flush:
            balancer.flush_cache()
        assert serve(balancer, request(shared), []) == 1


def test_the_index_drops_the_least_recently_used_pages_from_the_end():
    index = PrefixIndex(1, PAGE)
    index.limit = 5
    sequences = [prompt_of(seed, 3 * PAGE + 1) for seed in (1, 2)]
    keys: list[list[int]] = [[], []]
    for known, ids in zip(keys, sequences, strict=True):
        index.extend(known, ids, "")
        index.add(0, known)
    assert [index.cached(0, known) for known in keys] == [2 * PAGE, 3 * PAGE]
    index.add(0, keys[0])
    assert [index.cached(0, known) for known in keys] == [3 * PAGE, 2 * PAGE]
    longer = list(keys[0])
    index.extend(longer, [*sequences[0], *[1] * PAGE], "")
    whole: list[int] = []
    index.extend(whole, [*sequences[0], *[1] * PAGE], "")
    assert longer == whole and len(whole) == 4


def test_the_index_holds_no_more_than_a_group_can_cache():
    balancer = LoadBalancer(2, "auto", PAGE)
    balancer.limit_cache(100)
    prompt = prompt_of(4, 1001)
    serve(balancer, request(prompt, group=0), [])
    balancer.assign([request(prompt, group=0)])
    assert balancer.uncomputed == [901, 0]


def test_equal_arrivals_are_assigned_alike():
    def history(seed: int) -> list[int]:
        draw, balancer = random.Random(seed), LoadBalancer(3, "auto", PAGE)
        found, open_ = list[int](), list[NewRequest]()
        for _ in range(300):
            new = [
                request(prompt_of(draw.randrange(9), draw.randrange(1, 80)))
                for _ in range(draw.randrange(1, 4))
            ]
            found += balancer.assign(new)
            open_ += new
            balancer.note_tokens(draw.choice(open_).request_no, 2)
            while len(open_) > 20:
                balancer.finish(open_.pop(draw.randrange(len(open_))).request_no, [1, 2])
        for left in open_:
            balancer.finish(left.request_no, [])
        assert balancer.tokens == balancer.uncomputed == balancer.requests == [0, 0, 0]
        return found

    assert history(1) == history(1)
    assert set(history(1)) == {0, 1, 2}
