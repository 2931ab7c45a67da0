"""The owners of the KV cache's pages.

Every page is either free, private to one request, or in the prefix tree (where any number of
requests read it). Page 0 is never allocated.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from struct import Struct

import msgspec

Key = bytes
"""The tokens of one full page; that of a sequence's first page begins with its namespace."""


class PrefixNode(msgspec.Struct, gc=False, eq=False):
    """One page of the tree: its tokens lead here from the parent. `readers` counts the requests
    whose path goes through it; only a leaf without readers can be evicted.

    There may be as many nodes as pages, so the garbage collector does not visit them. It need not:
    a node names its parent by its page, so that no nodes refer to each other in a cycle."""

    key: Key
    page: int
    parent: int
    """The parent's page; 0: the root."""
    depth: int = 0
    children: dict[Key, PrefixNode] = {}
    readers: int = 0
    listed: bool = False
    """Whether it is in the tree's list of nodes to evict."""


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
        self._pack = Struct(f"{page_size}i").pack
        self.root = PrefixNode(b"", 0, 0)
        self.num_nodes = 0
        self._nodes = [self.root] * (allocator.num_pages + 1)
        """By page; the root where a page is not in the tree."""
        self.num_evictable = 0
        # The nodes to evict are in a list, in the order in which their last reader left: for each
        # page the one before it and the one after it, with page 0 at both ends. It has the node
        # where a reader's path ended; those above it follow when they have become leaves.
        self._before = array("q", bytes(8 * (allocator.num_pages + 1)))
        self._after = self._before[:]

    def key(self, token_ids: Sequence[int], page: int, namespace: str = "") -> Key:
        key = self._pack(*token_ids[page * self.page_size : (page + 1) * self.page_size])
        return namespace.encode() + key if namespace and page == 0 else key

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
        for step in self._path(node):
            if step.readers == 0:
                self.num_evictable -= 1
                if step.listed:
                    self._remove(step)
            step.readers += 1

    def release(self, node: PrefixNode) -> None:
        for step in self._path(node):
            assert step.readers > 0, "a node was released more often than acquired"
            step.readers -= 1
            if step.readers == 0:
                self.num_evictable += 1
        if node.readers == 0 and node is not self.root:
            self._insert(node, after=self._before[0])

    def extend(self, node: PrefixNode, key: Key, page: int) -> PrefixNode:
        """Moves a reader's private page into the tree under `node`, and the reader to it. If the
        tree has such a page already, the given one becomes free."""
        child = node.children.get(key)
        if child is None:
            child = PrefixNode(key, page, node.page, node.depth + 1)
            node.children[key] = self._nodes[page] = child
            self.num_nodes += 1
        else:
            self.allocator.give_back([page])
            self.num_evictable -= child.readers == 0
            if child.listed:
                self._remove(child)
        child.readers += 1
        return child

    def evict(self, number: int) -> int:
        """Frees up to `number` pages and returns how many."""
        freed = 0
        while freed < number and (page := self._after[0]):
            node = self._nodes[page]
            assert not node.children, f"page {page} precedes one that was used before it"
            self._remove(node)
            self._nodes[page] = self.root
            parent = self.parent(node)
            del parent.children[node.key]
            self.allocator.give_back([page])
            freed += 1
            # It was used last when the evicted one was: else it would be in the list.
            if not (parent.readers or parent.children or parent.listed or parent is self.root):
                self._insert(parent, after=0)
        self.num_nodes -= freed
        self.num_evictable -= freed
        return freed

    def _remove(self, node: PrefixNode) -> None:
        """Takes a node from the list."""
        before, after = self._before[node.page], self._after[node.page]
        self._after[before], self._before[after] = after, before
        node.listed = False

    def _insert(self, node: PrefixNode, after: int) -> None:
        """Puts a node into the list, behind the page `after`."""
        page, behind = node.page, self._after[after]
        self._before[page], self._after[page] = after, behind
        self._after[after] = self._before[behind] = page
        node.listed = True

    def parent(self, node: PrefixNode) -> PrefixNode:
        return self._nodes[node.parent]

    def num_idle(self, node: PrefixNode) -> int:
        """Nodes without readers on the path to this one: evictable until it is acquired."""
        return sum(step.readers == 0 for step in self._path(node))

    def nodes(self) -> Iterator[PrefixNode]:
        return (node for node in self._nodes if node.page)

    def _path(self, node: PrefixNode) -> Iterator[PrefixNode]:
        nodes = self._nodes
        while node.page:
            yield node
            node = nodes[node.parent]
