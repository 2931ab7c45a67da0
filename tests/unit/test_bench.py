"""The load generator's parts: prompts, arrivals, figures, the block, the picture, the engine."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from moesaic.cli.main import main
from moesaic.config.flags import from_kwargs
from moesaic.loadgen import picture, report
from moesaic.loadgen.args import DatasetArgs, Load, ServeBenchArgs
from moesaic.loadgen.datasets import DatasetSpec, draw_prompts
from moesaic.loadgen.endpoints import ENDPOINTS, RequestOptions, merged, read_native, read_openai
from moesaic.loadgen.metrics import LatencySummary, as_json, measure, parse_goodput
from moesaic.loadgen.outcome import BenchPrompt, Outcome
from moesaic.loadgen.texts import TokenTexts, WordTexts, load_tokenizer
from moesaic.loadgen.traffic import Run, arrival_times

# Labels of a block that SGLang printed (its pull request 14668), in order.
LABELS = """\
Backend|Traffic request rate|Max request concurrency|Successful requests|Benchmark duration (s)|\
Total input tokens|Total input text tokens|Total input vision tokens|Total generated tokens|\
Total generated tokens (retokenized)|Request throughput (req/s)|Input token throughput (tok/s)|\
Output token throughput (tok/s)|Peak output token throughput (tok/s)|Peak concurrent requests|\
Total token throughput (tok/s)|Concurrency|Mean E2E Latency (ms)|Median E2E Latency (ms)|\
Mean TTFT (ms)|Median TTFT (ms)|P99 TTFT (ms)|Mean TPOT (ms)|Median TPOT (ms)|P99 TPOT (ms)|\
Mean ITL (ms)|Median ITL (ms)|P95 ITL (ms)|P99 ITL (ms)|Max ITL (ms)"""
HEADINGS = (
    "============ Serving Benchmark Result ============",
    "----------------End-to-End Latency----------------",
    "---------------Time to First Token----------------",
    "-----Time per Output Token (excl. 1st token)------",
    "---------------Inter-Token Latency----------------",
    "==================================================",
)
# Keys of a line of SGLang's --output-file.
KEYS = """\
backend dataset_name request_rate max_concurrency sharegpt_output_len random_input_len \
random_output_len random_range_ratio duration completed total_input_tokens total_output_tokens \
total_output_tokens_retokenized request_throughput input_throughput output_throughput \
mean_e2e_latency_ms median_e2e_latency_ms std_e2e_latency_ms p99_e2e_latency_ms mean_ttft_ms \
median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms \
mean_itl_ms median_itl_ms std_itl_ms p95_itl_ms p99_itl_ms concurrency accept_length"""


def outcome(
    times: Sequence[float], tokens: int, counts: Sequence[int] = (), started: float = 0.0
) -> Outcome:
    """The outcome of a request that starts at `started` and ends with its last arrival."""
    return Outcome(
        BenchPrompt("p", 10, tokens),
        started=started,
        ended=times[-1],
        arrivals=array("d", times),
        counts=array("l", counts),
        finished=True,
        prompt_tokens=10,
        output_tokens=tokens,
    )


def test_tokens_that_come_together_share_the_time():
    counted = outcome([1.0, 1.5, 1.5, 2.7], 8, [1, 3, 4, 8])
    assert counted.tokens_by_arrival() == [1, 2, 1, 4]
    assert counted.itls() == pytest.approx([0.25, 0.25, 0.0, 0.3, 0.3, 0.3, 0.3])
    assert (counted.ttft, counted.tpot) == (1.0, pytest.approx(1.7 / 7))
    spread = outcome([1.0, 2.0, 3.0], 6)
    assert spread.tokens_by_arrival() == [2, 2, 2]
    assert spread.itls() == pytest.approx([0.5] * 4)
    # More pieces of text than tokens: the time of a piece without one goes to the next token.
    assert outcome([1.0, 2.0, 3.0, 4.0], 2).itls() == pytest.approx([1.0, 2.0])
    single = outcome([1.0], 1, [1])
    assert (single.itls(), single.tpot) == ([], None)


def test_whole_answers_have_no_time_to_first_token():
    whole = outcome([3.0], 5)
    whole.streamed = False
    assert (whole.ttft, whole.tpot, whole.itls(), whole.latency) == (None, None, [], 3.0)


def test_spread_is_what_statistics_says():
    rng = random.Random(0)
    seconds = [rng.expovariate(3) for _ in range(500)]
    spread = LatencySummary.of(seconds)
    cuts = statistics.quantiles([s * 1000 for s in seconds], n=100, method="inclusive")
    assert (spread.p90, spread.p95, spread.p99) == pytest.approx((cuts[89], cuts[94], cuts[98]))
    assert spread.median == pytest.approx(1000 * statistics.median(seconds))
    assert spread.std == pytest.approx(1000 * statistics.pstdev(seconds))
    assert spread.max == pytest.approx(1000 * max(seconds))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_rate_and_burstiness(burstiness: float):
    times = list(arrival_times(20_000, Load(50.0, None, burstiness), seed=3))
    gaps = np.diff(times)
    assert times[0] == 0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    # Gaps follow a gamma distribution; burstiness 1 is a Poisson process.
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert times == list(arrival_times(20_000, Load(50.0, None, burstiness), seed=3))


def test_an_infinite_rate_sends_all_at_once():
    assert list(arrival_times(5, Load(math.inf, 2), seed=1)) == [0.0] * 5


def run_of(outcomes: list[Outcome], duration: float, cpu: float = 0.1) -> Run:
    return Run(outcomes, duration, cpu)


def test_figures():
    good = outcome([0.2, 0.4, 0.6], 3, [1, 2, 3])
    slow = outcome([1.0, 2.0], 2, [1, 2], started=0.5)
    failed = outcome([0.1], 50)
    failed.error = "status 500: broken"
    figures = measure(run_of([good, slow, failed], 4.0), {"ttft": 300, "tpot": 250}, len)
    assert (figures.completed, figures.failed, figures.good) == (2, 1, 1)
    assert figures.errors == {"status 500: broken": 1}
    assert (figures.total_input, figures.total_output) == (20, 5)
    assert figures.output_throughput == pytest.approx(5 / 4)
    assert figures.total_throughput == pytest.approx(25 / 4)
    assert figures.goodput == pytest.approx(1 / 4)
    assert figures.concurrency == pytest.approx((0.6 + 1.5) / 4)
    assert figures.peak_output == 4  # from 0.2 s on, before 1.2 s
    assert figures.peak_concurrency == 2
    assert figures.e2e.max == pytest.approx(1500)
    assert figures.ttft.mean == pytest.approx(350)
    assert figures.tpot.mean == pytest.approx((200 + 1000) / 2)
    assert figures.itl.median == pytest.approx(200)
    assert not figures.client_bound
    assert measure(run_of([good], 1.0, cpu=0.81), {}, None).client_bound


def test_what_was_not_measured_keeps_no_limit():
    whole = outcome([0.1], 5)
    whole.streamed = False
    assert measure(run_of([whole], 1.0), {"ttft": 1e9}, None).good == 0
    assert measure(run_of([whole], 1.0), {"e2el": 1e9}, None).good == 1
    # A single token has no time between tokens, which still meets the limit.
    assert measure(run_of([outcome([0.1], 1)], 1.0), {"tpot": 1}, None).good == 1


def test_block_has_the_labels_and_columns_that_people_compare():
    args = from_kwargs(ServeBenchArgs, {"goodput": ("ttft:1",)})
    figures = measure(run_of([outcome([0.2, 0.4], 2, [1, 2])], 1.0), {"ttft": 1}, len)
    lines = report.serving_block(args, Load(math.inf, 16), figures).splitlines()
    assert tuple(line for line in lines if line[0] in "=-") == HEADINGS
    rows = [line for line in lines if line[0] not in "=-"]
    assert {line[40] for line in rows} == {" "}
    assert all(len(line) == 51 or len(line[41:].strip()) > 10 for line in rows)
    found = [line[:40].strip().removesuffix(":") for line in rows]
    assert [label for label in found if label in LABELS.split("|")] == LABELS.split("|")
    assert "Median TTFT (ms):                        200.00    " in lines
    assert "Request goodput (req/s):                 0.00      " in lines
    for name in ("E2E Latency", "TTFT", "TPOT", "ITL"):
        assert {f"{part} {name} (ms)" for part in ("P90", "P95", "P99")} <= set(found)


def test_json_has_the_keys_that_people_read():
    args = from_kwargs(ServeBenchArgs, {"output_details": True})
    run = run_of([outcome([0.2, 0.4], 2, [1, 2])], 1.0)
    line = report.json_line(args, Load(math.inf, None), measure(run, {}, None), run, "m")
    assert set(KEYS.split()) <= line.keys()
    assert {"ttfts", "itls", "input_lens", "output_lens", "generated_texts", "errors"} <= set(line)
    assert json.loads(json.dumps(line, allow_nan=False))["request_rate"] == "inf"
    assert as_json(measure(run_of([], 1.0), {}, None))["mean_ttft_ms"] is None


def test_notes_say_what_is_wrong():
    args = from_kwargs(ServeBenchArgs, {})
    odd = outcome([0.2], 2)
    odd.prompt_tokens = 11
    short = Outcome(BenchPrompt("p", 10, 100), ended=1.0, prompt_tokens=10, output_tokens=50)
    short.arrivals.append(0.5)
    run = Run([odd, short], 1.0, 0.9, cut=True, open=7)
    text = "\n".join(report.notes(args, measure(run, {}, None), run))
    assert "7 requests had not ended" in text and "client-bound: this client took 90%" in text
    assert "prompts are not" not in text  # 5% are allowed
    assert "answers are shorter than asked: 52 of 102 tokens" in text
    odd.prompt_tokens = 12
    assert "20 tokens asked, 22 by the server" in "\n".join(
        report.notes(args, measure(run, {}, None), run)
    )


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that encodes decoded random ids as other ids and adds a first
    token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrd", k=rng.randint(2, 6))) for _ in range(400)]
    tokenizer.train_from_iterator([" ".join(rng.choices(words, k=50)) for _ in range(60)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.mark.parametrize("chat", [False, True])
def test_random_prompts_are_as_long_as_asked(merging: Path, chat: bool):
    args = DatasetArgs(num_prompts=40, random_input_len=120, random_range_ratio=0.5)
    texts = TokenTexts(load_tokenizer(str(merging)), chat)
    prompts = draw_prompts(DatasetSpec(args, texts, seed=5, number=40))
    outside = tokenizers.Tokenizer.from_file(str(merging / "tokenizer.json"))

    def count(text: str) -> int:
        if chat:
            return len(outside.encode(f"<s>user {text}</s>", add_special_tokens=False).ids)
        return len(outside.encode(text).ids)

    lengths = [count(prompt.text) for prompt in prompts]
    asked = [prompt.tokens for prompt in prompts]
    assert min(asked) >= 60 and max(asked) <= 120 and len(set(asked)) > 10
    assert sum(a == b for a, b in zip(asked, lengths, strict=True)) >= 36
    assert max(abs(a - b) for a, b in zip(asked, lengths, strict=True)) <= 2
    assert len({prompt.text for prompt in prompts}) == 40
    assert prompts == draw_prompts(DatasetSpec(args, texts, seed=5, number=40))
    assert prompts != draw_prompts(DatasetSpec(args, texts, seed=6, number=40))


def test_random_ids_are_plain_tokens(merging: Path):
    args = DatasetArgs(num_prompts=3, random_input_len=500, random_range_ratio=1.0)
    texts = TokenTexts(load_tokenizer(str(merging)), chat=False)
    prompts = draw_prompts(DatasetSpec(args, texts, seed=5, number=3, ids=True))
    assert [len(prompt.ids or []) for prompt in prompts] == [500] * 3
    assert min(min(prompt.ids or []) for prompt in prompts) > 1


def test_words_without_a_tokenizer():
    args = DatasetArgs(num_prompts=2, random_input_len=9, random_range_ratio=1.0)
    prompts = draw_prompts(DatasetSpec(args, WordTexts(), seed=1, number=2))
    assert [len(prompt.text.split()) for prompt in prompts] == [9, 9]
    with pytest.raises(ValueError, match="give --tokenizer DIR"):
        draw_prompts(DatasetSpec(args, WordTexts(), seed=1, number=2, ids=True))


def test_shared_prefixes(merging: Path):
    args = DatasetArgs(
        dataset_name="generated-shared-prefix",
        gsp_num_groups=3,
        gsp_prompts_per_group=4,
        gsp_system_prompt_len=50,
        gsp_question_len=10,
        gsp_output_len=7,
    )
    texts = TokenTexts(load_tokenizer(str(merging)), chat=False)
    prompts = draw_prompts(DatasetSpec(args, texts, seed=1, number=99))
    prefixes = [prompt.text.split("\n\n")[0] for prompt in prompts]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert {prompt.output_len for prompt in prompts} == {7}
    assert len({prompt.text for prompt in prompts}) == 12


def test_sharegpt(tmp_path: Path, merging: Path):
    turns = [["a question of some length", "an answer, too"], ["alone"], ["", "x"], ["ab cd", "e"]]
    path = tmp_path / "share.json"
    conversations = [{"conversations": [{"from": "x", "value": t} for t in pair]} for pair in turns]
    broken = ["text", 7, {"conversations": 7}, {"conversations": ["a", "b"]}, {"conversations": {}}]
    path.write_text(json.dumps([*conversations, *broken]))
    args = DatasetArgs(dataset_name="sharegpt", dataset_path=str(path), num_prompts=2)
    texts = TokenTexts(load_tokenizer(str(merging)), chat=False)
    outside = tokenizers.Tokenizer.from_file(str(merging / "tokenizer.json"))
    found = {p.text: p for p in draw_prompts(DatasetSpec(args, texts, seed=1, number=2))}
    assert found.keys() == {"a question of some length", "ab cd"}
    first = found["a question of some length"]
    assert first.output_len == len(outside.encode("an answer, too").ids)
    assert first.tokens == len(outside.encode("a question of some length").ids)
    with pytest.raises(ValueError, match="has 2 usable prompts in 2 entries"):
        draw_prompts(DatasetSpec(DatasetArgs("sharegpt", str(path), 3), texts, seed=1, number=3))
    with pytest.raises(ValueError, match="--sharegpt-output-len N"):
        draw_prompts(DatasetSpec(args, WordTexts(), seed=1, number=2))
    fixed = DatasetArgs("sharegpt", str(path), 2, sharegpt_output_len=5)
    assert [p.output_len for p in draw_prompts(DatasetSpec(fixed, WordTexts(), 1, 2))] == [5, 5]


def test_custom(tmp_path: Path):
    path = tmp_path / "own.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "one", "output_len": 3},
        {"messages": [{"role": "user", "content": "two"}], "max_tokens": 4},
        {"conversations": [{"from": "human", "value": "three"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    args = DatasetArgs("custom", str(path), 3, custom_output_len=9)
    prompts = draw_prompts(DatasetSpec(args, WordTexts(), seed=1, number=4))
    assert [(p.text, p.output_len) for p in prompts] == [("one", 3), ("two", 4), ("three", 9)]
    path.write_text('{"prompt": "one"}\n{"prompt": 5}\n')
    with pytest.raises(ValueError, match="line 2: expected"):
        draw_prompts(
            DatasetSpec(DatasetArgs("custom", str(path), 2), WordTexts(), seed=1, number=2)
        )


def test_bodies():
    prompt, asked = BenchPrompt("hello", 1, 7), RequestOptions("m", True, True, {"top_p": 0.5})
    native = json.loads(ENDPOINTS["sglang"].request(prompt, asked))
    assert native["sampling_params"]["max_new_tokens"] == 7 and native["top_p"] == 0.5
    text = json.loads(ENDPOINTS["vllm"].request(prompt, asked))
    assert text["stream_options"] == {"include_usage": True} and text["max_tokens"] == 7
    assert (text["model"], text["prompt"], text["ignore_eos"]) == ("m", "hello", True)
    chat = json.loads(
        ENDPOINTS["openai-chat"].request(prompt, RequestOptions("m", False, False, {}))
    )
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert chat["max_completion_tokens"] == 7
    assert not {"max_tokens", "ignore_eos", "stream_options"} & chat.keys()
    ids = json.loads(ENDPOINTS["vllm"].request(BenchPrompt("", 2, 7, [4, 5]), asked))
    assert ids["prompt"] == [4, 5]
    nested = merged({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "b": {"z": 1}})
    assert nested == {"a": {"x": 1, "y": 3}, "b": {"z": 1}}


def test_events_that_bring_no_tokens():
    found = Outcome(BenchPrompt("p", 1, 1))
    role = b'{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}'
    assert not read_openai(role, found)
    assert read_openai(b'{"choices": [{"delta": {"reasoning_content": "hm"}}]}', found)
    assert read_openai(b'{"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}', found)
    assert not read_openai(b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}', found)
    assert not read_openai(b'{"choices": [], "usage": {"completion_tokens": 9}}', found)
    assert (found.text, found.output_tokens, found.finished) == ("hm", 9, True)
    assert not read_openai(b'{"error": {"message": "it broke"}}', found)
    assert found.error == "it broke"


def test_an_aborted_answer_is_a_failure():
    found = Outcome(BenchPrompt("p", 1, 1))
    reason = {"type": "abort", "message": "out of luck"}
    meta = {"completion_tokens": 3, "prompt_tokens": 2, "finish_reason": reason}
    assert read_native(json.dumps({"text": "x", "meta_info": meta}).encode(), found)
    assert found.error == "out of luck"


def test_goodput_limits():
    assert parse_goodput(["ttft:200", "e2el:1e3"]) == {"ttft": 200.0, "e2el": 1000.0}
    for wrong in ("ttft", "ttft:-1", "itl:5", "ttft:x", "ttft:nan"):
        with pytest.raises(ValueError, match="give NAME:MILLISECONDS"):
            parse_goodput([wrong])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--request-rate 0", "give numbers above 0, or inf"),
        ("--request-rate 1,x", "--request-rate is 'x'"),
        ("--max-concurrency 0", "give whole numbers above 0"),
        ("--request-rate 1,2 --max-concurrency 3,4", "vary one and fix the other"),
        ("--goodput speed:3", "with a name of ttft, tpot, e2el"),
        ("--extra-request-body [1]", "is not an object"),
        ("--extra-request-body {", "is not JSON"),
        ("--header nothing", "give NAME=VALUE"),
        ("--lora-name a", "the engine has no LoRA adapters"),
        ("--backend tgi", "choose one of sglang"),
        ("--backend vllm-chat --tokenize-prompt", "takes texts only"),
        ("--num-prompts 0", "give at least 1"),
        ("--plot no/such/folder/x.png", "there is no such folder"),
        ("--port 1 --disable-tqdm", "no server at http://127.0.0.1:1"),
    ],
)
def test_wrong_flags_are_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "serve", *flags.split()]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_unknown_benchmark(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "throughputs"]) == 2
    assert "did you mean throughput?" in capsys.readouterr().err
    assert main(["bench"]) == 2


def test_help_of_each_benchmark_does_not_import_torch():
    code = (
        "import sys\n"
        "from moesaic.cli.main import main\n"
        "for name in ('serve', 'throughput', 'latency'):\n"
        "    try: main(['bench', name, '--help'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "print({'torch', 'aiohttp', 'matplotlib'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")
    for flag in ("--random-range-ratio", "--request-rate", "--batch-size", "--moe-a2a-backend"):
        assert flag in done.stdout


def test_picture(tmp_path: Path):
    points = []
    for rate in (1.0, 2.0, 4.0, 8.0):
        run = run_of([outcome([rate, rate + 1], 2, [1, 2])], 2.0)
        points.append((Load(rate, None), measure(run, {}, None)))
    path = tmp_path / "load.png"
    picture.draw(str(path), points, "a model")
    pixels = matplotlib.image.imread(path)[:, :, :3]
    assert pixels.shape[0] > 300 and pixels.shape[1] > 1000
    for colour in (picture.MEDIAN, picture.TAIL, picture.OUTPUT, picture.TOTAL):
        wanted = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
        assert (np.abs(pixels - wanted).max(axis=2) < 0.02).sum() > 50
    # The x axis is what varies: the rate, the limit, or the measured load.
    loads = [load for load, _ in points]
    figures = [figures for _, figures in points]
    assert picture._axis(loads, figures) == ("requests per second sent", [1.0, 2.0, 4.0, 8.0])
    limits = [Load(math.inf, limit) for limit in (1, 4)]
    assert picture._axis(limits, figures[:2]) == ("most requests at once", [1.0, 4.0])
    assert picture._axis(loads[:1], figures[:1])[1] == [figures[0].concurrency]


ENGINE = ["tiny:qwen3_moe", "--num-threads", "1", "--log-level", "warning"]


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "results.jsonl"


def test_throughput(results: Path, capsys: pytest.CaptureFixture[str]):
    flags = "--num-prompts 5 --random-input-len 20 --random-output-len 8 --random-range-ratio 1"
    words = ["bench", "throughput", *ENGINE, *flags.split(), "--output-file", str(results)]
    assert main(words) == 0
    block = capsys.readouterr().out
    assert "====== Offline Throughput Benchmark Result =======\n" in block
    assert "Total generated tokens:                  40        \n" in block
    line = json.loads(results.read_text())
    assert (line["total_input_tokens"], line["total_output_tokens"]) == (100, 40)
    assert line["total_throughput"] == pytest.approx(140 / line["total_latency"])


def test_latency(results: Path, capsys: pytest.CaptureFixture[str]):
    flags = "--batch-size 1 3 --input-len 20 --output-len 1 5 --num-iters 2 --warmup 1"
    words = ["bench", "latency", *ENGINE, *flags.split(), "--output-file", str(results)]
    assert main(words) == 0
    assert capsys.readouterr().out.count("= Offline Latency Benchmark Result =") == 4
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(line["batch_size"], line["output_len"]) for line in lines] == [
        (1, 1),
        (1, 5),
        (3, 1),
        (3, 5),
    ]
    for line in lines:
        assert line["num_iters"] == 2
        tokens = line["batch_size"] * (20 + line["output_len"])
        assert line["overall_throughput"] == pytest.approx(tokens / line["total_latency"])
        assert 0 < line["prefill_latency"] <= line["total_latency"]
        assert (line["median_decode_latency"] is None) == (line["output_len"] == 1)
