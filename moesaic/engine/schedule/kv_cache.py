"""The owners of the KV cache's pages.

Every page is either free, private to one request, or in the prefix tree (where any number of
requests read it). Page 0 is never allocated.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

Key = tuple[int | str, ...]
"""The tokens of one full page; that of a sequence's first page begins with its namespace."""


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One page of the tree: its tokens lead here from the parent. `readers` counts the requests
    whose path goes through it; only a leaf without readers can be evicted."""

    key: Key
    page: int
    parent: PrefixNode | None
    depth: int = 0
    children: dict[Key, PrefixNode] = field(default_factory=dict)
    readers: int = 0
    last_used: int = 0


class PageAllocator:
    """The free pages, lowest first after start, so that a sequence's pages are adjacent."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, number: int) -> list[int]:
        assert number <= len(self._free), f"{number} pages of {len(self._free)} free ones"
        taken = self._free[len(self._free) - number :]
        del self._free[len(self._free) - number :]
        return taken[::-1]

    def give_back(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))


class PrefixTree:
    """Pages by their tokens, for reuse; the least recently used ones are evicted first."""

    def __init__(self, page_size: int, allocator: PageAllocator, enabled: bool = True) -> None:
        self.page_size = page_size
        self.allocator = allocator
        self.enabled = enabled
        self.root = PrefixNode((), 0, None)
        self.num_nodes = 0
        self.num_evictable = 0
        self._clock = count(1)
        self._idle: list[tuple[int, int, PrefixNode]] = []

    def key(self, token_ids: Sequence[int], page: int, namespace: str = "") -> Key:
        tokens = tuple(token_ids[page * self.page_size : (page + 1) * self.page_size])
        return (namespace, *tokens) if namespace and page == 0 else tokens

    def match(
        self, token_ids: Sequence[int], limit: int, namespace: str = ""
    ) -> tuple[PrefixNode, list[int]]:
        """The deepest node on the path of the first `limit` tokens, and the pages leading there."""
        node, pages = self.root, list[int]()
        for page in range(limit // self.page_size):
            child = node.children.get(self.key(token_ids, page, namespace))
            if child is None:
                break
            node = child
            pages.append(node.page)
        return node, pages

    def acquire(self, node: PrefixNode) -> None:
        """One more request reads this node and all above it."""
        now = next(self._clock)
        for step in self._path(node):
            self.num_evictable -= step.readers == 0
            step.readers += 1
            step.last_used = now

    def release(self, node: PrefixNode) -> None:
        now = next(self._clock)
        for step in self._path(node):
            assert step.readers > 0, "a node was released more often than acquired"
            step.readers -= 1
            self.num_evictable += step.readers == 0
            step.last_used = now
        self._note_idle(node)

    def extend(self, node: PrefixNode, key: Key, page: int) -> PrefixNode:
        """Moves a reader's private page into the tree under `node`, and the reader to it. If the
        tree has such a page already, the given one becomes free."""
        child = node.children.get(key)
        if child is None:
            child = PrefixNode(key, page, node, node.depth + 1, last_used=next(self._clock))
            node.children[key] = child
            self.num_nodes += 1
        else:
            self.allocator.give_back([page])
            self.num_evictable -= child.readers == 0
        child.readers += 1
        return child

    def evict(self, number: int) -> int:
        """Frees up to `number` pages and returns how many."""
        freed = 0
        while self._idle and freed < number:
            last_used, _, node = heapq.heappop(self._idle)
            # An entry is out of date if the node was used since, has children, or is gone.
            if last_used != node.last_used or node.readers or node.children or not node.parent:
                continue
            parent, node.parent = node.parent, None
            del parent.children[node.key]
            self.allocator.give_back([node.page])
            freed += 1
            self._note_idle(parent)
        self.num_nodes -= freed
        self.num_evictable -= freed
        return freed

    def _note_idle(self, node: PrefixNode) -> None:
        """Queues a leaf without readers for eviction."""
        if node is self.root or node.readers or node.children:
            return
        heapq.heappush(self._idle, (node.last_used, next(self._clock), node))
        if len(self._idle) > 2 * self.num_nodes + 64:
            leaves = (n for n in self.nodes() if not n.readers and not n.children)
            self._idle = [(n.last_used, next(self._clock), n) for n in leaves]
            heapq.heapify(self._idle)

    def num_idle(self, node: PrefixNode) -> int:
        """Nodes without readers on the path to this one: evictable until it is acquired."""
        return sum(step.readers == 0 for step in self._path(node))

    def nodes(self) -> Iterator[PrefixNode]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _path(self, node: PrefixNode) -> Iterator[PrefixNode]:
        step: PrefixNode | None = node
        while step is not None and step is not self.root:
            yield step
            step = step.parent
