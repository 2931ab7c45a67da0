"""What instances that share requests, and services that go on without a lost rank, cannot have."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

from moesaic.config.args import ServerArgs
from moesaic.config.args_parallel import TRANSFER_DEVICES
from moesaic.config.devices import device_of, num_gpus, ranks_here
from moesaic.config.flags import given
from moesaic.config.speculation import speculation_problems
from moesaic.core.speculation import ALGORITHMS

HOOKS: Final = ("elastic_event_command", "elastic_event_url")


def elastic_problems(args: ServerArgs) -> Iterator[str]:
    yield from _weight_cache_problems(args)
    if args.elastic_ep_backend is None:
        for typed in given(args, "elastic_ep_join_mode", *HOOKS):
            yield f"{typed} needs --elastic-ep-backend mooncake"
        return
    yield from _hook_problems(args)
    shown = f"--elastic-ep-backend {args.elastic_ep_backend}"
    if (device := device_of(args)) == "cuda":
        yield from _nccl_problems(args, shown)
        if args.disaggregation_mode != "null":
            yield (
                f"{shown} with --disaggregation-mode {args.disaggregation_mode} on {device}: only "
                "CPU ranks that send caches are restarted so far; leave one of them out"
            )
    elif device != "cpu":
        yield f"{shown} with --device {device}: ranks on it are not restarted; leave it out"
    if args.nnodes > 1 and device != "cpu":
        yield f"{shown} with --nnodes {args.nnodes}: only CPU ranks of several nodes so far; give 1"
    elif args.nnodes > 1 and args.disaggregation_mode != "null":
        yield (
            f"{shown} with --nnodes {args.nnodes} and --disaggregation-mode "
            f"{args.disaggregation_mode}: only instances of one node so far; leave one of them out"
        )
    if args.overlap == "auto" and device != "cpu":
        yield (
            f"{shown} with --overlap auto on {device}: graphs of measured steps have not been "
            "tried with ranks that are restarted; give --overlap tbo, sbo or off"
        )
    algorithm = ALGORITHMS.get(name := args.speculative_algorithm or "")
    if algorithm is not None and algorithm.on_ranks and device != "cpu":
        yield (
            f"{shown} with --speculative-algorithm {name} on {device}: only CPU ranks with a draft "
            "model are restarted so far; give NGRAM, or leave one of them out"
        )
    if args.elastic_ep_join_mode == "scale" and args.elastic_ep_join_rank_offset == 0:
        yield (
            "--elastic-ep-join-mode scale needs --elastic-ep-join-rank-offset: "
            "the number of ranks that already run"
        )


def _hook_problems(args: ServerArgs) -> Iterator[str]:
    url, command = args.elastic_event_url, args.elastic_event_command
    if url is not None and not url.startswith(("http://", "https://")):
        yield f"--elastic-event-url {url}: give one that begins with http:// or https://"
    if command is None:
        return
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield f"--elastic-event-command {command!r}: {error}"
        return
    if not words or shutil.which(words[0]) is None:
        yield f"--elastic-event-command {command!r}: there is no such program; give its path"


def _nccl_problems(args: ServerArgs, shown: str) -> Iterator[str]:
    """Ranks with a GPU each cut attention by NCCL, whose groups know no rank that returns."""
    groups = args.dp_size if args.enable_dp_attention else 1
    if args.tp_size > groups and ranks_here(args) <= num_gpus() - args.base_gpu_id:
        yield (
            f"{shown} with a GPU for each rank: attention that is cut over them does not outlive "
            f"a rank yet; give --enable-dp-attention --dp-size {args.tp_size}"
        )


def _weight_cache_problems(args: ServerArgs) -> Iterator[str]:
    if args.enable_elastic_expert_backup:
        shown = "--enable-elastic-expert-backup"
    elif args.weight_cache_mode != "off":
        shown = f"--weight-cache-mode {args.weight_cache_mode}"
    else:
        return
    if args.elastic_ep_backend is None:
        yield (
            f"{shown} needs --elastic-ep-backend mooncake: without it no rank is started again, "
            "and weights end with the service"
        )
    if (device := device_of(args)) != "cpu":
        yield (
            f"{shown} with --device {device}: nothing keeps memory of a GPU when its rank has "
            "ended so far; give off"
        )


def role_problems(args: ServerArgs) -> Iterator[str]:
    if args.disaggregation_mode != "null":
        yield from _halves(args)
    decode_cache = args.disaggregation_decode_enable_radix_cache
    if decode_cache and args.disaggregation_mode != "decode":
        yield (
            "--disaggregation-decode-enable-radix-cache needs --disaggregation-mode decode, "
            f"not {args.disaggregation_mode}"
        )
    if decode_cache and args.disable_radix_cache:
        yield (
            "--disaggregation-decode-enable-radix-cache and --disable-radix-cache exclude each "
            "other: keep one"
        )
    yield from speculation_problems(args)


def _halves(args: ServerArgs) -> Iterator[str]:
    """What an instance that does one half of its requests cannot have."""
    if args.disaggregation_mode == "prefill" and args.disaggregation_bootstrap_port == args.port:
        yield (
            f"--disaggregation-bootstrap-port {args.port} is --port: decode instances ask there, "
            "and clients here; give another one"
        )
    device, asked = device_of(args), args.disaggregation_transfer_backend
    if (needed := TRANSFER_DEVICES.get(asked, device)) != device:
        yield (
            f"--disaggregation-transfer-backend {asked} with --device {device}: it moves caches of "
            f"{needed} ranks: give auto, which takes the best one there is"
        )
    if asked == "nixl" and find_spec("nixl") is None:
        yield (
            "--disaggregation-transfer-backend nixl: the package nixl is not installed: pip "
            "install 'moesaic[nixl]', or give auto"
        )
