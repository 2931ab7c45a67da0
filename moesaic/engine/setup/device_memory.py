"""The memory of a rank's device: what is free, what a step needs, and the size of the KV cache."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moesaic.config import ServerArgs
from moesaic.config.devices import ranks_here
from moesaic.config.gpus import share_gpus
from moesaic.engine.sampling.sampler import CPU_PIECE, DEVICE_PIECE
from moesaic.engine.setup.moe_setup import StepLimits
from moesaic.layers.attention import Attention, LatentAttention
from moesaic.layers.mlp import GatedMLP
from moesaic.models.blocks import CausalLM
from moesaic.moe.context import MoeContext
from moesaic.moe.layer import FusedMoE

GIB = 2**30
# The share of free memory that the KV cache takes by default on a CPU, whose memory others use too.
DEFAULT_FREE_SHARE = 0.5
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
# GPU memory that CUDA, its libraries and compiled kernels take in a process.
RESERVE_BYTES = 2 * GIB
# Allocations leave gaps, and estimates omit what is small.
SAFETY = 2.0
# Bounds of the default share of a GPU, because estimates are incomplete.
LARGEST_SHARE, SMALLEST_SHARE = 0.92, 0.5
# The most splits of a context when few sequences decode.
SPLITS = 32
# Bytes of a logit: in the model's dtype, in float32, and of scores; and in the piece that the
# sampler works on, beside these two, at most.
LOGIT_BYTES, SCORE_BYTES = 2 + 4, 8
SAMPLED_BYTES = 34
SLOT_BYTES = 4
# A token's counter for the penalties of a request.
COUNTER_BYTES = 4
CACHE_TYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


class TooLittleMemory(ValueError):
    """Weights and buffers, or the KV cache beside them, do not fit."""


def compute_device(args: ServerArgs, rank: int = 0) -> torch.device:
    """The rank's device, which becomes the current one; `args` are resolved."""
    if args.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"--device cuda cannot work here: torch {torch.__version__} finds no GPU that it can "
            "use (is the driver too old?); give --device cpu"
        )
    first, count = args.base_gpu_id, torch.cuda.device_count()
    if first >= count:
        raise ValueError(
            f"--base-gpu-id {first}: torch sees {count} GPUs, numbered from 0; give a smaller id"
        )
    device = torch.device("cuda", first + _gpus_here(args)[rank % ranks_here(args)])
    torch.cuda.set_device(device)
    return device


def gpu_sharers(args: ServerArgs, rank: int = 0) -> int:
    """The number of ranks on this rank's GPU."""
    if args.device != "cuda" or ranks_here(args) == 1:
        return 1
    devices = _gpus_here(args)
    return devices.count(devices[rank % len(devices)])


def _gpus_here(args: ServerArgs) -> tuple[int, ...]:
    """The GPU of each rank of this node, counted from --base-gpu-id."""
    return share_gpus(ranks_here(args), torch.cuda.device_count() - args.base_gpu_id)


def cache_dtype(args: ServerArgs, dtype: torch.dtype) -> torch.dtype:
    return CACHE_TYPES.get(args.kv_cache_dtype, dtype)


def release_unused() -> None:
    """Returns GPU memory that this process has cached, for other processes to use."""
    gc.collect()
    torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """The bytes of a GPU, or of a rank's part of it."""

    total: int
    free: int
    held: int
    """Allocated by this process."""
    sharers: int = 1
    """Ranks that share the GPU."""

    @classmethod
    def of(cls, device: torch.device) -> DeviceRoom:
        """Collects garbage first: a discarded engine keeps its memory until then."""
        release_unused()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))

    @property
    def others(self) -> int:
        """Used by CUDA itself and by other processes."""
        return max(0, self.total - self.free - self.held)

    def holding(self, nbytes: int) -> DeviceRoom:
        """Counts `nbytes` that this process holds outside of torch's allocator."""
        return replace(self, held=self.held + nbytes)

    def after(self, nbytes: int) -> DeviceRoom:
        return replace(self, free=self.free - nbytes, held=self.held + nbytes)

    def part(self, sharers: int) -> DeviceRoom:
        """One rank's part, if all `sharers` ranks hold the same."""
        return DeviceRoom(self.total // sharers, self.free // sharers, self.held, sharers)

    def __str__(self) -> str:
        name = "the GPU" if self.sharers == 1 else f"a rank's part of the GPU (1/{self.sharers})"
        return (
            f"{name} has {self.total / GIB:.1f} GiB, of which {self.held / GIB:.1f} GiB are held "
            f"here, {self.others / GIB:.1f} GiB by others and {self.free / GIB:.1f} GiB are free"
        )


def gpu_room() -> DeviceRoom:
    return DeviceRoom.of(torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True, slots=True)
class HostRoom:
    """The bytes of a machine, which `sharers` ranks share."""

    total: int
    free: int
    sharers: int = 1

    @classmethod
    def now(cls, sharers: int) -> HostRoom:
        return cls(total_memory(), free_memory(), sharers)

    def after(self, nbytes: int) -> HostRoom:
        return replace(self, free=max(0, self.free - nbytes))


Room = DeviceRoom | HostRoom


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Estimated memory of the largest step, without weights and KV cache."""

    logits: int
    experts: int
    dense: int
    attention: int
    routed: int = 0
    """The slots of all layers and a copy of them, which requests may ask for."""
    counters: int = 0
    """Of the tokens of each request, for penalties."""
    drafts: int = 0
    """Logits of the draft model."""
    graphs: int = 0
    """The largest captured step with prompts: other steps cannot use its memory."""

    @property
    def total(self) -> int:
        return sum(astuple(self))

    @classmethod
    def of(cls, model: CausalLM, limits: StepLimits, context_length: int) -> StepBytes:
        config, tokens, size = model.config, limits.tokens, model.config.dtype.itemsize
        widest, experts, attention, gathered, routed, graphs = [0], [0], [0], [0], 0, 0
        if limits.graph_tokens and model.cache.value_dim:  # latents have no such graphs
            captured = replace(limits, tokens=limits.graph_tokens, graph_tokens=0)
            graph = cls.of(model, captured, context_length)
            graphs = graph.experts + graph.dense + graph.attention
        for module in model.modules():
            if isinstance(module, FusedMoE):
                part = config.parallel.most_rows(tokens)
                experts.append(_expert_bytes(module, tokens, part))
                routed += 2 * tokens * module.config.top_k * SLOT_BYTES
            elif isinstance(module, Attention | LatentAttention):
                attention.append(_attention_bytes(module, limits, context_length, size))
            elif isinstance(module, GatedMLP):
                gathered.append(_gathered_bytes(module, tokens, size))
        widest += [matrix.shape[0] for matrix in _dense(model)]
        tapped = model.output_size - config.hidden_size
        return cls(
            logits=logit_bytes(limits.decode_tokens, config.vocab_size, config.moe.resolved.device),
            experts=max(experts),
            # The residual, its norm, the widest product and its result; what the draft model reads
            # of other layers, and a copy.
            dense=tokens * size * (4 * config.hidden_size + 2 * max(widest) + 2 * tapped)
            + max(gathered),
            attention=max(attention),
            routed=routed,
            counters=limits.running * config.vocab_size * COUNTER_BYTES,
            graphs=graphs,
        )


def logit_bytes(rows: int, vocab_size: int, device: str) -> int:
    """The memory of a step that samples `rows` rows; rows that verify drafts count, too."""
    numbers = rows * vocab_size
    piece = max(vocab_size, CPU_PIECE if device == "cpu" else DEVICE_PIECE)
    return numbers * LOGIT_BYTES + max(numbers * SCORE_BYTES, min(numbers, piece) * SAMPLED_BYTES)


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What the KV cache is sized by."""

    token_bytes: int
    wanted_tokens: int
    """The most that requests can use."""
    fixed_bytes: int
    """Weights and buffers."""
    node_bytes: int
    """Those of all ranks of the node."""
    step: StepBytes


def _dense(model: CausalLM) -> list[torch.Tensor]:
    """The matrices of the layers; embedding and head are not multiplied by all tokens."""
    return [p for layer in model.model.layers for p in layer.parameters() if p.dim() == 2]


def _expert_bytes(layer: FusedMoE, tokens: int, part: int) -> int:
    """Hidden rows and results of all pairs, and quantised inputs. If other ranks send tokens, up to
    `part` each, all of their pairs may come here."""
    config, size = layer.config, layer.context.dtype.itemsize
    tokens = tokens if layer.context.replicated else part * layer.layout.size
    pairs = tokens * config.top_k
    return (
        pairs * (layer.inner + config.hidden_size) * size + 2 * tokens * config.hidden_size * size
    )


def _gathered_bytes(layer: GatedMLP, tokens: int, size: int) -> int:
    """If the layer is split over several attention groups: the rows of all of them, both products
    and a sum, or in deterministic mode the whole rows in between."""
    parallel, down = layer.parallel, layer.down_proj
    if not parallel.spans_groups(parallel.dense_tp):
        return 0
    rows = parallel.stage.size * parallel.most_rows(tokens)
    hidden, inner = down.pieces[0].shape[0], 2 * sum(layer.gate_up_proj.sizes)
    return rows * size * (3 * hidden + inner + (2 * sum(down.widths) if down.gathers else 0))


def _attention_bytes(
    layer: Attention | LatentAttention, limits: StepLimits, context: int, size: int
) -> int:
    """The float32 parts of a split decode. Latent attention adds the keys and values of a prefilled
    sequence, or in deterministic mode the absorbed queries and their results."""
    if isinstance(layer, Attention):
        return limits.decode_tokens * layer.num_heads * (layer.config.head_dim + 2) * 4 * SPLITS
    config = layer.config
    if layer.deterministic:
        each = 2 * config.kv_rank + config.value_dim
        return limits.tokens * layer.num_heads * each * size
    expanded = config.nope_dim + config.rope_dim + config.value_dim
    parts = limits.decode_tokens * layer.num_heads * (config.kv_rank + 2) * 4 * SPLITS
    return parts + context * layer.num_heads * expanded * size


def default_share(total: int, step: StepBytes) -> float:
    """The share of a GPU's memory for weights and KV cache, next to the largest step."""
    share = 1 - (RESERVE_BYTES + SAFETY * step.total) / total
    return min(max(share, SMALLEST_SHARE), LARGEST_SHARE)


def smaller_weights(moe: MoeContext) -> str:
    """What to use if the weights do not fit; omits flags that change nothing."""
    flags = ["--dtype bfloat16"] if moe.dtype.itemsize > torch.bfloat16.itemsize else []
    flags += [] if moe.weight_format.quantised else ["--quantization fp8"]
    return "a smaller model" + (f" or fewer bits ({', '.join(flags)})" if flags else "")


def planned_tokens(args: ServerArgs, cache: CacheRequest, room: Room, smaller: str) -> int:
    """Tokens of the KV cache once weights and buffers are allocated; TooLittleMemory if they do not
    fit into `room`, with the advice to use `smaller`, or not even one page does beside them."""
    if isinstance(room, DeviceRoom):
        if cache.fixed_bytes > room.free:
            raise TooLittleMemory(
                f"weights and buffers take {cache.fixed_bytes / GIB:.1f} GiB; {room}: use "
                f"{smaller}, or stop other processes there"
            )
        return gpu_cache_tokens(args, cache, room.after(cache.fixed_bytes))
    if cache.node_bytes > room.total:
        raise TooLittleMemory(
            f"weights and buffers of the {room.sharers} rank{'s' * (room.sharers > 1)} of a node "
            f"take {cache.node_bytes / GIB:.1f} GiB and this machine has {room.total / GIB:.1f} "
            f"GiB: use more nodes (--nnodes), {smaller}"
        )
    return cpu_cache_tokens(args, cache, room.after(cache.node_bytes))


def gpu_cache_tokens(args: ServerArgs, cache: CacheRequest, room: DeviceRoom) -> int:
    """Tokens of the KV cache beside the weights on a GPU: --max-total-tokens, or what fits."""
    page, per_token, step = args.page_size, cache.token_bytes, cache.step
    if args.max_total_tokens is not None:
        _check_page(args.max_total_tokens, page)
        most = max(0, room.free - step.total) // per_token
        if args.max_total_tokens > most:
            raise TooLittleMemory(
                f"--max-total-tokens {args.max_total_tokens} needs "
                f"{args.max_total_tokens * per_token / GIB:.1f} GiB: {room}, and the largest step "
                f"takes about {step.total / GIB:.2f} GiB; give at most {most}"
            )
        return args.max_total_tokens // page * page
    share = args.mem_fraction_static or default_share(room.total, step)
    allowed = int(share * room.total) - room.held
    budget = min(allowed, room.free - step.total)
    tokens = tokens_in_pages(budget, per_token, cache.wanted_tokens, page)
    if tokens < page:
        raise TooLittleMemory(
            f"nothing is left for a KV cache, in which a page of {page} tokens takes "
            f"{page * per_token / GIB:.3f} GiB: {room}; --mem-fraction-static {share:.3g} allows "
            f"{max(0, allowed) / GIB:.2f} GiB and the largest step takes about "
            f"{step.total / GIB:.2f} GiB: raise the former, lower --chunked-prefill-size or "
            "--max-running-requests, or stop other processes there"
        )
    return tokens


def cpu_cache_tokens(args: ServerArgs, cache: CacheRequest, room: HostRoom) -> int:
    """The same on a CPU, whose memory the ranks of a node share."""
    page, per_token, weight_bytes = args.page_size, cache.token_bytes, cache.fixed_bytes
    if args.max_total_tokens is not None:
        _check_page(args.max_total_tokens, page)
        _check_fits(args.max_total_tokens, cache, room)
        return args.max_total_tokens // page * page
    if args.mem_fraction_static is None:
        budget = int(DEFAULT_FREE_SHARE * room.free / room.sharers)
    else:
        budget = int(args.mem_fraction_static * room.total / room.sharers) - weight_bytes
        if budget < per_token * page:
            least = (weight_bytes + per_token * page) * room.sharers / room.total
            raise TooLittleMemory(
                f"--mem-fraction-static {args.mem_fraction_static} leaves no room for a KV cache: "
                f"the weights take {weight_bytes * room.sharers / GIB:.2f} GiB of "
                f"{room.total / GIB:.2f} GiB; give more than {least:.3g}"
            )
    tokens = tokens_in_pages(budget, per_token, cache.wanted_tokens, page)
    if tokens == 0:
        raise TooLittleMemory(
            f"nothing is left for a KV cache, in which a page of {page} tokens takes "
            f"{page * per_token / GIB:.3f} GiB: {room.free / GIB:.2f} GiB of this machine are free "
            f"beside weights and buffers, and a rank's cache may have {budget / GIB:.2f} GiB: free "
            "some, use more nodes (--nnodes), or lower --page-size"
        )
    return tokens


def tokens_in_pages(budget: int, per_token: int, wanted: int, page: int) -> int:
    """Tokens of the whole pages that fit into `budget` bytes, up to `wanted` tokens."""
    return min(budget // per_token, -(-wanted // page) * page) // page * page


def _check_page(tokens: int, page: int) -> None:
    if tokens < page:
        raise ValueError(
            f"--max-total-tokens {tokens} is less than one page of {page} tokens: raise it or "
            "lower --page-size"
        )


def _check_fits(tokens: int, cache: CacheRequest, room: HostRoom) -> None:
    per_token, sharers = cache.token_bytes, room.sharers
    most = (room.total // sharers - cache.fixed_bytes) // per_token
    if tokens > most:
        each, shared = (" on each rank", f" for {sharers} ranks") if sharers > 1 else ("", "")
        raise TooLittleMemory(
            f"--max-total-tokens {tokens} needs {tokens * per_token / GIB:.1f} GiB next to "
            f"{cache.fixed_bytes / GIB:.1f} GiB of weights{each}, and this machine has "
            f"{room.total / GIB:.1f} GiB{shared}: give at most {most}"
        )


def total_memory() -> int:
    """Bytes that this process may use: the machine's, or its control group's if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _cgroup_limits())])


def free_memory() -> int:
    """Bytes that can be allocated without swapping."""
    free = [limit - used for limit, used in _cgroup_limits()]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    return max(0, min(free, default=total_memory() // 2))


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Limit and usage of the control group, if it has a limit."""
    for limit_file, used_file in CGROUPS:
        limit, used = Path(limit_file), Path(used_file)
        if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdecimal():
            yield int(text), int(used.read_text())


def describe_gpu(number: int) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(number)
    return {
        "name": facts.name,
        "memory_bytes": facts.total_memory,
        "capability": f"{facts.major}.{facts.minor}",
        "processors": facts.multi_processor_count,
    }
