"""What NGRAM's drafts cost the host: microseconds a request and step, and memory.

python -m bench.ngram
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Sequence
from typing import Final

from bench.common import print_table
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.speculate.ngram import Breadth, NgramDrafter
from moesaic.engine.speculate.ngram_index import NgramIndex

REQUESTS: Final = 64
PROMPT: Final = 1024
STEPS: Final = 200
VOCAB: Final = 151_936


def requests(text: str) -> list[Request]:
    """With prompts that never repeat, of few tokens, or that repeat after 200."""
    chance = random.Random(0)
    vocab, period = (50 if text == "few tokens" else VOCAB), (200 if text == "loops" else PROMPT)
    found = []
    for number in range(REQUESTS):
        stem = [chance.randrange(vocab) for _ in range(period)]
        prompt = (stem * (PROMPT // period + 1))[:PROMPT]
        found.append(Request(str(number), prompt, SamplingParams(), number, 9999, number))
    return found


def measure(text: str, breadth: Breadth) -> list[str]:
    drafter, served = NgramDrafter(NgramIndex(10**7, 18), 11, breadth=breadth), requests(text)
    chance, vocab = random.Random(1), 50 if text == "few tokens" else VOCAB
    index_us = propose_all(drafter, served, 1 + REQUESTS * PROMPT // 8192)
    step_us = 0.0
    for _ in range(STEPS):
        for one in served:
            one.token_ids.append(
                one.token_ids[-200] if text == "loops" else chance.randrange(vocab)
            )
        step_us += propose_all(drafter, served, 1)
    tokens = drafter.index.num_tokens
    figures = (index_us / REQUESTS / PROMPT, step_us / STEPS / REQUESTS, nbytes(text) / tokens)
    return [text, str(breadth.most), *(f"{figure:.1f}" for figure in figures)]


def propose_all(drafter: NgramDrafter, served: Sequence[Request], times: int) -> float:
    """Microseconds."""
    begin = time.perf_counter()
    for _ in range(times):
        drafter.propose(served)
    return 1e6 * (time.perf_counter() - begin)


def nbytes(text: str) -> int:
    """The index's size for the prompts and the tokens that the steps add."""
    served = requests(text)
    for one in served:
        one.token_ids += one.token_ids[:STEPS]
    index = NgramIndex(10**7, 18)
    tracemalloc.start()
    for one in served:
        index.begin(one.request_no, one.token_ids)
        index.extend(one.request_no, 10**6)
        index.end(one.request_no)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


if __name__ == "__main__":
    texts = ("no repetition", "few tokens", "loops")
    rows = [measure(text, Breadth(1, most)) for text in texts for most in (1, 10)]
    print_table(
        ["text", "breadth", "us a prompt token", "us a request and step", "bytes a token"], rows
    )
