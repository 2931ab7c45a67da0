"""Flags of speculative decoding and of prefill/decode disaggregation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from moesaic.config.args_engine import ATTENTION_BACKENDS
from moesaic.config.args_parallel import A2A_BACKENDS, RUNNER_BACKENDS, TRANSFER_BACKENDS
from moesaic.config.flags import ONLY_DEFAULT, Flag


@dataclass(frozen=True)
class SpeculativeArgs:
    GROUP: ClassVar[str] = "Speculative decoding"

    speculative_algorithm: Annotated[
        str | None,
        Flag(
            "How draft tokens are made.",
            choices=("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"),
            built=ONLY_DEFAULT,
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        str | None,
        Flag(
            "Folder of the draft model.",
            aliases=("--speculative-draft-model",),
            metavar="DIR",
            built=ONLY_DEFAULT,
        ),
    ] = None
    speculative_num_steps: Annotated[
        int | None, Flag("Draft steps before a check.", at_least=1, built=ONLY_DEFAULT)
    ] = None
    speculative_eagle_topk: Annotated[
        int | None, Flag("Branches of a draft step.", at_least=1, built=ONLY_DEFAULT)
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None, Flag("Draft tokens checked at once.", at_least=1, built=ONLY_DEFAULT)
    ] = None
    speculative_accept_threshold_single: Annotated[
        float,
        Flag(
            "Accept a draft token above this probability.",
            above=0,
            at_most=1,
            built=ONLY_DEFAULT,
        ),
    ] = 1.0
    speculative_accept_threshold_acc: Annotated[
        float,
        Flag(
            "Divide the acceptance bound of a draft token by this.",
            above=0,
            at_most=1,
            built=ONLY_DEFAULT,
        ),
    ] = 1.0
    speculative_token_map: Annotated[
        str | None, Flag("File with the draft's vocabulary.", metavar="FILE", built=ONLY_DEFAULT)
    ] = None
    speculative_attention_mode: Annotated[
        str,
        Flag("Attention kernels of the check.", choices=("prefill", "decode"), built=ONLY_DEFAULT),
    ] = "prefill"
    speculative_draft_attention_backend: Annotated[
        str | None,
        Flag("Attention kernels of the draft.", choices=ATTENTION_BACKENDS, built=ONLY_DEFAULT),
    ] = None
    speculative_moe_runner_backend: Annotated[
        str | None,
        Flag(
            "Runner of the draft; unset: the target's.",
            choices=RUNNER_BACKENDS,
            built=ONLY_DEFAULT,
        ),
    ] = None
    speculative_moe_a2a_backend: Annotated[
        str | None,
        Flag(
            "All-to-all of the draft; unset: the target's.",
            choices=A2A_BACKENDS,
            built=ONLY_DEFAULT,
        ),
    ] = None


@dataclass(frozen=True)
class DisaggregationArgs:
    GROUP: ClassVar[str] = "Prefill/decode disaggregation"

    disaggregation_mode: Annotated[
        str,
        Flag(
            "Serve only prefill or only decode; null: both.",
            choices=("null", "prefill", "decode"),
            built=ONLY_DEFAULT,
        ),
    ] = "null"
    disaggregation_transfer_backend: Annotated[
        str,
        Flag("What carries the KV cache.", choices=TRANSFER_BACKENDS, built=ONLY_DEFAULT),
    ] = "mooncake"
    disaggregation_bootstrap_port: Annotated[
        int,
        Flag("Port where prefill and decode meet.", at_least=1, at_most=65535, built=ONLY_DEFAULT),
    ] = 8998
    disaggregation_ib_device: Annotated[
        str | None, Flag("InfiniBand devices, comma-separated; unset: found.", built=ONLY_DEFAULT)
    ] = None
    disaggregation_decode_enable_radix_cache: Annotated[
        bool, Flag("Reuse shared prefixes on the decode side.", built=ONLY_DEFAULT)
    ] = False
    num_reserved_decode_tokens: Annotated[
        int,
        Flag("Tokens kept free for each running request.", at_least=0, built=ONLY_DEFAULT),
    ] = 512
    disaggregation_decode_polling_interval: Annotated[
        int, Flag("Steps between two looks for arrived caches.", at_least=1, built=ONLY_DEFAULT)
    ] = 1
    disaggregation_decode_extra_slots: Annotated[
        int | None,
        Flag("Request slots for caches under way.", at_least=0, built=ONLY_DEFAULT),
    ] = None
