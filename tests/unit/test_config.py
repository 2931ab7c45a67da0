"""Flags: declaration, command line, file, keywords, ranges, contradictions, unbuilt features."""

import dataclasses
import logging
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from moesaic.config import devices
from moesaic.config.args import ServerArgs
from moesaic.config.devices import expert_ranks
from moesaic.config.docs import markdown
from moesaic.config.flags import specs, unbuilt
from moesaic.config.parser import FlagParser, merge, read_config
from moesaic.config.resolve import (
    BACKEND_ENTRY_POINTS,
    contradictions,
    flag_changes,
    largest_divisor,
    problems,
    resolve,
)
from moesaic.config.speculation import speculation_defaults, speculation_of
from moesaic.core.speculation import Speculation
from moesaic.moe.backends import ENTRY_POINTS

ROOT = Path(__file__).parents[2]


def parse(line: str, file: Path | None = None) -> ServerArgs:
    parser = FlagParser("moesaic serve", "", "")
    parser.add_flags(ServerArgs)
    given = parser.parse(line.split())
    return merge(ServerArgs, given, read_config(ServerArgs, file) if file else {})


def make(**kwargs: object) -> ServerArgs:
    return ServerArgs.from_kwargs(**{"model_path": "m", **kwargs})


def test_defaults_are_those_people_know():
    args = ServerArgs()
    assert (args.tp_size, args.ep_size, args.dp_size, args.pp_size) == (1, 1, 1, 1)
    assert (args.host, args.port) == ("127.0.0.1", 30000)
    assert (args.moe_a2a_backend, args.moe_runner_backend, args.deepep_mode) == (
        "none",
        "auto",
        "auto",
    )
    assert args.eplb_rebalance_num_iterations == 1000
    assert args.tbo_token_distribution_threshold == 0.48
    assert (args.disaggregation_bootstrap_port, args.num_reserved_decode_tokens) == (8998, 512)
    assert args.elastic_ep_scale_timeout == 600.0
    assert args.stream_interval == 1
    assert args.schedule_conservativeness == 1.0


def test_args_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerArgs().tp_size = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--tp 8", "tp_size", 8),
        ("--tp-size 8", "tp_size", 8),
        ("--tensor-parallel-size=8", "tp_size", 8),
        ("--ep 4", "ep_size", 4),
        ("--expert-parallel-size 4", "ep_size", 4),
        ("--dp 2", "dp_size", 2),
        ("--data-parallel-size 2", "dp_size", 2),
        ("--pp 2", "pp_size", 2),
        ("--pipeline-parallel-size 2", "pp_size", 2),
        ("--model DIR", "model_path", "DIR"),
        ("--nccl-init-addr h:1", "dist_init_addr", "h:1"),
        ("--deepep-dispatch-output-dtype fp8", "deepep_dispatch_output_dtype", "fp8"),
        ("--deepep-dispatcher-output-dtype fp8", "deepep_dispatch_output_dtype", "fp8"),
        ("--speculative-draft-model D", "speculative_draft_model_path", "D"),
        ("--cuda-graph-bs 1 2 4", "cuda_graph_bs", (1, 2, 4)),
        ("--chunked-prefill-size -1", "chunked_prefill_size", -1),
        ("--mem-fraction-static 0.85", "mem_fraction_static", 0.85),
        ("--enable-eplb", "enable_eplb", True),
        ("--enable-eplb --no-enable-eplb", "enable_eplb", False),
        ("--enable-tp-lm-head-all-to-all", "enable_tp_lm_head_all_to_all", True),
        ("--log-requests-level 3", "log_requests_level", 3),
    ],
)
def test_command_line(line: str, field: str, value: object):
    assert getattr(parse(line), field) == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tp-sise 8", "unknown flag --tp-sise; did you mean --tp-size?"),
        ("--confg=x", "unknown flag --confg; did you mean --config?"),
        ("--qqqqqqq", "unknown flag --qqqqqqq"),
        ("stray", "unexpected argument stray"),
        ("--tp eight", "--tp-size is 'eight': give a whole number"),
        ("--mem-fraction-static big", "--mem-fraction-static is 'big': give a number"),
        (
            "--deepep-mode lowlatency",
            "--deepep-mode is 'lowlatency': choose one of auto, normal, low_latency; "
            "did you mean low_latency?",
        ),
        (
            "--speculative-algorithm UNO --deepep-mode fast --enable-lora --tp two --page-size 0",
            "--tp-size is 'two': give a whole number; "
            "--deepep-mode is 'fast': choose one of auto, normal, low_latency; "
            "--page-size is 0: give at least 1; not supported: --enable-lora (LoRA adapters are "
            "not served: merge the adapter into the checkpoint (peft's merge_and_unload) and "
            "serve that); not built yet: --speculative-algorithm UNO (nothing makes such drafts "
            "yet: give EAGLE, NEXTN, EAGLE3, STANDALONE, NGRAM)",
        ),
        (
            "--magic 3 --max-loras-per-batch 4 --wand --enforce-shared-experts-fusion",
            "unknown flag --magic; unknown flag --wand; not supported: --max-loras-per-batch (LoRA "
            "adapters are not served: merge the adapter into the checkpoint (peft's "
            "merge_and_unload) and serve that); not built yet: --enforce-shared-experts-fusion "
            "(only --enable-waterfill computes them together: leave it out)",
        ),
        (
            "--qqqqqqq --enforce-shared-experts-fusion",
            "unknown flag --qqqqqqq; not built yet: --enforce-shared-experts-fusion (only "
            "--enable-waterfill computes them together: leave it out)",
        ),
    ],
)
def test_wrong_command_line(line: str, message: str):
    with pytest.raises(ValueError) as caught:
        parse(line)
    assert str(caught.value) == message


def test_a_flag_without_its_value_is_refused():
    with pytest.raises(ValueError, match=r"--tp-size.*expected one argument.*moesaic serve --help"):
        parse("--tp")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"mem_fraction_static": 0.0},
            "--mem-fraction-static is 0.0: give more than 0 and less than 1",
        ),
        (
            {"mem_fraction_static": 1},
            "--mem-fraction-static is 1.0: give more than 0 and less than 1",
        ),
        ({"page_size": 0}, "--page-size is 0: give at least 1"),
        ({"tp_size": 0}, "--tp-size is 0: give at least 1"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size is 0: give at least 1, or -1"),
        ({"chunked_prefill_size": -2}, "--chunked-prefill-size is -2: give at least 1, or -1"),
        ({"port": 70000}, "--port is 70000: give at least 1 and at most 65535"),
        (
            {"speculative_num_draft_tokens": 5000},
            "--speculative-num-draft-tokens is 5000: give at least 1 and at most 1025",
        ),
        ({"cuda_graph_bs": [1, 0]}, "--cuda-graph-bs is 0: give at least 1"),
        (
            {"tbo_token_distribution_threshold": 0.6},
            "--tbo-token-distribution-threshold is 0.6: give at least 0 and at most 0.5",
        ),
        (
            {"eplb_min_rebalancing_utilization_threshold": 1.5},
            "--eplb-min-rebalancing-utilization-threshold is 1.5: give at least 0 and at most 1",
        ),
        ({"page_size": 1.5}, "--page-size is 1.5: give a whole number"),
        ({"page_size": True}, "--page-size is True: give a whole number"),
        ({"enable_eplb": "yes"}, "--enable-eplb is 'yes': give true or false"),
        ({"cuda_graph_bs": 4}, "--cuda-graph-bs is 4: give a list of whole numbers"),
        ({"api_key": 12}, "--api-key is 12: give a text; quote it in a YAML file"),
    ],
)
def test_value_out_of_range(kwargs: dict[str, object], message: str):
    with pytest.raises(ValueError) as caught:
        make(**kwargs)
    assert str(caught.value) == message


def test_resolve_checks_values_of_directly_built_args():
    with pytest.raises(ValueError, match="--page-size is 0: give at least 1"):
        resolve(ServerArgs(model_path="m", page_size=0))


def test_keywords():
    args = ServerArgs.from_kwargs(
        model_path=Path("some") / "dir", tp=2, cuda_graph_bs=[1, 2], mem_fraction_static=None
    )
    assert (args.model_path, args.tp_size, args.cuda_graph_bs) == ("some/dir", 2, (1, 2))
    assert ServerArgs.from_kwargs(**dataclasses.asdict(args)) == args


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tp_sise": 2}, "unknown argument 'tp_sise'; did you mean tp_size?"),
        ({"tp": 2, "tp_size": 2}, "argument 'tp_size' is given twice, once as 'tp_size': keep one"),
    ],
)
def test_wrong_keywords(kwargs: dict[str, object], message: str):
    with pytest.raises(TypeError) as caught:
        ServerArgs.from_kwargs(**kwargs)
    assert str(caught.value) == message


def test_file_beneath_command_line(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "tp: 4\nep-size: 4\npage_size: 32\nenable-eplb: true\ncuda-graph-bs: [1, 2]\n"
        "mem-fraction-static: null\n"
    )
    args = parse("--ep 2 --no-enable-eplb", file)
    assert (args.tp_size, args.ep_size, args.page_size) == (4, 2, 32)
    assert (args.enable_eplb, args.cuda_graph_bs, args.stream_interval) == (False, (1, 2), 1)


def test_empty_file_changes_nothing(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("# nothing\n")
    assert parse("", file) == ServerArgs()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("page-sise: 2", "unknown key 'page-sise'; did you mean page_size?"),
        ("tp: 2\ntp-size: 2", "'tp_size' is given twice, once as 'tp-size'"),
        ("- tp", "expected lines 'flag: value', found ['tp']"),
        ("tp: [", "is not readable: while parsing"),
        ("tp: two", "--tp-size is 'two': give a whole number"),
        ("served-model-name: 7", "--served-model-name is 7: give a text; quote it"),
    ],
)
def test_wrong_file(tmp_path: Path, content: str, message: str):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ValueError) as caught:
        parse("", file)
    assert message in str(caught.value)


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"--config .*gone.yaml is not readable: .*No such file"):
        parse("", tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nnodes 2 --node-rank 2 --tp 2", "nodes are numbered from 0 to 1"),
        (
            "--nnodes 3 --tp 4 --dist-init-addr h:1",
            "--tp-size 4 × --pp-size 1 = 4 ranks cannot be divided evenly by --nnodes 3: choose "
            "sizes whose product is a multiple of it, or --nnodes 2",
        ),
        (
            "--nnodes 2 --tp 2 --dp 2 --dist-init-addr h:1",
            "--dp-size 2 means 2 replicas of the model, which cannot span --nnodes 2: give "
            "--enable-dp-attention, or start a server on each node",
        ),
        ("--tp 64", "64 ranks on --nnodes 1: a node holds at most 62"),
        ("--tp 8 --dp 8", "64 ranks on --nnodes 1: a node holds at most 62"),
        (
            "--nnodes 2 --tp 2 --dist-init-addr h:1,g:1",
            "--dist-init-addr names 2 nodes that may lead: that takes as many --nnodes, and "
            "--elastic-ep-backend",
        ),
        (
            "--nnodes 2 --tp 2 --dist-init-addr h:1,g:1,f:1 --elastic-ep-backend mooncake",
            "--dist-init-addr names 3 nodes that may lead: that takes as many --nnodes",
        ),
        (
            "--nnodes 2 --tp 2 --dist-init-addr h:1,g --elastic-ep-backend mooncake",
            "--dist-init-addr is 'h:1,g': give HOST:PORT with a port from 1 to 65535",
        ),
        (
            "--tp 2 --nnodes 2 --node-rank 0",
            "--nnodes 2 without a rendezvous address: give all nodes --dist-init-addr NODE0:PORT",
        ),
        ("--ep 4 --tp 2", "raise --tp-size to 4 or lower --ep-size"),
        ("--tp 8 --ep 3", "--ep-size is 3: give a divisor of --tp-size 8, such as 2 or 8"),
        ("--tp 8 --dp 3 --enable-dp-attention", "--dp-size must divide --tp-size, such as 2"),
        (
            "--tp 2 --enable-dp-lm-head",
            "--enable-dp-lm-head needs --enable-dp-attention: without it there is one attention "
            "group, so leave it out or give both",
        ),
        ("--tp 8 --moe-dense-tp-size 4", "give 1 or the value of --tp-size (8)"),
        ("--tp 8 --ep 8 --moe-dp-size 2", "--moe-dp-size 2 × --ep-size 8 must divide --tp-size 8"),
        ("--tp 8 --dwdp-size 4", "--dwdp-size is 4: give 1 or the value of --tp-size (8)"),
        (
            "--disable-shared-experts-fusion --enforce-shared-experts-fusion",
            "exclude each other: keep one",
        ),
        ("--enable-waterfill", "--enable-waterfill needs several expert ranks"),
        (
            "--tp 2 --moe-a2a-backend deepep --enable-waterfill --ep-dispatch-algorithm static",
            "rows are split as by lp; leave --ep-dispatch-algorithm out, or give lp",
        ),
        (
            "--tp 2 --ep 2 --enable-waterfill --disable-shared-experts-fusion",
            "leave --disable-shared-experts-fusion out",
        ),
        (
            "--tp 4 --ep-dispatch-algorithm lp",
            "--ep-dispatch-algorithm lp needs --ep-size 2 or more: it chooses between ranks, and "
            "one has all experts",
        ),
        (
            "--tp 4 --ep 4 --ep-dispatch-algorithm static",
            "--ep-dispatch-algorithm static needs --moe-a2a-backend deepep or another one",
        ),
        ("--enable-eplb", "--enable-eplb has nothing to balance with --ep-size 1"),
        ("--dummy-router-zipf 0.7", "give it with --load-format dummy only"),
        (
            "--tp 4 --ep 2 --enable-eplb --enable-deterministic-inference",
            "copies of them have fixed places: leave out --enable-eplb",
        ),
        (
            "--eplb-rebalance-num-iterations 5 --eplb-rebalance-num-requests 5",
            "both give the rebalancing period: keep one",
        ),
        (
            "--expert-distribution-recorder-buffer-size -1",
            "recorder-buffer-size -1 needs --expert-distribution-recorder-mode stat, per_pass or",
        ),
        ("--max-ep-size 8", "--max-ep-size 8 needs --elastic-ep-backend mooncake"),
        (
            "--elastic-ep-backend mooncake --nnodes 2 --tp 2 --dist-init-addr 10.0.0.1:29500 "
            "--disaggregation-mode prefill",
            "only instances of one node so far; leave one of them out",
        ),
        (
            "--elastic-ep-backend mooncake --tp 4 --ep 4 --max-ep-size 2",
            "give at least --tp-size 4",
        ),
        (
            "--elastic-ep-backend mooncake --tp 4 --ep 4 --elastic-ep-initial-size 5",
            "give at most --tp-size 4",
        ),
        (
            "--elastic-ep-backend mooncake --tp 2 --pp 2 --max-ep-size 4",
            "--max-ep-size with --pp-size 2: each stage needs all of its ranks",
        ),
        (
            "--elastic-ep-backend mooncake --tp 2 --dp 2 --max-ep-size 4",
            "--max-ep-size with 2 replicas (--dp-size): give --enable-dp-attention, too",
        ),
        (
            "--elastic-ep-backend mooncake --tp 2 --ep 2 --max-ep-size 4",
            "all ranks compute each request; give --enable-dp-attention --dp-size 2",
        ),
        (
            "--elastic-ep-backend mooncake --tp 4 --ep 2 --dp 4 --enable-dp-attention "
            "--max-ep-size 8",
            "several ranks share each expert; give --ep-size 4",
        ),
        (
            "--elastic-ep-backend mooncake --tp 4 --ep 4 --dp 2 --enable-dp-attention "
            "--max-ep-size 7",
            "--max-ep-size is 7: attention groups have 2 ranks; give a multiple",
        ),
        (
            "--elastic-ep-backend mooncake --elastic-ep-join-mode scale",
            "needs --elastic-ep-join-rank-offset",
        ),
        (
            "--weight-cache-mode daemon",
            "--weight-cache-mode daemon needs --elastic-ep-backend mooncake: without it no rank",
        ),
        (
            "--enable-elastic-expert-backup",
            "--enable-elastic-expert-backup needs --elastic-ep-backend mooncake: without it no",
        ),
        ("--cuda-graph-bs 1 --disable-cuda-graph", "--cuda-graph-bs and --disable-cuda-graph"),
        ("--cuda-graph-bs 1 64 --cuda-graph-max-bs 32", "has 64, more than --cuda-graph-max-bs 32"),
        (
            "--disaggregation-mode decode --disaggregation-transfer-backend cuda_ipc --device cpu",
            "cuda_ipc with --device cpu: it moves caches of cuda ranks: give auto, which takes",
        ),
        (
            "--disaggregation-mode prefill --disaggregation-bootstrap-port 4000 --port 4000",
            "--disaggregation-bootstrap-port 4000 is --port: decode instances ask there",
        ),
        (
            "--disaggregation-decode-enable-radix-cache",
            "needs --disaggregation-mode decode, not null",
        ),
        (
            "--disaggregation-decode-enable-radix-cache --disaggregation-mode decode "
            "--disable-radix-cache",
            "and --disable-radix-cache exclude each other",
        ),
        ("--speculative-num-draft-tokens 4", "needs --speculative-algorithm"),
        ("--speculative-ngram-capacity 9", "--speculative-ngram-capacity 9 needs --speculative-a"),
        ("--disable-speculative-adaptive", "needs --speculative-algorithm"),
        ("--speculative-accept-threshold-acc 0.5", "0.5 needs --speculative-algorithm"),
        (
            "--speculative-algorithm NGRAM --speculative-accept-threshold-single 0.9 "
            "--enable-deterministic-inference",
            "single 0.9 with --enable-deterministic-inference: answers would depend on the drafts",
        ),
        ("--speculative-algorithm NEXTN --speculative-eagle-topk 4", "4 needs --speculative-num-s"),
        (
            "--speculative-algorithm NGRAM --speculative-eagle-topk 4",
            "NGRAM are those of --speculative-ngram-max-bfs-breadth 4: give that",
        ),
        (
            "--speculative-algorithm NEXTN --speculative-eagle-topk 2 --speculative-num-steps 2 "
            "--speculative-num-draft-tokens 8",
            "only 6 drafts are found, and the newest token makes them 7: give at most that",
        ),
        (
            "--speculative-algorithm NEXTN --speculative-eagle-topk 4 --speculative-num-steps 2 "
            "--speculative-num-draft-tokens 4",
            "more branches than drafts: give a topk of at most 3",
        ),
        (
            "--speculative-algorithm NEXTN --speculative-eagle-topk 8 --speculative-num-steps 5 "
            "--speculative-num-draft-tokens 60",
            "behind them, are 93, and at most 64 may be in a tree",
        ),
        (
            "--speculative-algorithm NGRAM --speculative-ngram-min-bfs-breadth 4 "
            "--speculative-ngram-max-bfs-breadth 2",
            "give at most 2",
        ),
        (
            "--speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 2 "
            "--speculative-num-draft-tokens 70",
            "a tree has at most 64 tokens: give that, or 1 of the other",
        ),
        ("--speculative-ngram-max-bfs-breadth 2", "2 needs --speculative-algorithm"),
        (
            "--speculative-algorithm NGRAM --speculative-draft-model D",
            "has no draft model: leave it",
        ),
        ("--speculative-algorithm EAGLE3", "needs --speculative-draft-model-path DIR"),
        ("--speculative-token-map F", "needs --speculative-algorithm"),
        (
            "--speculative-algorithm EAGLE3 --speculative-draft-model D --speculative-token-map F",
            "has a map of its own, in the head's d2t: leave it out",
        ),
        ("--speculative-algorithm NEXTN --speculative-num-draft-tokens 1", "give at least 2"),
        (
            "--speculative-algorithm EAGLE --speculative-num-steps 3 "
            "--speculative-num-draft-tokens 5",
            "a chain of 3 drafts and the newest token are 4: give that",
        ),
        ("--speculative-algorithm NEXTN --pp-size 2", "give --pp-size 1"),
        ("--speculative-algorithm STANDALONE", "needs --speculative-draft-model-path DIR"),
        ("--skip-tokenizer-init --chat-template t", "--chat-template t needs a tokenizer"),
        ("--skip-tokenizer-init --tokenizer-path t", "--tokenizer-path t needs a tokenizer"),
        (
            "--enable-mixed-chunk --disable-mixed-chunk",
            "--enable-mixed-chunk and --disable-mixed-chunk contradict each other: give one",
        ),
    ],
)
def test_contradictions(line: str, message: str):
    args = parse("--model-path m " + line)
    found = next(contradictions(args))
    assert message in found
    with pytest.raises(ValueError) as caught:
        resolve(args)
    missing = unbuilt(args)
    assert str(caught.value) == ("not built yet: " + "; ".join(missing) if missing else found)


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("--tp 1 --max-ep-size 8", (8, 8, 8, 1)),
        ("--tp 4 --ep 4 --dp 2 --enable-dp-attention --max-ep-size 6", (6, 6, 3, 4)),
        ("--tp 4 --ep 4 --dp 4 --enable-dp-attention --max-ep-size 4", (4, 4, 4, None)),
        ("--tp 6 --ep 6 --dp 3 --enable-dp-attention --elastic-ep-initial-size 2", (6, 6, 3, 2)),
    ],
)
def test_a_service_is_laid_out_for_its_most_ranks(line: str, sizes: tuple[int, ...]) -> None:
    args = resolve(parse(f"--model-path m --device cpu --elastic-ep-backend mooncake {line}"))
    assert (args.tp_size, args.ep_size, args.dp_size, args.elastic_ep_initial_size) == sizes
    assert args.enable_dp_attention and args.enable_dp_lm_head and args.moe_dense_tp_size == 1
    assert resolve(args) == args


KNOWN = {
    "--moe-a2a-backend": "none, deepep, mooncake, mori, flashinfer, ascend_fuseep",
    "--moe-runner-backend": "auto, triton, triton_kernel, deep_gemm, cutlass, flashinfer_trtllm, "
    "flashinfer_cutlass, flashinfer_mxfp4, flashinfer_cutedsl",
}


@pytest.mark.parametrize(
    ("flag", "name", "hint"),
    [
        ("--moe-a2a-backend", "ring", ""),
        ("--moe-a2a-backend", "deepeep", "; did you mean deepep?"),
        ("--moe-a2a-backend", "auto", ""),
        ("--moe-runner-backend", "deepgemm", "; did you mean deep_gemm?"),
        ("--moe-runner-backend", "none", ""),
    ],
)
def test_backend_that_nobody_can_bring_is_refused(
    flag: str, name: str, hint: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(import_module("moesaic.config.resolve"), "entry_points", lambda group: ())
    with pytest.raises(ValueError) as caught:
        resolve(parse(f"--model-path m {flag} {name}"))
    assert str(caught.value) == (
        f"{flag} is {name!r}: choose one of {KNOWN[flag]}, or name the module that registers it "
        f"with --moe-backend-module{hint}"
    )


def test_backend_of_an_installed_package_is_left_to_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{BACKEND_ENTRY_POINTS}]\nothers = others\n")
    monkeypatch.syspath_prepend(tmp_path)
    args = resolve(parse("--model-path m --moe-a2a-backend ring --moe-runner-backend loop"))
    assert (args.moe_a2a_backend, args.moe_runner_backend) == ("ring", "loop")


def test_entry_points_are_those_that_are_imported():
    assert BACKEND_ENTRY_POINTS == ENTRY_POINTS


def test_missing_model_is_named():
    with pytest.raises(ValueError, match="--model-path is missing: name a model folder"):
        resolve(ServerArgs())


ACCEPTED = (
    "--tokenizer-path t --load-format dummy --context-length 64 --dtype float32 --device cpu",
    "--skip-tokenizer-init --load-format safetensors --trust-remote-code --chunked-prefill-size -1",
    "--mem-fraction-static 0.5 --max-running-requests 8 --max-queued-requests 9",
    "--max-total-tokens 4096 --page-size 1 --schedule-policy fcfs --schedule-conservativeness 0.3",
    "--disable-radix-cache --stream-interval 5 --random-seed 7 --log-level debug --num-threads 2",
    "--attention-backend torch_native --sampling-backend pytorch --moe-runner-backend auto",
    "--moe-a2a-backend none --deepep-mode auto --tp 1 --ep 1 --dp 1 --pp 1 --nnodes 1",
    "--moe-a2a-backend deepep --deepep-mode low_latency --moe-runner-backend deep_gemm",
    "--moe-a2a-backend none --deepep-mode normal --deepep-dispatch-output-dtype mxfp4",
    "--moe-backend-module m --moe-a2a-backend ring --moe-runner-backend loop",
    "--disable-cuda-graph --disable-overlap-schedule --chat-template c.jinja",
    "--tp 8 --ep 4 --dp 4 --enable-dp-attention --enable-dp-lm-head --moe-dense-tp-size 1",
    "--tp 3 --pp 5 --dp 2 --moe-dense-tp-size 3 --dist-timeout 0.5",
    "--tp 62 --enable-deterministic-inference --ep-num-redundant-experts 31",
    "--tp 4 --ep 4 --ep-num-redundant-experts 3 --ep-dispatch-algorithm lp",
    "--tp 4 --ep 4 --dp 2 --enable-dp-attention --ep-dispatch-algorithm static",
    "--tp 4 --moe-a2a-backend mori --ep-dispatch-algorithm static",
    "--ep-dispatch-algorithm dynamic",
    "--tp 8 --pp 2 --nnodes 4 --node-rank 3 --dist-init-addr [::1]:29500 --moe-a2a-backend deepep",
    "--tp 2 --dp 1 --enable-dp-attention --enable-dp-lm-head --load-balance-method total_tokens",
    "--tp 128 --nnodes 4 --dist-init-addr 10.0.0.1:65535 --load-balance-method total_requests",
)


@pytest.mark.parametrize("line", ACCEPTED)
def test_what_is_built_is_accepted(line: str):
    args = resolve(parse("--model-path m " + line))
    assert resolve(args) == args


def test_every_flag_that_is_not_built_is_refused_by_name():
    other = {bool: True, int: 2, float: 0.25, str: "x"}
    refused = 0
    for spec in specs(ServerArgs).values():
        candidates = spec.flag.choices or (other[spec.kind],)
        for value in (v for v in candidates if not spec.accepts(v)):
            args = dataclasses.replace(
                ServerArgs(model_path="m"), **{spec.field: (value,) if spec.many else value}
            )
            with pytest.raises(ValueError) as caught:
                resolve(args)
            assert spec.name in str(caught.value)
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--device npu",
            "not built yet: --device npu (there are no kernels for this device: give auto, cpu, "
            "cuda)",
        ),
        (
            "--load-balance-method follow_bootstrap_room",
            "not built yet: --load-balance-method follow_bootstrap_room (a decode instance finds a "
            "request by its room, whichever group has it: give auto, round_robin, total_requests, "
            "total_tokens)",
        ),
        (
            "--disaggregation-mode prefill --disaggregation-transfer-backend fake",
            "not built yet: --disaggregation-transfer-backend fake (it transfers no KV cache: give "
            "auto, shm, cuda_ipc, tcp, nixl)",
        ),
        (
            "--tp 2 --moe-dp-size 2",
            "not built yet: --moe-dp-size 2 (all ranks share the experts: only the default, 1, is "
            "built)",
        ),
        (
            "--quantization modelslim",
            "not built yet: --quantization modelslim (there are no kernels for this format: give "
            "fp8, w8a8_fp8, w8a8_int8, mxfp4, modelopt_fp8, modelopt_fp4, awq, gptq, "
            "compressed-tensors)",
        ),
        (
            "--attention-backend nsa --schedule-policy priority",
            "not built yet: --schedule-policy priority (requests start in the order in which they "
            "come: give fcfs); --attention-backend nsa (attention has kernels of its own, which "
            "the device decides: give auto)",
        ),
        (
            "--disable-radix-cache --kv-cache-dtype fp8_e5m2 --enforce-shared-experts-fusion",
            "not built yet: --kv-cache-dtype fp8_e5m2 (attention does not read this type: give "
            "auto, bfloat16, bf16, fp8_e4m3); --enforce-shared-experts-fusion (only "
            "--enable-waterfill computes them together: leave it out)",
        ),
        (
            "--fuseep-mode 3",
            "not built yet: --fuseep-mode 3 (ascend_fuseep has one variant here: only the default, "
            "2, is built)",
        ),
    ],
)
def test_refusal_says_what_works(line: str, message: str):
    with pytest.raises(ValueError) as caught:
        resolve(parse("--model-path m " + line))
    assert str(caught.value) == message


def test_resolve_fills_in_what_was_left_open():
    args = resolve(make())
    assert (args.tokenizer_path, args.device) == ("m", "cpu")
    assert (args.attention_backend, args.sampling_backend) == ("torch_native", "pytorch")
    draft = resolve(make(device="cpu", speculative_draft_attention_backend="fa3"))
    assert draft.speculative_draft_attention_backend == "torch_native"
    assert (args.dtype, args.chunked_prefill_size) == ("auto", 2048)
    assert (args.load_balance_method, args.dist_timeout) == ("auto", 300.0)
    assert args.max_step_ms == 0
    assert specs(ServerArgs)["dist_timeout"].flag.help.endswith(f"unset: {args.dist_timeout:g}.")
    assert (args.ep_size, args.dist_init_addr) == (1, None)


@pytest.fixture(autouse=True)
def no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables that name a master node from the environment."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("line", "field", "value", "told"),
    [
        ("--tp 8 --moe-a2a-backend deepep", "ep_size", 8, "--ep-size is 8: with --moe-a2a-backend"),
        ("--tp 8 --ep 4 --moe-a2a-backend deepep", "ep_size", 4, ""),
        ("--tp 8", "ep_size", 1, ""),
        ("--tp 2 --enable-dp-attention", "enable_dp_attention", False, "there is one attention"),
        (
            "--tp 2 --enable-dp-attention --enable-dp-lm-head",
            "enable_dp_lm_head",
            False,
            "--enable-dp-lm-head is False: with --dp-size 1",
        ),
        ("--tp 2 --dp 2 --enable-dp-attention", "enable_dp_attention", True, ""),
        ("--dist-timeout 5", "dist_timeout", 5.0, ""),
    ],
)
def test_what_flags_imply_is_filled_in_and_told(
    line: str, field: str, value: object, told: str, caplog: pytest.LogCaptureFixture
):
    asked = parse("--model-path m " + line)
    changes = {change.field: change.value for change in flag_changes(asked)}
    with caplog.at_level(logging.INFO):
        args = resolve(asked)
    assert getattr(args, field) == value
    assert changes.get(field, value) == value
    assert (told in caplog.text) if told else caplog.text == ""
    assert flag_changes(args) == []
    caplog.clear()
    assert resolve(args) == args
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("10.0.0.1", "29500", "10.0.0.1:29500"),
        ("fd00::1", "29500", "[fd00::1]:29500"),
        ("node0", "1", "node0:1"),
    ],
)
def test_nodes_meet_where_the_environment_says(
    host: str, port: str, address: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", port)
    line = "--model-path m --tp 8 --ep 8 --pp-size 4 --nnodes 4 --node-rank 0"
    assert resolve(parse(line)).dist_init_addr == address
    assert resolve(parse(f"{line} --dist-init-addr other:2")).dist_init_addr == "other:2"
    assert resolve(parse("--model-path m --tp 8")).dist_init_addr is None


@pytest.mark.parametrize(
    "address", ["h", "h:", ":1", "h:0", "h:65536", "h:x", "h:-1", "::1:5", "[]:5", "a b:5", "h:²"]
)
def test_an_address_that_is_none(address: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError) as caught:
        resolve(make(dist_init_addr=address))
    assert f"--dist-init-addr is {address!r}: give HOST:PORT" in str(caught.value)
    monkeypatch.setenv("MASTER_ADDR", "h")
    monkeypatch.setenv("MASTER_PORT", "x")
    with pytest.raises(ValueError, match="MASTER_ADDR:MASTER_PORT is 'h:x': give HOST:PORT"):
        resolve(make(tp_size=2, nnodes=2))


def test_all_problems_are_found():
    found = list(problems(parse("--model-path m --tp 8 --ep 3 --nnodes 3 --device npu")))
    assert [text.split(" ")[0] for text in found] == ["not", "--ep-size", "--tp-size", "--nnodes"]
    assert list(problems(make())) == []


@pytest.mark.parametrize(("dtype", "name"), [("half", "float16"), ("float", "float32")])
def test_dtype_names(dtype: str, name: str):
    assert resolve(make(dtype=dtype)).dtype == name


def test_without_tokenizer_there_is_no_tokenizer_path():
    assert resolve(make(skip_tokenizer_init=True)).tokenizer_path is None


def test_fake_routing_is_a_loud_warning(caplog: pytest.LogCaptureFixture):
    resolve(parse("--model-path m --ep-dispatch-algorithm fake"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ALL ANSWERS ARE WRONG" in caplog.text


@pytest.mark.parametrize(
    ("line", "idle"),
    [
        ("--eplb-max-bytes-per-step 4096", "--eplb-max-bytes-per-step 4096"),
        (
            "--eplb-algorithm deepseek --eplb-rebalance-num-iterations 7",
            "--eplb-algorithm deepseek, --eplb-rebalance-num-iterations 7",
        ),
        ("--eplb-algorithm deepseek --init-expert-location counts.pt", ""),
        (
            "--eplb-rebalance-num-iterations 7 --expert-distribution-recorder-mode stat",
            "",
        ),
        ("--enable-eplb --eplb-algorithm deepseek", ""),
        ("--eplb-rebalance-num-iterations 1000", ""),
    ],
)
def test_flags_of_balancing_that_do_nothing_are_told(
    line: str, idle: str, caplog: pytest.LogCaptureFixture
):
    resolve(parse(f"--model-path m --tp 2 --ep 2 {line}"))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    told = f"{idle}: nothing moves experts without --enable-eplb: give it, too"
    assert warned == ([told] if idle else [])


def test_trust_remote_code_is_answered_in_the_log(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        resolve(resolve(make(trust_remote_code=True)))
    assert caplog.text.count("code from a checkpoint is never run") == 1


@pytest.mark.parametrize(
    ("kwargs", "ranks"),
    [
        ({"tp_size": 8}, 1),
        ({"tp_size": 8, "moe_a2a_backend": "deepep"}, 8),
        ({"tp_size": 8, "ep_size": 4, "moe_a2a_backend": "deepep"}, 4),
    ],
)
def test_expert_ranks(kwargs: dict[str, object], ranks: int):
    assert expert_ranks(make(**kwargs)) == ranks


@pytest.mark.parametrize(
    ("number", "most", "divisor"), [(8, 3, 2), (12, 5, 4), (7, 6, 1), (4, 9, 4)]
)
def test_largest_divisor(number: int, most: int, divisor: int):
    assert largest_divisor(number, most) == divisor


def test_declarations_are_consistent():
    names = [name for spec in specs(ServerArgs).values() for name in spec.names]
    assert len(names) == len(set(names))
    for spec in specs(ServerArgs).values():
        choices = spec.flag.choices
        assert spec.flag.help.endswith("."), spec.name
        assert "|" not in spec.flag.help, spec.name
        assert not choices or spec.default is None or spec.default in choices, spec.name
        if isinstance(spec.flag.built, tuple):
            assert spec.default is None or spec.default in spec.flag.built, spec.name
            assert set(spec.flag.built) <= set(choices), spec.name


def test_flag_page_is_up_to_date():
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == markdown(), "run `make docs`"


def test_config_does_not_import_torch():
    code = "import sys, moesaic, moesaic.config.resolve; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, int], None]:
    """Fakes the CUDA version of torch and the number of GPUs."""

    def have(version: str | None, count: int) -> None:
        monkeypatch.delenv(devices.DEVICE_VARIABLE, raising=False)
        monkeypatch.delenv(devices.VISIBLE, raising=False)
        monkeypatch.setattr(devices, "_torch_cuda", lambda: version)
        monkeypatch.setattr(devices, "_num_gpus", lambda: count)

    return have


def test_elastic_ranks_on_gpus(gpus: Callable[[str | None, int], None]):
    sharded = {"elastic_ep_backend": "mooncake", "device": "cuda", "tp_size": 4}
    whole = {**sharded, "dp_size": 4, "enable_dp_attention": True}
    gpus("13.0", 1)
    for flags in (sharded, whole):
        assert resolve(make(**flags)).device == "cuda"
    gpus("13.0", 4)
    assert resolve(make(**whole)).device == "cuda"
    with pytest.raises(ValueError, match="give --enable-dp-attention --dp-size 4"):
        resolve(make(**sharded))


def test_the_device_is_chosen_by_what_there_is(
    gpus: Callable[[str | None, int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    for version, count, kind, why in (
        ("13.0", 1, "cuda", "there is a GPU"),
        ("13.0", 0, "cpu", "there is no NVIDIA GPU, or no driver for it"),
        (None, 2, "cpu", "torch is built without CUDA"),
    ):
        gpus(version, count)
        with caplog.at_level(logging.INFO):
            args = resolve(make())
        assert args.device == kind and f"--device is {kind}: {why}" in caplog.text
        assert resolve(args) == args
    gpus("13.0", 1)
    monkeypatch.setenv(devices.DEVICE_VARIABLE, "cpu")
    assert resolve(make()).device == "cpu"
    monkeypatch.setenv(devices.DEVICE_VARIABLE, "tpu")
    with pytest.raises(ValueError, match="MOESAIC_DEVICE is 'tpu': give auto, cpu, cuda"):
        resolve(make())
    monkeypatch.setenv(devices.DEVICE_VARIABLE, "auto")
    monkeypatch.setenv(devices.VISIBLE, "")
    assert devices.cuda_missing() == "CUDA_VISIBLE_DEVICES is '' and hides every GPU"


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        *(("", 0), ("-1", 0), ("banana", 0), ("4", 0), ("0", 1), (" 3 , 1", 2), ("0,1,2,3,4", 4)),
        *(("2,-1,3", 1), ("1,9,0", 1), ("0,1,0", 0), ("GPU-8a,MIG-3b,0", 3), ("GPU-8a,GPU-8a", 0)),
    ],
)
def test_gpus_that_may_be_used(
    visible: str,
    count: int,
    gpus: Callable[[str | None, int], None],
    monkeypatch: pytest.MonkeyPatch,
):
    """CUDA counts the listed devices up to the first one that does not exist."""
    gpus("13.0", 4)
    monkeypatch.setenv(devices.VISIBLE, visible)
    assert devices.num_gpus() == count
    hidden = f"CUDA_VISIBLE_DEVICES is {visible!r} and hides every GPU"
    assert devices.cuda_missing() == ("" if count else hidden)


def test_a_chat_template_of_a_shape():
    complaint = "--chat-template x needs a tokenizer, and shape:m has none: give --tokenizer-path"
    given = {"model_path": "shape:m", "load_format": "dummy", "chat_template": "x"}
    for more in ({}, {"skip_tokenizer_init": True}):
        with pytest.raises(ValueError, match=complaint):
            resolve(make(**given, **more))
    assert resolve(make(**given, tokenizer_path="DIR")).skip_tokenizer_init is False


def test_the_variable_is_named_where_it_chose_cuda(
    gpus: Callable[[str | None, int], None], monkeypatch: pytest.MonkeyPatch
):
    gpus("13.0", 0)
    monkeypatch.setenv(devices.DEVICE_VARIABLE, "cuda")
    with pytest.raises(ValueError, match=r"^MOESAIC_DEVICE=cuda cannot work here: .*--device cpu$"):
        resolve(make())
    with pytest.raises(ValueError, match=r"^--device cuda cannot work here"):
        resolve(make(device="cuda"))
    monkeypatch.setattr(devices, "_num_gpus", lambda: 1)
    with pytest.raises(ValueError, match=r"^MOESAIC_DEVICE=cuda cannot do this: --dp-size 2 means"):
        resolve(make(dp_size=2))


def test_nodes_and_stages_on_gpus(gpus: Callable[[str | None, int], None]):
    """Ranks are counted on each node."""
    gpus("13.0", 2)
    stages, nodes = make(pp_size=2), make(tp_size=4, nnodes=2, dist_init_addr="h:1")
    for args in (stages, nodes):
        assert resolve(args).device == "cuda" and devices.gpus_of(args) == (0, 1)
    shared = make(tp_size=4, pp_size=2, nnodes=2, dist_init_addr="h:1", device="cuda")
    assert devices.gpus_of(resolve(shared)) == (0, 0, 1, 1)
    unasked = make(tp_size=4, pp_size=2, nnodes=2, dist_init_addr="h:1")
    assert resolve(unasked).device == "cpu"


GROUPS = {"tp_size": 4, "dp_size": 4, "ep_size": 4, "enable_dp_attention": True}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"dp_size": 2},
            "--dp-size 2 means 2 replicas of the model, which cannot share a GPU: nothing "
            "divides its memory between them (attention groups of one replica can share: "
            "--tp-size 2 --enable-dp-attention)",
        ),
        (
            {"dp_size": 2, "tp_size": 4},
            "--dp-size 2 means 2 replicas of the model, which cannot share a GPU: nothing "
            "divides its memory between them (attention groups of one replica can share: "
            "--enable-dp-attention)",
        ),
        ({"tp_size": 4, "base_gpu_id": 1}, "--base-gpu-id 1: there is 1 GPU, numbered from 0"),
    ],
)
def test_ranks_that_cuda_cannot_do(
    given: dict[str, Any], complaint: str, gpus: Callable[[str | None, int], None]
):
    gpus("13.0", 1)
    with pytest.raises(ValueError) as caught:
        resolve(make(device="cuda", **given))
    assert str(caught.value) == (
        f"--device cuda cannot do this: {complaint}; leave it out or give --device cpu"
    )


def test_ranks_share_a_gpu_only_if_asked_to(
    gpus: Callable[[str | None, int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    gpus("13.0", 2)
    with caplog.at_level(logging.INFO):
        assert resolve(make(**GROUPS)).device == "cpu"
    assert "4 ranks would have to share 2 GPUs: --device cuda does so" in caplog.text
    shared = resolve(make(device="cuda", **GROUPS))
    assert devices.gpus_of(shared) == (0, 0, 1, 1)
    # Each group holds all weights except the experts.
    assert (shared.moe_dense_tp_size, shared.enable_dp_lm_head) == (1, True)
    assert resolve(shared) == shared
    gpus("13.0", 5)
    with caplog.at_level(logging.INFO):
        each = resolve(make(**GROUPS, base_gpu_id=1))
    assert (each.device, devices.gpus_of(each)) == ("cuda", (1, 2, 3, 4))
    assert "--device is cuda: there is a GPU for each rank" in caplog.text
    assert resolve(make(**GROUPS, base_gpu_id=2)).device == "cpu"
    tensors = resolve(make(tp_size=2))
    assert (tensors.device, tensors.moe_dense_tp_size) == ("cuda", None)
    rows = resolve(make(tp_size=4, moe_a2a_backend="deepep", moe_dense_tp_size=4))
    assert (rows.device, rows.ep_size, rows.moe_dense_tp_size) == ("cuda", 4, 4)
    pairs = resolve(make(**{**GROUPS, "dp_size": 2}))
    assert (pairs.device, pairs.moe_dense_tp_size, pairs.enable_dp_lm_head) == ("cuda", 1, True)
    for groups in (2, 4):  # which share dense layers if asked to, but never logits
        cut = resolve(make(**{**GROUPS, "dp_size": groups}, moe_dense_tp_size=4))
        assert (cut.device, cut.moe_dense_tp_size, cut.enable_dp_lm_head) == ("cuda", 4, True)
        assert resolve(cut) == cut
    monkeypatch.setenv(devices.VISIBLE, "3,1")
    assert devices.num_gpus() == 2
    with pytest.raises(ValueError, match="--base-gpu-id 2: there are 2 GPUs, numbered from 0; "):
        resolve(make(device="cuda", base_gpu_id=2))
    assert devices.device_reason(make(tp_size=2, base_gpu_id=4)) == (
        "--base-gpu-id 4: there are 2 GPUs, numbered from 0"
    )
    assert devices.device_reason(make(tp_size=2, base_gpu_id=1)) == (
        "2 ranks would have to share 1 GPU: --device cuda does so"
    )


def test_more_ranks_on_a_gpu_than_were_tried(
    gpus: Callable[[str | None, int], None], caplog: pytest.LogCaptureFixture
):
    gpus("13.0", 1)
    for ranks, told in ((8, []), (9, ["9 ranks share a GPU, and more than 8 are untested"])):
        caplog.clear()
        resolve(make(device="cuda", tp_size=ranks, ep_size=ranks))
        warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
        assert [message.partition(":")[0] for message in warnings] == told


def test_what_cuda_cannot_do_is_refused(gpus: Callable[[str | None, int], None]):
    gpus("13.0", 0)
    with pytest.raises(ValueError, match="--device cuda cannot work here: there is no NVIDIA GPU"):
        resolve(make(device="cuda"))
    gpus("13.0", 1)
    assert resolve(make(attention_backend="torch_native")).attention_backend == "triton"
    # Without --device, the device that supports the other flags is chosen.
    assert resolve(make(pp_size=2)).device == "cpu"
    assert resolve(make(enable_deterministic_inference=True)).device == "cuda"
    args = resolve(make(kv_cache_dtype="fp8_e4m3", cuda_graph_max_bs=64))
    assert (args.attention_backend, args.sampling_backend) == ("triton", "triton")
    assert args.cuda_graph_max_bs == 64
    with pytest.raises(ValueError, match="fp8_e4m3 needs --device cuda"):
        resolve(make(device="cpu", kv_cache_dtype="fp8_e4m3"))


def test_the_machine_at_hand_has_what_torch_says():
    import torch

    assert (devices.cuda_missing() == "") == torch.cuda.is_available()
    assert devices._torch_cuda() == torch.version.cuda


def test_a_shape_needs_dummy_weights_and_has_no_tokenizer():
    with pytest.raises(ValueError, match="shape:x has no weights: give --load-format dummy"):
        resolve(make(model_path="shape:x"))
    args = resolve(make(model_path="shape:x", load_format="dummy"))
    assert args.skip_tokenizer_init and args.tokenizer_path is None
    args = resolve(make(model_path="shape:x", load_format="dummy", tokenizer_path="t"))
    assert not args.skip_tokenizer_init and args.tokenizer_path == "t"


def test_graph_sizes_mean_nothing_on_cpu(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        args = resolve(make(cuda_graph_bs=(1, 2)))
    assert args.cuda_graph_bs is None
    assert "--cuda-graph-bs is None: there are no CUDA graphs on cpu" in caplog.text


@pytest.mark.parametrize(
    ("line", "steps", "tokens"),
    [
        ("NEXTN", 3, 4),
        ("EAGLE --speculative-num-steps 1", 1, 2),
        ("EAGLE --speculative-num-draft-tokens 6", 5, 6),
        ("EAGLE --speculative-num-steps 2 --speculative-num-draft-tokens 3", 2, 3),
    ],
)
def test_unset_speculative_flags_follow_from_the_others(line: str, steps: int, tokens: int):
    args = resolve(parse(f"--model-path m --device cpu --speculative-algorithm {line}"))
    found = speculation_of(args)
    assert found == Speculation(line.split()[0], steps, tokens)
    assert found.num_drafts == steps and resolve(args) == args
    assert args.speculative_eagle_topk == 1


@pytest.mark.parametrize(
    ("line", "breadth"),
    [("", 1), ("--speculative-ngram-min-bfs-breadth 2", 10)],
)
def test_trees_on_a_gpu_are_asked_for(line: str, breadth: int):
    args = parse(f"--model-path m --device cuda --speculative-algorithm NGRAM {line}")
    found = {name: value for name, value, _ in speculation_defaults(args)}
    assert found["speculative_ngram_max_bfs_breadth"] == breadth


def decode_by(transport: str) -> ServerArgs:
    return ServerArgs(
        model_path="m",
        device="cpu",
        disaggregation_mode="decode",
        disaggregation_transfer_backend=transport,
    )


@pytest.mark.parametrize(
    ("asked", "meant"), [("mooncake", "auto"), ("mori", "auto"), ("mooncake_tcp", "tcp")]
)
def test_transfer_backends_by_other_names(
    asked: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    args = decode_by(asked)
    assert resolve(args).disaggregation_transfer_backend == meant
    assert f"it does what {asked} asks for" in caplog.text


def test_nixl_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    args, module = decode_by("nixl"), import_module("moesaic.config.roles")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'moesaic\[nixl\]'"):
        resolve(args)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    assert resolve(args).disaggregation_transfer_backend == "nixl"


@pytest.mark.parametrize(
    ("line", "topk", "trees"),
    [
        ("NGRAM", 1, True),
        ("NGRAM --speculative-ngram-max-bfs-breadth 1", 1, False),
        ("NGRAM --speculative-num-draft-tokens 64", 1, True),
        ("NGRAM --speculative-num-draft-tokens 65", 1, False),
        (
            "NEXTN --speculative-eagle-topk 8 --speculative-num-steps 3 "
            "--speculative-num-draft-tokens 32",
            8,
            True,
        ),
    ],
)
def test_which_drafts_are_trees(line: str, topk: int, trees: bool):
    args = resolve(parse(f"--model-path m --device cpu --speculative-algorithm {line}"))
    found = speculation_of(args)
    assert found is not None and (found.topk, found.asks_for_trees) == (topk, trees)
    assert found.num_draft_tokens == args.speculative_num_draft_tokens and resolve(args) == args
