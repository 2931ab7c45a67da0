"""The requests that wait for pages and for their first step."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Generator, Iterator

from moesaic.core.request import Request


class WaitingQueue:
    """Requests in the order in which they are admitted. Any of them leaves in constant time."""

    def __init__(self) -> None:
        self._requests: OrderedDict[Request, None] = OrderedDict()
        self.prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def append(self, request: Request) -> None:
        self._requests[request] = None
        self.prompt_tokens += request.prompt_len

    def append_first(self, request: Request) -> None:
        self.append(request)
        self._requests.move_to_end(request, last=False)

    def insert(self, request: Request) -> None:
        """Adds a request at the place of its number."""
        later = [one for one in self if one.request_no > request.request_no]
        self.append(request)
        for one in later:
            self._requests.move_to_end(one)

    @property
    def oldest(self) -> float:
        """The number of the first request; infinite if there is none."""
        return next((request.request_no for request in self), math.inf)

    def remove(self, request: Request) -> None:
        del self._requests[request]
        self.prompt_tokens -= request.prompt_len

    def scan(self) -> Generator[Request]:
        """Yields the requests in order, of which any may be removed when it is yielded. Those that
        are passed over are back in their places when the generator is closed."""
        passed: list[Request] = []
        try:
            while self._requests:
                request = next(iter(self._requests))
                yield request
                if request in self._requests:
                    self.remove(request)
                    passed.append(request)
        finally:
            for request in reversed(passed):
                self.append_first(request)
