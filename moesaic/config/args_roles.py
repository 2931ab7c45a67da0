"""Flags of speculative decoding and of prefill/decode disaggregation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from moesaic.config.args_engine import ATTENTION_BACKENDS
from moesaic.config.args_parallel import A2A_BACKENDS, RUNNER_BACKENDS, TRANSFER_BACKENDS
from moesaic.config.flags import not_built


@dataclass(frozen=True)
class SpeculativeArgs:
    GROUP: ClassVar[str] = "Speculative decoding"

    speculative_algorithm: Annotated[
        str | None,
        not_built(
            "How draft tokens are made.",
            choices=("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"),
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        str | None,
        not_built(
            "Folder of the draft model.", aliases=("--speculative-draft-model",), metavar="DIR"
        ),
    ] = None
    speculative_num_steps: Annotated[
        int | None, not_built("Draft steps before a verify.", at_least=1)
    ] = None
    speculative_eagle_topk: Annotated[
        int | None, not_built("Branches of a draft step.", at_least=1)
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None, not_built("Draft tokens verified at once.", at_least=1)
    ] = None
    speculative_accept_threshold_single: Annotated[
        float, not_built("Accept a draft token above this probability.", above=0, at_most=1)
    ] = 1.0
    speculative_accept_threshold_acc: Annotated[
        float,
        not_built("Divide the acceptance bound of a draft token by this.", above=0, at_most=1),
    ] = 1.0
    speculative_token_map: Annotated[
        str | None, not_built("File with the drafter's vocabulary.", metavar="FILE")
    ] = None
    speculative_attention_mode: Annotated[
        str, not_built("Attention kernels of the verify step.", choices=("prefill", "decode"))
    ] = "prefill"
    speculative_draft_attention_backend: Annotated[
        str | None, not_built("Attention kernels of the drafter.", choices=ATTENTION_BACKENDS)
    ] = None
    speculative_moe_runner_backend: Annotated[
        str | None,
        not_built("Runner of the drafter; unset: the target's.", choices=RUNNER_BACKENDS),
    ] = None
    speculative_moe_a2a_backend: Annotated[
        str | None,
        not_built("All-to-all of the drafter; unset: the target's.", choices=A2A_BACKENDS),
    ] = None


@dataclass(frozen=True)
class DisaggregationArgs:
    GROUP: ClassVar[str] = "Prefill/decode disaggregation"

    disaggregation_mode: Annotated[
        str,
        not_built(
            "Serve only prefill or only decode; null: both.", choices=("null", "prefill", "decode")
        ),
    ] = "null"
    disaggregation_transfer_backend: Annotated[
        str, not_built("How the KV cache is transferred.", choices=TRANSFER_BACKENDS)
    ] = "mooncake"
    disaggregation_bootstrap_port: Annotated[
        int, not_built("Port for the rendezvous of prefill and decode.", at_least=1, at_most=65535)
    ] = 8998
    disaggregation_ib_device: Annotated[
        str | None, not_built("InfiniBand devices, comma-separated; unset: detected.")
    ] = None
    disaggregation_decode_enable_radix_cache: Annotated[
        bool, not_built("Reuse shared prefixes on the decode side.")
    ] = False
    num_reserved_decode_tokens: Annotated[
        int, not_built("Tokens reserved for each running request.", at_least=0)
    ] = 512
    disaggregation_decode_polling_interval: Annotated[
        int, not_built("Steps between two polls for received caches.", at_least=1)
    ] = 1
    disaggregation_decode_extra_slots: Annotated[
        int | None, not_built("Request slots for caches in transfer.", at_least=0)
    ] = None
