"""Flags of speculative decoding and of prefill/decode disaggregation."""

from dataclasses import dataclass
from typing import ClassVar

from moesaic.config.args_engine import (
    ATTENTION_BACKENDS,
    ATTENTION_KERNELS,
    QUANTIZATIONS,
    QUANTIZATIONS_BUILT,
)
from moesaic.config.args_parallel import (
    A2A_BACKENDS,
    OTHER_TRANSFER_BACKENDS,
    REFUSED_A2A_BACKENDS,
    REFUSED_RUNNER_BACKENDS,
    RUNNER_BACKENDS,
    TRANSFER_BACKENDS,
)
from moesaic.config.flags import flag, not_built
from moesaic.core.speculation import ALGORITHMS, MOST_DRAFTS, UNQUANTISED


@dataclass(frozen=True)
class SpeculativeArgs:
    GROUP: ClassVar[str] = "Speculative decoding"

    speculative_algorithm: str | None = flag(
        None,
        "How draft tokens are made, which steps verify; unset: a step decodes one token of a "
        "request. EAGLE, EAGLE3: by the head in --speculative-draft-model-path; EAGLE without one, "
        "and NEXTN: by the checkpoint's own layer for multi-token prediction.",
        choices=("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO"),
        built=tuple(ALGORITHMS),
        why="nothing makes such drafts yet",
    )
    speculative_draft_model_path: str | None = flag(
        None,
        "Folder of the head of EAGLE or EAGLE3, or of STANDALONE's draft model: a smaller one with "
        "the target's vocabulary.",
        aliases=("--speculative-draft-model",),
        metavar="DIR",
    )
    speculative_draft_model_quantization: str | None = flag(
        None,
        "Quantization of the draft model's experts; unset: as the checkpoint has them, or the "
        "target's --quantization; unquant: none.",
        choices=QUANTIZATIONS,
        same={"awq_marlin": "awq", "gptq_marlin": "gptq"},
        built=(UNQUANTISED, *QUANTIZATIONS_BUILT),
        why="there are no kernels for this format",
    )
    speculative_num_steps: int | None = flag(
        None,
        "Tokens that a draft model proposes, one after the other.",
        at_least=1,
        at_most=MOST_DRAFTS,
    )
    speculative_eagle_topk: int | None = flag(
        None,
        "Branches that each pass of a draft model continues: with more than 1, a draft is a tree.",
        at_least=1,
    )
    speculative_num_draft_tokens: int | None = flag(
        None,
        "Tokens of a request that a step verifies: its newest one and drafts.",
        at_least=1,
        at_most=MOST_DRAFTS + 1,
    )
    speculative_accept_threshold_single: float = flag(
        1.0,
        "Where tokens are drawn: accept every draft token of this probability or more. Below 1, "
        "drafts change answers.",
        at_least=0,
        at_most=1,
    )
    speculative_accept_threshold_acc: float = flag(
        1.0,
        "Where tokens are drawn: accept a draft token of probability p with probability p / this. "
        "Below 1, drafts change answers.",
        at_least=0,
        at_most=1,
    )
    speculative_token_map: str | None = flag(
        None,
        "File with the token ids that EAGLE and NEXTN may propose: a list, of torch.save or JSON; "
        "fewer make drafts cheaper.",
        metavar="FILE",
    )
    speculative_attention_mode: str = flag(
        "prefill",
        "Attention kernels of the verify step: one serves both, whichever is named.",
        choices=("prefill", "decode"),
        idle=("decode",),
        built=("prefill",),
        why="attention has kernels of its own, which the device decides",
    )
    speculative_draft_attention_backend: str | None = flag(
        None,
        "Attention kernels of the draft model: torch_native on CPU, triton on CUDA, whichever is "
        "named.",
        choices=ATTENTION_BACKENDS,
        idle=ATTENTION_KERNELS,
        built=("auto",),
        why="attention has kernels of its own, which the device decides",
    )
    speculative_moe_runner_backend: str | None = flag(
        None,
        "Runner of the draft model; unset: the target's.",
        choices=RUNNER_BACKENDS,
        open=True,
        refused=REFUSED_RUNNER_BACKENDS,
    )
    speculative_moe_a2a_backend: str | None = flag(
        None,
        "All-to-all of the draft model; unset: the target's.",
        choices=A2A_BACKENDS,
        open=True,
        refused=REFUSED_A2A_BACKENDS,
    )
    disable_speculative_adaptive: bool = flag(
        False,
        "Draft as many tokens in every step; else as many as pay, or none, as acceptance and the "
        "times of steps have shown.",
    )
    speculative_ngram_max_trie_depth: int = flag(
        18, "NGRAM: the most tokens before a draft that are compared.", at_least=3
    )
    speculative_ngram_capacity: int = flag(
        10_000_000,
        "NGRAM: tokens of ended requests that drafts are looked for in, by serving group; each "
        "takes up to 110 bytes.",
        at_least=0,
    )
    speculative_ngram_min_bfs_breadth: int = flag(
        1,
        "NGRAM: the most drafts behind one token, where as many tokens before it are known as are "
        "compared.",
        at_least=1,
    )
    speculative_ngram_max_bfs_breadth: int | None = flag(
        None,
        "NGRAM: the most drafts behind one token, where the fewest tokens before it are known; 1: "
        "a draft is a chain. Unset: 10 on CPU, and 1 on CUDA, where steps with prompts beside "
        "trees have no graph.",
        at_least=1,
    )
    speculative_ngram_match_type: str = flag(
        "BFS",
        "NGRAM: which of the longest matches is drafted from: BFS the newest, PROB one with the "
        "most frequent next token.",
        choices=("BFS", "PROB"),
    )


@dataclass(frozen=True)
class DisaggregationArgs:
    GROUP: ClassVar[str] = "Prefill/decode disaggregation"

    disaggregation_mode: str = flag(
        "null",
        "Which half of a request with a bootstrap_room this instance does: it computes the prompt, "
        "or continues it; null: there are no such requests.",
        choices=("null", "prefill", "decode"),
    )
    disaggregation_transfer_backend: str = flag(
        "auto",
        "How KV caches are transferred. auto: on one machine by shared memory or CUDA IPC, else by "
        "TCP; so do all others where a rank of the other instance cannot use what is named.",
        choices=TRANSFER_BACKENDS,
        same=OTHER_TRANSFER_BACKENDS,
        built=tuple(name for name in TRANSFER_BACKENDS if name != "fake"),
        why="it transfers no KV cache",
    )
    disaggregation_bootstrap_port: int = flag(
        8998,
        "Port of a prefill instance, on --host, where decode instances ask for prompts.",
        at_least=1,
        at_most=65535,
    )
    disaggregation_bootstrap_allow: tuple[str, ...] | None = flag(
        None,
        "Addresses, networks and names of prefill instances that a decode instance may connect to, "
        "as requests name them. Unset: loopback and private networks; loopback alone if --host is.",
        metavar="HOST",
    )
    disaggregation_ib_device: str | None = not_built(
        None, "InfiniBand devices, comma-separated.", why="UCX_NET_DEVICES tells nixl which to use"
    )
    disaggregation_decode_enable_radix_cache: bool = flag(
        False,
        "A decode instance looks up prompts in its own prefix cache, and only the rest is sent.",
    )
    num_reserved_decode_tokens: int = not_built(
        512,
        "Tokens reserved for each running request.",
        at_least=0,
        why="what running requests are likely to need is estimated by --schedule-conservativeness",
    )
    disaggregation_decode_polling_interval: int = not_built(
        1,
        "Steps between two polls for received caches.",
        at_least=1,
        why="what arrives wakes the scheduler, which does not poll",
    )
    disaggregation_decode_extra_slots: int | None = not_built(
        None,
        "Request slots for caches in transfer.",
        at_least=0,
        why="a request has its slot from its reservation on",
    )
