"""Steps of fixed sizes, captured once as CUDA graphs and replayed.

A decode step uses the smallest captured size (bucket) that holds its sequences, a mixed step one
that holds its tokens; the rows beyond them are padding. A graph reads and writes static buffers.

Ranks that exchange rows agree on the bucket of the one with the most. A rank without prompts in a
mixed step has a graph with as many rows in the exchange, but few of its own.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from tqdm import tqdm

from moesaic.core.overlap import Overlap
from moesaic.engine.setup.device_memory import GIB
from moesaic.kernels.attention import MAX_FUSED_ENTRIES
from moesaic.overlap.policy import OverlapPolicy

logger = logging.getLogger(__name__)

# Decoding sequences of mixed steps: their number decides how attention cuts long sequences.
SEQUENCE_BUCKETS = (16, 64, 256, 1024)
IN_HALVES = ", in two micro-batches"


class CapturedKey(Protocol):
    @property
    def rows(self) -> int: ...

    @property
    def agreed(self) -> int: ...

    @property
    def prefill(self) -> bool: ...

    @property
    def overlap(self) -> Overlap: ...

    @property
    def name(self) -> str: ...


class GraphKey(NamedTuple):
    rows: int
    verifies: bool = False
    """Sequences may have several rows, one more than their drafts."""
    overlap: Overlap = Overlap.OFF

    @property
    def prefill(self) -> bool:
        return False

    @property
    def agreed(self) -> int:
        """The bucket of all ranks."""
        return self.rows

    @property
    def name(self) -> str:
        split = IN_HALVES * (self.overlap == Overlap.TBO)
        return f"{self.rows} rows" + " with drafts" * self.verifies + split

    @property
    def half(self) -> GraphKey:
        """The size of a micro-batch."""
        return self._replace(rows=-(-self.rows // 2))


class MixedKey(NamedTuple):
    tokens: int
    sequences: int
    """Room for those with one new token."""
    agreed: int
    """The bucket of the rank with the most tokens."""
    overlap: Overlap = Overlap.OFF

    @property
    def prefill(self) -> bool:
        return True

    @property
    def rows(self) -> int:
        return self.tokens

    @property
    def name(self) -> str:
        split = IN_HALVES * (self.overlap == Overlap.TBO)
        return f"{self.tokens} rows, {self.agreed} of the largest rank{split}"


Key = TypeVar("Key", bound=CapturedKey)


class CapturedGraphs(Generic[Key]):
    """The graph of each key. `body` computes a step on the static buffers; where nothing is
    captured it is called directly, which is how tests without a GPU run."""

    kind = "decode"
    smaller = "--cuda-graph-max-bs, or give --disable-cuda-graph"
    """What to lower if the graphs do not fit."""

    def __init__(
        self, keys: Sequence[Key], body: Callable[[Key], None], device: torch.device
    ) -> None:
        self.keys, self._body, self._device = keys, body, device
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._isolated: dict[Key, torch.cuda.CUDAGraph] = {}
        """Without NCCL's kernels, while steps are measured."""
        self._runs_isolated = False
        self._dropped: dict[Key, bool] = {}
        """Graphs to capture again, and whether a step has run their body since."""
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self.nbytes = 0
        """Memory of all graphs, estimated."""

    def run(self, key: Key) -> None:
        if self._dropped.get(key):
            self._recapture(key)
        graph = self._graphs.get(key)
        if self._runs_isolated:
            graph = self._isolated.get(key, graph)
        if graph is not None:
            graph.replay()
            return
        self._body(key)
        if key in self._dropped:
            self._dropped[key] = True

    def drop(self) -> None:
        """Drops all graphs, none of which may be in flight. Each is captured again in the second
        step that needs it: a communicator of NCCL connects in the first, and all ranks are in that
        one, whether they have the graph or not."""
        self._dropped = dict.fromkeys([*self._dropped, *self._graphs], False)
        self._graphs.clear()
        self._pool, self.nbytes = None, 0

    def _recapture(self, key: Key) -> None:
        """Steps stay eager if there is no memory left for their graph."""
        assert self._stream is not None, "what was dropped had been captured"
        if self._pool is None:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        free = torch.cuda.mem_get_info(self._device)[0]
        try:
            self._graphs[key] = self._capture(key, self._stream, self._pool)
        except torch.OutOfMemoryError as error:
            logger.warning("no CUDA graph of %s any more: %s", key.name, error)
        self.nbytes += max(0, free - torch.cuda.mem_get_info(self._device)[0])
        del self._dropped[key]

    def capture(self, pool: Any, keys: Sequence[Key] | None = None) -> None:
        """Captures these (None: all), the largest first: smaller ones then reuse its memory."""
        keys = self.keys if keys is None else keys
        if not keys:
            return
        started, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        self._stream = stream = self._stream or torch.cuda.Stream(self._device)
        order = tqdm(
            sorted(keys, key=lambda key: key.rows, reverse=True),
            desc=f"Capturing CUDA graphs of {self.kind} steps",
            unit="graph",
            disable=None,
            leave=False,
        )
        for key in order:
            order.set_postfix(rows=key.rows, refresh=False)
            try:
                self._warm_up(key, stream)
                self._graphs[key] = self._capture(key, stream, pool)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"a CUDA graph of {key.name} does not fit beside weights and KV cache: "
                    f"lower --mem-fraction-static, --max-total-tokens or {self.smaller}"
                ) from error
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # the warm-up runs on that stream are not repeated
        nbytes = max(0, free - torch.cuda.mem_get_info(self._device)[0])
        self.nbytes += nbytes
        logger.info(
            "captured %d CUDA graphs of %s steps, %d to %d rows, in %.1f s: they take %.2f GiB",
            len(keys),
            self.kind,
            min(key.rows for key in keys),
            max(key.rows for key in keys),
            time.monotonic() - started,
            nbytes / GIB,
        )

    def uncaptured(self, keys: Iterable[Key]) -> list[Key]:
        return [key for key in dict.fromkeys(keys) if key not in self._graphs]

    @contextmanager
    def trial(self, pool: Any, keys: Sequence[Key]) -> Iterator[None]:
        """Captures graphs that exist inside only."""
        nbytes = self.nbytes
        try:
            self.capture(pool, keys)
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            for key in keys:
                self._graphs.pop(key, None)
            self._isolated.clear()
            self.nbytes = nbytes

    def capture_isolated(self, pool: Any, keys: Iterable[Key]) -> None:
        """A second graph of captured keys, for `isolated`. Call it inside of a trial, where the
        kernels of collectives are left out."""
        assert self._stream is not None, "captured before"
        self._isolated = {key: self._capture(key, self._stream, pool) for key in keys}

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Runs the graphs of `capture_isolated`."""
        self._runs_isolated = True
        try:
            yield
        finally:
            self._runs_isolated = False

    def capture_chosen(self, pool: Any, policy: OverlapPolicy) -> None:
        """Captures those of steps that the policy may choose."""
        self.capture(pool, self._chosen(policy))

    def postpone(self, policy: OverlapPolicy) -> None:
        """The same, each in the second step that needs it, like those that were dropped."""
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._dropped |= dict.fromkeys(self._chosen(policy), False)

    def _chosen(self, policy: OverlapPolicy) -> list[Key]:
        keys = ((key, policy.choices(key.prefill, self.tokens_of(key))) for key in self.keys)
        return self.uncaptured(key for key, chosen in keys if key.overlap in chosen)

    def tokens_of(self, key: Key) -> range:
        """How many tokens of the rank with the most a step may have that runs as this graph. A step
        in halves whose cut is uneven may have a larger graph than it needs as a whole."""
        fewer = sorted({other.agreed for other in self.keys if other.agreed < key.agreed})
        apart = 2 if key.prefill and key.overlap == Overlap.TBO else 1
        return range(1 + (fewer[-apart] if len(fewer) >= apart else 0), key.agreed + 1)

    def _warm_up(self, key: Key, stream: torch.cuda.Stream) -> None:
        """Runs the body once: a capture must neither compile nor let libraries allocate."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._body(key)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)

    def _capture(self, key: Key, stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile; their work is not captured.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._body(key)
        return graph


class GraphCache(CapturedGraphs[GraphKey]):
    """The graphs of decode steps: `sizes` without drafts, `verify_sizes` with some. A graph without
    drafts serves a verify step, too, where the attention of both is the same."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        body: Callable[[GraphKey], None],
        device: torch.device,
        verify_sizes: tuple[int, ...] = (),
        schedules: Sequence[Overlap] = (Overlap.OFF,),
        trees: bool = False,
    ) -> None:
        """`trees`: drafts may be some."""
        self._schedules, self._trees = tuple(schedules), trees
        self.sizes = tuple(sorted({*sizes, *verify_sizes}))
        self._plain, self._verify = tuple(sorted(sizes)), frozenset(verify_sizes)
        apart = [size for size in verify_sizes if self._is_apart(size)]
        keys = list[GraphKey]()
        for kind in schedules:
            whole = kind != Overlap.TBO  # drafts are verified in one batch
            keys += [GraphKey(size, False, kind) for size in sizes if whole or size > 1]
            keys += [GraphKey(size, True, kind) for size in apart if whole]
        super().__init__(keys, body, device)

    def _is_apart(self, size: int) -> bool:
        return self._trees or size <= MAX_FUSED_ENTRIES or size not in self._plain

    def bucket(
        self, rows: int, verifies: bool = False, overlap: Overlap = Overlap.OFF
    ) -> GraphKey | None:
        """The smallest that holds the rows, if any does. All ranks of a step get as many rows,
        whether they verify drafts or not."""
        sizes = self._plain if overlap == Overlap.TBO else self.sizes
        place = bisect_left(sizes, rows)
        if not rows or place == len(sizes):
            return None
        if overlap not in self._schedules:
            return None
        size = sizes[place]
        if size not in self._plain:
            return GraphKey(size, True, overlap)
        if verifies and self._is_apart(size):
            return GraphKey(size, True, overlap) if size in self._verify else None
        return GraphKey(size, False, overlap)


class MixedGraphs(CapturedGraphs[MixedKey]):
    """The graphs of steps with prompts."""

    kind = "mixed"
    smaller = "--cuda-graph-max-bs-prefill, or give --disable-prefill-cuda-graph"

    def __init__(
        self,
        tokens: tuple[int, ...],
        max_sequences: int,
        body: Callable[[MixedKey], None],
        device: torch.device,
        tokens_differ: bool = False,
        schedules: Sequence[Overlap] = (Overlap.OFF,),
    ) -> None:
        """`tokens_differ`: whether ranks have tokens of their own."""
        self._schedules = schedules
        self.tokens = tokens
        fewer = [size for size in SEQUENCE_BUCKETS if size < max_sequences]
        self._sequences = (*fewer, max_sequences)
        keys = [MixedKey(size, some, size) for size in tokens for some in self._sequences]
        keys = [key for key in keys if self._is_needed(key)]
        self._few = self._size(max_sequences) if tokens_differ else None
        """Rows of ranks without prompts, if others may have more."""
        if self._few is not None:
            larger = (size for size in tokens if size > self._few)
            keys += [MixedKey(self._few, max_sequences, size) for size in larger]
        keys = [key._replace(overlap=kind) for kind in schedules for key in keys]
        super().__init__(keys, body, device)

    def _is_needed(self, key: MixedKey) -> bool:
        """Whether some step of as many tokens needs room for more sequences than the next fewer."""
        fewer = self._sequences[max(0, self._sequences.index(key.sequences) - 1)]
        return key.sequences == self._sequences[0] or key.tokens > fewer

    def bucket(self, tokens: int, overlap: Overlap = Overlap.OFF) -> int | None:
        """The smallest that holds the tokens, if any does."""
        return self._size(tokens) if overlap in self._schedules else None

    def _size(self, tokens: int) -> int | None:
        place = bisect_left(self.tokens, tokens)
        return None if place == len(self.tokens) else self.tokens[place]

    def key(
        self, agreed: int, tokens: int, sequences: int, overlap: Overlap = Overlap.OFF
    ) -> MixedKey:
        """`sequences`: those with one new token, at most one a token."""
        if self._few is not None and tokens <= self._few < agreed:
            return MixedKey(self._few, self._sequences[-1], agreed, overlap)
        room = self._sequences[bisect_left(self._sequences, sequences)]
        return MixedKey(agreed, room, agreed, overlap)
