"""The device of a rank: which it is, what it has room for, and what a step takes beside weights and
KV cache.

T tokens of a step · B rows of a decode step · V vocabulary · H hidden · K experts of a token.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from moesaic.config import ServerArgs
from moesaic.config.devices import num_ranks
from moesaic.config.gpus import share_gpus
from moesaic.engine.setup.kv_memory import GIB
from moesaic.engine.setup.moe_setup import StepLimits
from moesaic.layers.attention import Attention, LatentAttention
from moesaic.layers.context import CacheSpec
from moesaic.models.blocks import CausalLM
from moesaic.moe.context import MoeContext
from moesaic.moe.layer import FusedMoE

logger = logging.getLogger(__name__)

# What CUDA, its libraries and compiled kernels take of a GPU in a process.
RESERVE_BYTES = 2 * GIB
# Allocations do not fit seamlessly, and estimates leave out what is small.
SAFETY = 2.0
# Never more than this share by default: what an estimate does not know must not end a service.
LARGEST_SHARE, SMALLEST_SHARE = 0.92, 0.5
# Parts into which the context of a sequence is cut at most when few sequences decode.
SPLITS = 32
# Of a row of logits: in the model's type, in float32, and what a sampler makes of it.
LOGIT_BYTES = 2 + 4 + 8
CACHE_TYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def compute_device(args: ServerArgs, rank: int = 0) -> torch.device:
    """Of resolved arguments; a rank's process uses no other GPU."""
    if args.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"--device cuda cannot work here: torch {torch.__version__} finds no GPU that it can "
            "use (too old a driver?); give --device cpu"
        )
    first, count = args.base_gpu_id, torch.cuda.device_count()
    if first >= count:
        raise ValueError(
            f"--base-gpu-id {first}: torch sees {count} GPUs; give less than that, as they are "
            "numbered from 0"
        )
    device = torch.device("cuda", first + share_gpus(num_ranks(args), count - first)[rank])
    torch.cuda.set_device(device)
    return device


def gpu_sharers(args: ServerArgs, rank: int = 0) -> int:
    """How many ranks compute on the GPU of this one."""
    if args.device != "cuda" or num_ranks(args) == 1:
        return 1
    devices = share_gpus(num_ranks(args), torch.cuda.device_count() - args.base_gpu_id)
    return devices.count(devices[rank])


def cache_dtype(args: ServerArgs, dtype: torch.dtype) -> torch.dtype:
    return CACHE_TYPES.get(args.kv_cache_dtype, dtype)


def give_back() -> None:
    """What this process has of a GPU's memory and does not use: others may look for it."""
    gc.collect()
    torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """Bytes of a GPU: all, those that are free, and those that this process holds. The others may
    be those of other processes. Of `sharers` ranks on a GPU each has its part of it."""

    total: int
    free: int
    held: int
    sharers: int = 1

    @classmethod
    def of(cls, device: torch.device) -> DeviceRoom:
        """An engine that was given up before keeps its memory until its cycles are found."""
        give_back()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))

    @property
    def others(self) -> int:
        """Held by CUDA itself and by other processes."""
        return max(0, self.total - self.free - self.held)

    def holding(self, nbytes: int) -> DeviceRoom:
        """With what this process holds beside torch's allocator."""
        return replace(self, held=self.held + nbytes)

    def after(self, nbytes: int) -> DeviceRoom:
        """Once that much is taken."""
        return replace(self, free=self.free - nbytes, held=self.held + nbytes)

    def part(self, sharers: int) -> DeviceRoom:
        """Of one of so many ranks that have taken alike, or nothing yet."""
        return DeviceRoom(self.total // sharers, self.free // sharers, self.held, sharers)

    def __str__(self) -> str:
        whose = "the GPU" if self.sharers == 1 else f"a rank's part of the GPU (1/{self.sharers})"
        return (
            f"{whose} has {self.total / GIB:.1f} GiB, of which {self.held / GIB:.1f} GiB are held "
            f"here, {self.others / GIB:.1f} GiB by others and {self.free / GIB:.1f} GiB are free"
        )


def gpu_room() -> DeviceRoom:
    """Of the GPU in use."""
    return DeviceRoom.of(torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What the largest step takes beside weights and cache, estimated."""

    logits: int
    experts: int
    dense: int
    attention: int

    @property
    def total(self) -> int:
        return self.logits + self.experts + self.dense + self.attention

    @classmethod
    def of(cls, model: CausalLM, limits: StepLimits, context_length: int) -> StepBytes:
        """`model`: with or without memory."""
        config, size = model.config, model.config.dtype.itemsize
        modules = list(model.modules())
        widest = max((p.shape[0] for p in _dense(model)), default=0)
        hidden = config.hidden_size
        return cls(
            logits=limits.decode_tokens * config.vocab_size * LOGIT_BYTES,
            experts=max(
                (
                    _expert_bytes(m, limits.tokens, config.parallel.most_rows(limits.tokens))
                    for m in modules
                    if isinstance(m, FusedMoE)
                ),
                default=0,
            ),
            # The residual, its norm, the widest product and what comes of it.
            dense=limits.tokens * size * (4 * hidden + 2 * widest),
            attention=max(
                (
                    _attention_bytes(m, limits, context_length, size)
                    for m in modules
                    if isinstance(m, Attention | LatentAttention)
                ),
                default=0,
            ),
        )


def _dense(model: CausalLM) -> list[torch.Tensor]:
    """Matrices of the layers; embedding and head are not multiplied with all tokens."""
    return [p for layer in model.model.layers for p in layer.parameters() if p.dim() == 2]


def _expert_bytes(layer: FusedMoE, tokens: int, part: int) -> int:
    """Rows of the sorted order within an expert, and results of all pairs; inputs quantised. Where
    tokens come from other ranks, a `part` from each, nobody knows how many of their pairs are this
    rank's."""
    config, size = layer.config, layer.context.dtype.itemsize
    tokens = tokens if layer.context.replicated else part * layer.layout.size
    pairs = tokens * config.top_k
    return (
        pairs * (layer.inner + config.hidden_size) * size + 2 * tokens * config.hidden_size * size
    )


def _attention_bytes(
    layer: Attention | LatentAttention, limits: StepLimits, context: int, size: int
) -> int:
    """Parts of a split decode in float32; of latents also the keys and values of a sequence that is
    prefilled, or in deterministic mode the absorbed queries and what is mixed for them."""
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
    """Of a GPU's memory for weights and KV cache: what the largest step leaves."""
    share = 1 - (RESERVE_BYTES + SAFETY * step.total) / total
    return min(max(share, SMALLEST_SHARE), LARGEST_SHARE)


def smaller_weights(moe: MoeContext) -> str:
    """What to use where they do not fit; flags that are given already, or declared, do not help."""
    flags = ["--dtype bfloat16"] if moe.dtype.itemsize > torch.bfloat16.itemsize else []
    flags += [] if moe.weight_format.quantised else ["--quantization fp8"]
    return "a smaller model" + (f" or fewer bits ({', '.join(flags)})" if flags else "")


def check_weights_fit(name: str, weight_bytes: int, room: DeviceRoom, smaller: str) -> None:
    """`smaller`: see `smaller_weights`."""
    if weight_bytes > room.free:
        raise ValueError(
            f"the weights of {name} take {weight_bytes / GIB:.1f} GiB; {room}: use {smaller}, or "
            "end what else runs there"
        )


def device_cache_tokens(
    args: ServerArgs,
    spec: CacheSpec,
    element_size: int,
    wanted: int,
    room: DeviceRoom,
    step: StepBytes,
) -> int:
    """Tokens that fit beside what is loaded, in whole pages: as told, or by memory, but never more
    than `wanted`."""
    page, per_token = args.page_size, spec.bytes_per_token(element_size)
    if args.max_total_tokens is not None:
        return _as_told(args.max_total_tokens, page, per_token, room, step)
    share = args.mem_fraction_static or default_share(room.total, step)
    own = int(share * room.total) - room.held
    budget = min(own, room.free - step.total)
    tokens = min(budget // per_token, -(-wanted // page) * page) // page * page
    if tokens < page:
        raise ValueError(
            f"nothing is left for a KV cache, of which a page of {page} tokens takes "
            f"{page * per_token / GIB:.3f} GiB: {room}; --mem-fraction-static {share:.3g} allows "
            f"{max(0, own) / GIB:.2f} GiB and the largest step takes about "
            f"{step.total / GIB:.2f} GiB: raise the former, lower --chunked-prefill-size or "
            "--max-running-requests, or end what else runs there"
        )
    return tokens


def _as_told(tokens: int, page: int, per_token: int, room: DeviceRoom, step: StepBytes) -> int:
    if tokens < page:
        raise ValueError(
            f"--max-total-tokens {tokens} is less than one page of {page} tokens: raise it or "
            "lower --page-size"
        )
    most = max(0, room.free - step.total) // per_token
    if tokens > most:
        raise ValueError(
            f"--max-total-tokens {tokens} needs {tokens * per_token / GIB:.1f} GiB: {room}, and "
            f"the largest step takes about {step.total / GIB:.2f} GiB; give at most {most}"
        )
    return tokens // page * page


def describe(number: int) -> dict[str, Any]:
    """A GPU in plain data."""
    facts = torch.cuda.get_device_properties(number)
    return {
        "name": facts.name,
        "memory_bytes": facts.total_memory,
        "capability": f"{facts.major}.{facts.minor}",
        "processors": facts.multi_processor_count,
    }
