"""Gives pages to requests: shared ones of the prefix tree, free ones, or evicted ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesaic.core.request import Request
from moesaic.engine.schedule.kv_cache import Key, PageAllocator, PrefixNode, PrefixTree


class KVManager:
    """Calls `on_take` with newly allocated pages, before they are used."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_cache: bool,
        on_take: Callable[[Sequence[int]], None],
    ) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.tree = PrefixTree(page_size, self.allocator, prefix_cache)
        self._on_take = on_take
        self._place: dict[Request, PrefixNode] = {}
        self._drafted = bytearray(num_pages + 1)
        """By page: whether a draft model on the ranks has computed all of its tokens."""

    @property
    def num_available(self) -> int:
        return self.allocator.num_free + self.tree.num_evictable

    @property
    def num_used(self) -> int:
        """Pages that running requests hold, without cached ones that none of them reads."""
        return self.allocator.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def nothing(self) -> tuple[PrefixNode, list[int]]:
        """An empty prefix."""
        return self.tree.root, []

    def lookup(self, request: Request) -> tuple[PrefixNode, list[int]]:
        """The cached prefix that a request may use."""
        limit = self._reusable(request)
        return self.tree.match(request.token_ids, limit, request.cache_namespace)

    def awaited(self, request: Request, num_cached: int) -> Key | None:
        """The page after the cached ones, if another request may compute it for this one."""
        return self._key(request, num_cached, self._reusable(request))

    def frontier(self, request: Request) -> tuple[PrefixNode, Key | None]:
        """The page that a running request adds to the tree next, if its tokens fill one."""
        node = self._place[request]
        return node, self._key(request, node.depth, len(request.token_ids))

    def _key(self, request: Request, page: int, limit: int) -> Key | None:
        """The tokens of a page within the first `limit` tokens."""
        if (page + 1) * self.page_size > limit:
            return None
        return self.tree.key(request.token_ids, page, request.cache_namespace)

    def _reusable(self, request: Request) -> int:
        """Tokens that a request may take from the cache: neither its last one, nor those whose
        successor's logprob or whose routed experts were requested."""
        if not self.tree.enabled:
            return 0
        limit = len(request.token_ids) - 1
        if request.lacks_input_logprobs:
            limit = min(limit, request.next_input_logprob)
        if request.routed_start is not None:
            limit = min(limit, request.next_routed)
        return limit

    def admit(self, request: Request, node: PrefixNode, pages: list[int]) -> None:
        self.tree.acquire(node)
        self._place[request] = node
        request.pages, request.pages_sent = list(pages), 0
        request.num_computed = len(pages) * self.page_size
        drafted = next((n for n, page in enumerate(pages) if not self._drafted[page]), len(pages))
        request.draft_computed = drafted * self.page_size

    def draft_until(self, request: Request, num_tokens: int) -> None:
        """A draft model on the ranks has computed the request's first tokens."""
        first, stop = (n // self.page_size for n in (request.draft_computed, num_tokens))
        for page in request.pages[first:stop]:
            self._drafted[page] = True
        request.draft_computed = num_tokens

    def draft_again(self, request: Request, num_tokens: int) -> None:
        """All behind the request's first tokens has to be computed by a draft model again."""
        for page in request.pages[num_tokens // self.page_size :]:
            self._drafted[page] = False
        request.draft_computed = min(request.draft_computed, num_tokens)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Allocates pages for the first `num_tokens` tokens; False if there are too few."""
        missing = self.pages_for(num_tokens) - len(request.pages)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        if missing > self.allocator.num_free:
            self.tree.evict(missing - self.allocator.num_free)
        taken = self.allocator.take(missing)
        for page in taken:
            self._drafted[page] = False
        self._on_take(taken)
        request.pages.extend(taken)
        return True

    def share(self, request: Request, num_tokens: int) -> None:
        """Moves the full pages of the request's first tokens, which are computed, to the tree."""
        if not self.tree.enabled:
            return
        node, full = self._place[request], num_tokens // self.page_size
        if node.depth >= full:
            return
        for number in range(node.depth, full):
            key = self.tree.key(request.token_ids, number, request.cache_namespace)
            node = self.tree.extend(node, key, request.pages[number])
            if node.page != request.pages[number]:  # the tree had it: plans send it again
                request.pages[number] = node.page
                request.pages_sent = min(request.pages_sent, number)
                if not self._drafted[node.page]:
                    first = number * self.page_size
                    request.draft_computed = min(request.draft_computed, first)
        self._place[request] = node

    def release(self, request: Request) -> None:
        """Takes all pages from a request; what it shared stays in the tree."""
        node = self._place.pop(request)
        self.allocator.give_back(request.pages[node.depth :])
        self.tree.release(node)
        request.pages, request.pages_sent = [], 0
        request.num_computed = request.draft_computed = 0

    def flush(self) -> int:
        """Evicts all unused pages of the prefix cache; returns their number."""
        return self.tree.evict(self.tree.num_evictable)
