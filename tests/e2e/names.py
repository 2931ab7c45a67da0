"""A check for engines of one rank and of many."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from moesaic import Engine


def check_that_a_name_is_free(engine: Engine) -> None:
    """Who leaves without reading the end of one harms nobody that has its name by then."""
    short, go_on = {"max_new_tokens": 3, "ignore_eos": True, "temperature": 0}, threading.Event()
    first = engine.generate(input_ids=[1, 2], sampling_params=short, stream=True, rid="same")
    next(first)
    while len(engine._inflight):
        time.sleep(0.01)
    engine._thread.submit(lambda core: go_on.wait(30))
    with ThreadPoolExecutor() as pool:
        asked = {"input_ids": [3, 4], "sampling_params": short, "rid": "same"}
        second = pool.submit(engine.generate, **asked)
        while not len(engine._inflight):
            time.sleep(0.01)
        first.close()
        go_on.set()
        meta = second.result(60)["meta_info"]
    assert meta["finish_reason"]["type"] == "length" and meta["completion_tokens"] == 3
