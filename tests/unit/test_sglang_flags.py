"""Every flag of SGLang 0.5.23 is ours, accepted with a line in the log, or refused with a reason:
on the command line, in a file and as a keyword. The list in sglang_flags.tsv is SGLang's own."""

import gc
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml

from moesaic.cli.main import main
from moesaic.config.args import ServerArgs
from moesaic.config.flags import ALL, has_key, read_size, specs, unbuilt
from moesaic.config.parser import FlagParser, merge, read_config, sglang_values
from moesaic.config.resolve import problems, resolve
from moesaic.config.sglang import notes, sglang_flags
from moesaic.engine.engine import Engine
from moesaic.engine.worker import worker


class TheirFlag(NamedTuple):
    names: list[str]
    field: str
    default: Any
    words: list[str]


def _their_flags() -> list[TheirFlag]:
    lines = (Path(__file__).parent / "sglang_flags.tsv").read_text().splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    return [
        TheirFlag(names.split(), field, json.loads(default), words.split())
        for names, field, default, words in rows
    ]


THEIRS = _their_flags()


class Outcome(NamedTuple):
    args: ServerArgs
    log: list[str]


@cache
def parser() -> FlagParser:
    made = FlagParser("moesaic serve", "", "")
    made.add_flags(ServerArgs)
    return made


def parse(words: list[str], file: Path | None = None) -> Outcome:
    given, read = parser().parse(words), read_config(ServerArgs, file)
    values = sglang_values(ServerArgs, given, read)
    return Outcome(merge(ServerArgs, given, read), list(notes(values)))


def refusal(words: list[str]) -> str:
    with pytest.raises(ValueError) as caught:
        parse(words)
    return str(caught.value)


def test_the_list_is_whole():
    names = [name for flag in THEIRS for name in flag.names]
    assert (len(THEIRS), len(names), len(set(names))) == (530, 546, 546)


@pytest.mark.parametrize("alias", range(2))
def test_every_flag_on_the_command_line(alias: int):
    ours = accepted = refused = 0
    for their in THEIRS:
        if alias >= len(their.names):
            continue
        name, key = their.names[alias], their.names[0].removeprefix("--").replace("-", "_")
        line = [name, *their.words]
        if has_key(ServerArgs, key):
            ours += 1
            try:
                parse(line)
            except ValueError as error:  # the value is not among ours
                assert " is " in str(error) and "unknown" not in str(error), line
        elif sglang_flags()[key].accepted:
            accepted += 1
            assert parse(line).log == [f"{their.names[0]}: {sglang_flags()[key].why}"]
        elif their.default is True or their.words == [str(their.default)]:
            assert parse(line).log == []
        else:
            refused += 1
            found = refusal(line)
            assert found == f"not supported: {their.names[0]} ({sglang_flags()[key].why})"
    assert ours and accepted and refused
    assert ours + accepted + refused == [528, 15][alias]


def _their_choices() -> list[tuple[str, str]]:
    lines = (Path(__file__).parent / "sglang_choices.tsv").read_text().splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    return [(field, choice) for field, choices in rows for choice in choices.split()]


def test_every_choice_works_or_is_refused_with_a_reason():
    works = refused = 0
    for field, choice in _their_choices():
        spec = specs(ServerArgs)[field]
        try:
            args = parse(["--model-path", "m", spec.name, choice]).args
            found = "; ".join(problems(args))
        except ValueError as error:
            found = str(error)
        if not found or re.search("needs --|works on|cannot work here", found):
            works += 1  # elsewhere, or with another flag
            continue
        refused += 1
        assert "choose one of" not in found, (field, choice)
        told = re.match(
            r"not built yet: \S+( \S+)? \((.+): (leave|give|only) |\S+ is \S+: (.+)", found
        )
        assert told is not None, found
        assert len((told[2] or told[4]).split()) > 3, found
    assert (works, refused) == (152, 172)


@pytest.mark.parametrize(
    ("flag", "given", "meant"),
    [
        ("grammar-backend", "xgrammar", "llguidance"),
        ("grammar-backend", "outlines", "llguidance"),
        ("load-balance-method", "minimum_tokens", "total_tokens"),
        ("load-balance-method", "shortest_queue", "total_requests"),
        ("quantization", "awq_marlin", "awq"),
    ],
)
def test_other_names_of_a_choice(
    flag: str, given: str, meant: str, caplog: pytest.LogCaptureFixture
):
    args = parse(["--model-path", "m", "--device", "cpu", f"--{flag}", given]).args
    with caplog.at_level(logging.INFO, "moesaic"):
        assert getattr(resolve(args), flag.replace("-", "_")) == meant
    assert f"--{flag} is {meant}: it does what {given} asks for" in caplog.messages


@pytest.mark.parametrize(
    "flag",
    ["disable-shared-experts-fusion", "enable-expert-distribution-metrics"],
)
def test_switches_for_what_is_so_anyway(flag: str):
    assert list(problems(parse(["--model-path", "m", f"--{flag}"]).args)) == []


def test_every_flag_that_is_not_wholly_built_has_a_reason():
    unbuilt = [spec for spec in specs(ServerArgs).values() if spec.flag.built is not ALL]
    assert len(unbuilt) > 30
    assert [spec.name for spec in unbuilt if not spec.flag.why] == []


def test_earlier_flags_are_known():
    words = (
        "--torchao-config int4wo --multi-item-scoring-delimiter 5 --ngram-max-bfs-breadth 4 "
        "--prefill-round-robin-balance --enable-nsa-prefill-context-parallel --kt-amx-weight-path d"
    ).split()
    found = refusal(words)
    assert found.startswith("not supported: ")
    names = [word for word in words if word.startswith("--")]
    assert [found.count(name) for name in names] == [1] * 6
    assert [line.split(": ")[0] for line in parse(["--hybrid-kvcache-ratio", "0.5"]).log] == [
        "--hybrid-kvcache-ratio"
    ]


def test_refusals_say_what_to_do():
    refused = {flag.why for flag in sglang_flags().values() if not flag.accepted}
    assert [why for why in refused if len(why.rpartition(": ")[2].split()) < 3] == []
    assert len(refused) > 40


@pytest.mark.parametrize(
    "words",
    [
        "--weight-loader-drop-cache-after-load",
        "--numa-node 0 1",
        "--nccl-port 5000",
        "--soft-watchdog-timeout 5",
        "--enable-strict-thinking",
    ],
)
def test_what_is_not_done_is_refused(words: str):
    assert refusal(words.split()).startswith(f"not supported: {words.split()[0]} (")


@pytest.mark.parametrize(
    "words",
    [
        *(f"--attention-backend {name}" for name in ("fa3", "flashinfer", "trtllm_mha", "triton")),
        "--sampling-backend flashinfer",
        "--schedule-policy lpm",
    ],
)
def test_values_that_only_choose_how_sglang_computes(words: str, caplog: pytest.LogCaptureFixture):
    plain = resolve(ServerArgs(model_path="m", device="cpu"))
    args = parse(["--model-path", "m", "--device", "cpu", *words.split()]).args
    with caplog.at_level(logging.INFO, "moesaic"):
        assert resolve(resolve(args)) == plain
    assert [line.partition(": ")[0] for line in caplog.messages] == [f"{words} needs nothing here"]


def test_kernels_and_loading_of_sglang_are_accepted():
    words = (
        "--enable-torch-compile --torch-compile-max-bs 8 --weight-loader-disable-mmap "
        "--decode-attention-backend flashmla --prefill-attention-backend fa3"
    )
    assert len(parse(words.split()).log) == 5


@pytest.mark.parametrize("words", ["--attention-backend nsa", "--schedule-policy priority"])
def test_values_that_change_results_are_refused(words: str):
    assert "not built yet" in "".join(problems(parse(["--model-path", "m", *words.split()]).args))


def test_finite_numbers_are_always_checked():
    (line,) = parse(["--enable-nan-detection"]).log
    assert line.startswith("--enable-nan-detection: logits are always checked")


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)
    gc.unfreeze()


def test_garbage_thresholds(
    thresholds: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """In the process of an Engine and in ranks."""
    args = parse("--model-path tiny:qwen3_moe --device cpu --gc-threshold 900 8".split()).args
    assert list(problems(args)) == []
    with Engine(**asdict(args)):
        assert gc.get_threshold() == (900, 8, thresholds[2])
    gc.set_threshold(*thresholds)
    served: list[tuple[int, int, int]] = []
    rank = SimpleNamespace(args=args, serve=lambda: served.append(gc.get_threshold()))
    monkeypatch.setattr(worker, "Worker", lambda link: rank)
    with caplog.at_level(logging.DEBUG):  # else it makes loggers quiet
        worker.run(SimpleNamespace(rank=0))
    assert served == [(900, 8, thresholds[2])]
    many = parse("--model-path m --gc-threshold 1 2 3 4".split()).args
    assert list(problems(many)) == ["--gc-threshold has 4 numbers: give one, two or three"]


def test_off_switches_are_known_too():
    for flag in (their for their in THEIRS if their.default in (None, False) and not their.words):
        name = f"--no-{flag.names[0].removeprefix('--')}"
        assert parse([name]).log == [], name


def test_no_flag_is_in_the_table_and_ours():
    both = [
        name
        for flag in sglang_flags().values()
        for name in flag.spec.names
        if has_key(ServerArgs, name.removeprefix("--"))
    ]
    assert both == []


def as_ours(args: ServerArgs) -> ServerArgs:
    """Their default bounds a step, ours does not; their transfer backend means ours
    (test_config.py); ours has trees on CPU only."""
    assert args.disaggregation_transfer_backend == "mooncake"
    ours = {"disaggregation_transfer_backend": "auto", "speculative_ngram_max_bfs_breadth": None}
    return replace(args, max_prefill_tokens=None, **ours)


def test_their_defaults_are_as_good_as_nothing(tmp_path: Path):
    given = {flag.field: flag.default for flag in THEIRS if flag.field != "model_path"}
    left_out = ServerArgs(model_path="m")
    made = ServerArgs.from_kwargs(model_path="m", **given)
    assert made.max_prefill_tokens == 16384
    assert as_ours(made) == left_out
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump({"model-path": "m", **given}))
    found = parse([], file)
    assert as_ours(found.args) == left_out
    assert found.log == []


@pytest.mark.parametrize(
    "kwargs",
    [
        {"lora_paths": []},
        {"enable_lora": False},
        {"json_model_override_args": "{}"},
        {"elastic_ep_backend": "none"},
        {"load_publish_endpoint": "off"},
        {"model_impl": "sglang"},
        {"tool_call_parser": "auto", "reasoning_parser": "auto"},
        {"page_size": None, "device": None},
        {"mm_process_config": {}, "lora_paths": {}},
    ],
)
def test_off_values_are_as_good_as_nothing(kwargs: dict[str, Any]):
    assert ServerArgs.from_kwargs(**kwargs) == ServerArgs()


def test_off_words_are_as_good_as_nothing():
    line = "--mm-process-config {} --kv-canary none --hicache-size 0 --max-loras-per-batch 8"
    assert parse(line.split()) == Outcome(ServerArgs(), [])


def test_keywords(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "moesaic"):
        args = ServerArgs.from_kwargs(model_path="m", fp8_gemm_runner_backend="triton")
    assert args == ServerArgs(model_path="m")
    assert [line.split(": ")[0] for line in caplog.messages] == ["--fp8-gemm-backend"]
    with pytest.raises(ValueError, match=r"not supported: --lora-paths \(LoRA adapters are not"):
        ServerArgs.from_kwargs(model_path="m", lora_paths=["a"])
    with pytest.raises(ValueError, match="--sleep-on-idle is 'yes': give true or false"):
        ServerArgs.from_kwargs(model_path="m", sleep_on_idle="yes")


def test_a_file(tmp_path: Path):
    file = tmp_path / "serve.yaml"
    file.write_text("tp-size: 2\nsleep-on-idle: true\nhicache_ratio: 2.0\n")
    with pytest.raises(ValueError, match=r"^not supported: --hicache-ratio \(the KV cache has one"):
        parse([], file)
    found = parse(["--hicache-ratio", "0"], file)  # the command line switches it off
    assert found.args == ServerArgs(tp_size=2)
    assert found.log == ["--sleep-on-idle: an idle server sleeps until a request arrives"]


def test_a_pasted_line_names_all_that_is_refused():
    line = "--lora-paths a=b c=d --tp 2 --enable-lora --hicache-size 64 --cpu-offload-gb 8 --ep 2"
    found = refusal(f"{line} --enforce-shared-experts-fusion".split())
    reasons = found.removeprefix("not supported: ").split("; ")
    assert [reason.partition(" (")[0] for reason in reasons] == [
        "--lora-paths, --enable-lora",
        "--hicache-size",
        "--cpu-offload-gb",
        "not built yet: --enforce-shared-experts-fusion",
    ]


# From SGLang's documentation of these models; what is left of them if the refused ones go.
PASTED = (
    (
        "--model-path deepseek-ai/DeepSeek-V3 --tp 8 --trust-remote-code --mem-fraction-static 0.9 "
        "--num-continuous-decode-steps 4 --disable-custom-all-reduce --enable-p2p-check",
        ["--num-continuous-decode-steps", "--disable-custom-all-reduce", "--enable-p2p-check"],
        "",
    ),
    (
        "--model-path deepseek-ai/DeepSeek-V3-0324 --tp-size 16 --dist-init-addr 10.0.0.1:5000 "
        "--nnodes 2 --node-rank 0 --attn-dp-size 16 --moe-a2a-backend deepep --sleep-on-idle "
        "--cuda-graph-bs-decode 1 2 4 8 --scheduler-recv-interval 4 --context-length 128k",
        ["--sleep-on-idle", "--scheduler-recv-interval"],
        "",
    ),
    (
        "--model Qwen/Qwen3-30B-A3B --tp 4 --ep 4 --reasoning-parser qwen3 --revision main "
        "--tool-call-parser qwen25 --served-model-name qwen3 Qwen3-30B-A3B --tokenizer-mode auto "
        '--json-model-override-args {"rope_scaling":null} --enable-metrics --log-level-http error',
        [],
        "",
    ),
    (
        "--model openai/gpt-oss-120b --tp 4 --schedule-conservativeness 0.3 --mem-fraction-static "
        "0.85 --swa-full-tokens-ratio 0.5 --enable-symm-mem --stream-interval 20 "
        "--kv-cache-dtype auto --page-size 64 --tokenizer-worker-num 4",
        ["--swa-full-tokens-ratio", "--enable-symm-mem", "--tokenizer-worker-num"],
        "",
    ),
    (
        "--model M --enable-hierarchical-cache --hicache-ratio 2 --hicache-write-policy "
        "write_through --hicache-storage-backend mooncake",
        [],
        "--enable-hierarchical-cache, --hicache-ratio, --hicache-storage-backend",
    ),
    ("--model M --enable-ep-moe --enable-deepep-moe", [], "--enable-ep-moe, --enable-deepep-moe"),
)


@pytest.mark.parametrize(("line", "accepted", "refused"), PASTED)
def test_pasted_lines(line: str, accepted: list[str], refused: str):
    if refused:
        assert refusal(line.split()).startswith(f"not supported: {refused} (")
        return
    found = parse(line.split())
    assert [entry.split(": ")[0] for entry in found.log] == accepted
    assert list(problems(found.args)) == []


def test_the_server_logs_what_it_accepts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    started: list[ServerArgs] = []
    monkeypatch.setattr("moesaic.cli.serve._start", lambda args, **_: started.append(args) or 0)
    with caplog.at_level(logging.INFO):
        assert main("serve m --tp 2 --sleep-on-idle --batch-notify-size 4".split()) == 0
    assert started == [ServerArgs(model_path="m", tp_size=2)]
    assert [line.split(": ")[0] for line in caplog.messages] == [
        "--sleep-on-idle",
        "--batch-notify-size",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-runing-requests 4", "; did you mean --max-running-requests?"),
        ("--hicache-ration 4", "; did you mean --hicache-ratio?"),
        ("--cuda-graph-mode full", ""),
        ("--disable-lora", ""),
        ("--enable-magic", ""),
        ("--gpu-memory-utilization 0.9", ""),
    ],
)
def test_hints_are_close_or_absent(words: str, message: str):
    assert refusal(words.split()) == f"unknown flag {words.split()[0]}{message}"


def test_the_beginning_of_a_flag():
    args = parse("--speculative-algo EAGLE --max-running-req 4 --moe-a2a=deepep".split()).args
    assert (args.speculative_algorithm, args.max_running_requests) == ("EAGLE", 4)
    assert args.moe_a2a_backend == "deepep"
    assert parse(["--enable-symm"]).log == parse(["--enable-symm-mem"]).log != []
    assert refusal(["--tokenizer-p", "x", "--speculative-num", "3"]).startswith(
        "ambiguous option: --speculative-num could match --speculative-num-steps, "
        "--speculative-num-draft-tokens; see"
    )


def test_a_flag_that_a_command_does_not_take_is_no_beginning(capsys: pytest.CaptureFixture[str]):
    assert main("generate m --prompt x --enable-metrics".split()) == 2
    told = "--enable-metrics is a flag of the HTTP server: moesaic generate does not take it"
    assert told in capsys.readouterr().err


def test_other_names_take_effect():
    args = parse("--tp 8 --attention-data-parallel-size 4".split()).args
    assert (args.dp_size, args.enable_dp_attention, args.attn_dp_size) == (4, True, 4)
    args = parse(["--cuda-graph-backend-decode", "disabled"]).args
    assert args.disable_cuda_graph
    args = parse("--cuda-graph-max-bs-decode 8 --disable-decode-cuda-graph".split()).args
    assert (args.cuda_graph_max_bs, args.disable_cuda_graph) == (8, True)
    both = parse("--model-path m --tp 4 --dp 2 --attn-dp-size 4".split()).args
    assert list(problems(both)) == [
        "--attn-dp-size 4 with --dp-size 2: replicas that have attention groups each are not "
        "supported, so leave one of the two out"
    ]


@pytest.mark.parametrize(
    ("flags", "chunk"),
    [
        ("", 2048),
        ("--max-prefill-tokens 1k", 1000),
        ("--max-prefill-tokens 16384", 2048),
        ("--chunked-prefill-size -1", -1),
        ("--chunked-prefill-size -1 --max-prefill-tokens 16384", 16384),
    ],
)
def test_prompt_tokens_of_a_step(flags: str, chunk: int):
    args = resolve(parse(f"--model-path m --device cpu {flags}".split()).args)
    assert args.chunked_prefill_size == chunk


@pytest.mark.parametrize(
    ("text", "size"),
    [("128k", 128_000), ("1.5M", 1_500_000), ("1Ki", 1024), ("2Mi", 2 << 20), ("7", 7)],
)
def test_sizes(text: str, size: int, tmp_path: Path):
    assert read_size(text) == size
    assert ServerArgs.from_kwargs(context_length=text).context_length == size
    file = tmp_path / "c.yaml"
    file.write_text(f"context-length: {text}\n")
    assert parse([], file).args.context_length == size


@pytest.mark.parametrize("text", ["128K", "1ki", "k", "0.0001k", "1kk", "x", ""])
def test_no_sizes(text: str):
    with pytest.raises(ValueError):
        read_size(text)


def test_no_size_as_a_keyword():
    with pytest.raises(ValueError, match="--context-length is '1kk': give a whole number"):
        ServerArgs.from_kwargs(context_length="1kk")


def test_several_names_of_the_model():
    args = parse("--served-model-name a b c".split()).args
    assert (args.served_model_name, args.served_model_aliases) == ("a", ("b", "c"))
    made = ServerArgs.from_kwargs(served_model_name=["a", "b"])
    assert (made.served_model_name, made.served_model_aliases) == ("a", ("b",))
    assert ServerArgs.from_kwargs(served_model_name="a").served_model_name == "a"


def test_a_model_after_its_names(capsys: pytest.CaptureFixture[str]):
    """It is taken as one of the names; the message says so, and what to write instead."""
    assert main("serve --served-model-name foo bar tiny:qwen3_moe".split()) == 2
    said = capsys.readouterr().err
    assert "--served-model-name takes all words that follow it as names" in said
    assert "'tiny:qwen3_moe' is one" in said
    assert "moesaic serve tiny:qwen3_moe --served-model-name foo" in said
    assert "--model-path tiny:qwen3_moe" in said


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "--preferred-sampling-params is not JSON: "),
        ("[1]", "--preferred-sampling-params is [1]: give a JSON object, such as {}"),
    ],
)
def test_json_flags(value: str, message: str):
    assert refusal(["--preferred-sampling-params", value]).startswith(message)
    args = ServerArgs.from_kwargs(preferred_sampling_params={"top_k": 3})
    assert args.preferred_sampling_params == '{"top_k": 3}'


def test_flags_of_what_is_not_built() -> None:
    """Nothing of their groups is built, not even at the default."""
    [message] = unbuilt(ServerArgs(model_path="m", disaggregation_ib_device="mlx5_0"))
    assert message.endswith(": leave it out)") and "default" not in message
