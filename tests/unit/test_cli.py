"""The command line: help, the guide's commands, `generate` against an engine made of words."""

import importlib
import io
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bench.http_server import free_port
from moesaic.cli.main import COMMANDS, main
from moesaic.config.args import ServerArgs
from moesaic.config.parser import FlagParser, merge
from moesaic.config.resolve import problems

NODE = "--model-path M --tp 16 --ep 16 --nnodes 2 --moe-a2a-backend deepep"
FP4 = (
    "--model-path M --trust-remote-code --quantization modelopt_fp4 --tp 4 "
    "--moe-runner-backend flashinfer_cutlass --ep-size 4 --dp 4 --enable-dp-attention "
    "--mem-fraction-static 0.85 --max-running-requests 2048 --stream-interval 5 "
    "--enable-dp-lm-head --cuda-graph-bs 1 2 4 8 16 32 64 128 256 512 --disable-radix-cache "
    "--moe-a2a-backend flashinfer"
)
# Command lines of the expert-parallelism guide, and every flag that this version refuses in them.
GUIDE = (
    (
        "--model-path M --tp 8 --ep 8 --moe-a2a-backend deepep --moe-runner-backend deep_gemm",
        "",
    ),
    (
        f"{NODE} --node-rank 0 --dist-init-addr 10.0.0.1:29500 --moe-runner-backend deep_gemm",
        "",
    ),
    (
        f"{NODE} --node-rank 1 --dist-init-addr 10.0.0.1:29500 --moe-runner-backend deep_gemm",
        "",
    ),
    ("--model-path M --tp 8 --ep 8 --moe-a2a-backend deepep --deepep-mode auto", ""),
    (
        "--model-path M --tp 8 --ep 8 --moe-a2a-backend deepep --enable-two-batch-overlap",
        "",
    ),
    (
        "--model-path M --tp 8 --ep 8 --moe-a2a-backend deepep --enable-single-batch-overlap",
        "",
    ),
    (
        "--model-path M --tp 8 --ep 8 --moe-a2a-backend deepep --enable-eplb",
        "",
    ),
    ("--model-path M --tp 8 --ep 8 --moe-a2a-backend deepep --moe-runner-backend auto", ""),
    (
        "--model-path M --tp 8 --ep 8 --moe-a2a-backend deepep "
        "--moe-runner-backend flashinfer_trtllm",
        "",
    ),
    (
        "--model-path M --tp 8 --ep 8 --moe-a2a-backend mori --deepep-mode normal",
        "",
    ),
    (
        "--model-path M --disaggregation-mode prefill --tp 16 --ep 16 --moe-a2a-backend deepep "
        "--deepep-mode normal",
        "",
    ),
    (
        "--model-path M --disaggregation-mode decode --tp 16 --ep 16 "
        "--moe-a2a-backend ascend_fuseep --deepep-mode low_latency",
        "",
    ),
    ("--model-path M --tp 16 --ep 16 --moe-a2a-backend deepep", ""),
    (
        "--model-path M --tp 8 --ep 8 --dp-size 8 --enable-dp-attention --moe-a2a-backend deepep "
        "--moe-runner-backend deep_gemm",
        "",
    ),
    (
        "--model-path M --tp 8 --ep 8 --pp-size 4 --nnodes 4 --node-rank 0 "
        "--moe-a2a-backend deepep --chunked-prefill-size 4096",
        "",
    ),
    (
        "--model-path M --tp 8 --ep 8 --moe-runner-backend flashinfer_trtllm "
        "--speculative-moe-runner-backend triton",
        "",
    ),
    (
        "--model-path M --tp 8 --ep 8 --moe-a2a-backend deepep --moe-runner-backend deep_gemm "
        "--deepep-mode auto --enable-two-batch-overlap --enable-eplb --mem-fraction-static 0.85",
        "",
    ),
    ("--model-path M --tp 8 --ep 8 --moe-runner-backend triton", ""),
    ("--model-path M --tp 8 --ep 4 --moe-a2a-backend none", ""),
    (
        "--model-path M --tp 8 --ep 8 --enable-eplb --max-running-requests 128",
        "",
    ),
    (
        "--model-path M --tp 8 --ep 8 --moe-a2a-backend deepep --deepep-mode auto "
        "--enable-two-batch-overlap --enable-single-batch-overlap",
        "",
    ),
    (f"{FP4} --disable-shared-experts-fusion", ""),
    (
        "--model-path M --tp 4 --mem-fraction-static 0.8 --max-total-tokens 66000 "
        "--trust-remote-code --attention-backend ascend --device npu --host 127.0.0.1 --port 30088 "
        "--moe-a2a-backend deepep --deepep-mode auto --cuda-graph-max-bs 128 --disable-radix-cache",
        "--attention-backend ascend|--device npu",
    ),
)


def parse(line: str) -> ServerArgs:
    parser = FlagParser("moesaic serve", "", "")
    parser.add_flags(ServerArgs)
    return merge(ServerArgs, parser.parse(line.split()), {})


@pytest.mark.parametrize(("line", "refused"), GUIDE)
def test_commands_of_the_guide_are_understood(
    line: str,
    refused: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    found = list(problems(parse(line)))
    if not refused:
        assert found == []
        return
    assert main(["serve", *line.split()]) == 2
    message = capsys.readouterr().err.strip()
    assert message == f"error: {found[0]}"
    assert message.startswith("error: not built yet: ")
    named = message.removeprefix("error: not built yet: ").split("; --")
    shown = {part.split(" (")[0].removeprefix("--") for part in named}
    assert shown == {flag.removeprefix("--") for flag in refused.split("|")}


def test_nodes_of_the_guide_must_know_where_to_meet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    line = "M --tp 8 --ep 8 --pp-size 4 --nnodes 4 --node-rank 0 --moe-a2a-backend deepep"
    assert main(["serve", *line.split()]) == 2
    assert "give all nodes --dist-init-addr NODE0:PORT" in capsys.readouterr().err


def test_launch_server_is_serve():
    for command in ("moesaic.launch_server", "moesaic.cli.main serve"):
        flags = f"--model-path gone --port {free_port()} --log-level error"
        words = [sys.executable, "-m", *command.split(), *flags.split()]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("error: --model-path gone is not a folder: give a Hugging")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["sreve"],
            "unknown command sreve: choose one of serve, router, generate, bench, eval, quantize, "
            "tune, balance, doctor; did you mean serve?",
        ),
        (
            ["serve"],
            "--model-path is missing: name a model folder, or tiny:qwen3_moe for a random toy",
        ),
        (["serve", "A", "--model-path", "B"], "two models, A and --model-path B: keep one"),
        (["serve", "A", "--tpp", "2"], "unknown flag --tpp; did you mean --tp?"),
        (["serve", "A", "--ep", "2"], "--ep-size is 2 with --tp-size 1"),
        (
            ["generate", "A", "--port", "1"],
            "--port is a flag of the HTTP server: moesaic generate does not take it",
        ),
        (["generate", "A", "--top-p", "2"], "--top-p is 2.0: give more than 0 and at most 1"),
        (["generate", "A", "--top-k", "0"], "--top-k is 0: give at least 1, or -1"),
        (
            ["generate", "A", "--chat", "--skip-tokenizer-init", "--prompt", "x"],
            "--chat needs a tokenizer: leave out --skip-tokenizer-init",
        ),
        (
            ["generate", "A", "--skip-tokenizer-init", "--prompt", "x"],
            "prompts here are texts and need a tokenizer: leave out --skip-tokenizer-init",
        ),
        (
            ["generate", "shape:gpt-oss-20b", "--load-format", "dummy", "--prompt", "x"],
            "prompts here are texts and need a tokenizer, and shape:gpt-oss-20b has none: "
            "give --tokenizer-path DIR",
        ),
        (
            ["eval", "shape:gpt-oss-20b", "--load-format", "dummy"],
            "an evaluation needs a tokenizer, and shape:gpt-oss-20b has none: ",
        ),
    ],
)
def test_errors_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_help_teaches(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command}" in text
    assert "moesaic generate --model-path tiny:qwen3_moe" in text
    assert main([]) == 2
    assert capsys.readouterr().err == text


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "moesaic 0.1.0\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_does_not_import_torch(command: str):
    code = (
        "import sys\n"
        "from moesaic.cli.main import main\n"
        f"try: main(['{command}', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print('torch' in sys.modules, 'yaml' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False False\n")
    if command == "quantize":
        assert "--format {fp8," in done.stdout
        return
    if command == "router":
        assert "--prefill URL" in done.stdout
        return
    if command == "bench":
        assert "moesaic bench latency MODEL" in done.stdout
        return
    if command == "balance":
        assert "  moesaic balance --ep 32 --redundant 0 32\n" in done.stdout
        return
    if command == "tune":
        assert "usage: moesaic tune SHAPE [SHAPE …] [flags]\n" in done.stdout
        assert "       moesaic tune [SHAPE …] --a2a [flags]\n" in done.stdout
        return
    assert "--moe-a2a-backend {none,deepep,mooncake,mori,flashinfer,ascend_fuseep}" in done.stdout
    assert "Expert load balancing:" in done.stdout
    assert ("--port" in done.stdout) == (command in ("serve", "doctor", "eval"))


def test_package_offers_engine_lazily():
    module = importlib.import_module("moesaic")
    assert dir(module) == ["Engine", "SamplingParams", "__version__"]
    with pytest.raises(AttributeError, match="module 'moesaic' has no attribute 'Nothing'"):
        _ = module.Nothing


class WordTokenizer:
    chat = SimpleNamespace(texts={"default": "a template"})

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def _letters(ids: list[int]) -> str:
    return "".join(map(chr, ids))


class WordEngine:
    """Answers a prompt with the prompt in capitals, letter by letter where streamed."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs
        self.tokenizer = WordTokenizer()
        self.calls: list[tuple[Any, Any]] = []
        self.closed = False
        made.append(self)

    def __enter__(self) -> "WordEngine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.closed = True

    def generate(
        self, prompt: Any = None, sampling_params: Any = None, input_ids: Any = None, stream=False
    ) -> Any:
        if input_ids is not None:
            prompt = _letters(input_ids) if stream else [_letters(ids) for ids in input_ids]
        self.calls.append((prompt, sampling_params))
        if stream:
            return self._stream(prompt)
        n = sampling_params.get("n", 1)
        return [
            {"text": p.upper(), "output_ids": [7], "meta_info": {"finish_reason": {"type": "stop"}}}
            for p in prompt
            for _ in range(n)
        ]

    def _stream(self, prompt: str) -> Iterator[dict[str, Any]]:
        if "too long" in prompt:
            raise ValueError("the prompt is too long: shorten it")
        for end in range(1, len(prompt) + 1):
            yield {"text": prompt[:end].upper()}


made: list[WordEngine] = []


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[WordEngine]:
    module = types.ModuleType("moesaic.engine.engine")
    module.Engine = WordEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "moesaic.engine.engine", module)
    made.clear()
    return made


def talk(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """Standard input becomes a terminal at which these lines are typed."""
    terminal = io.StringIO("".join(line + "\n" for line in lines))
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)


def test_generate_one_prompt(engines: list[WordEngine], capsys: pytest.CaptureFixture[str]):
    argv = "generate M --prompt hello --max-new-tokens 4 --temperature 0 --stop x --stop y".split()
    assert main([*argv, "--seed", "3", "--page-size", "8"]) == 0
    assert capsys.readouterr().out == "HELLO\n"
    (engine,) = engines
    assert (engine.kwargs["model_path"], engine.kwargs["page_size"]) == ("M", 8)
    sampling = {"max_new_tokens": 4, "temperature": 0.0, "seed": 3, "stop": ("x", "y")}
    assert engine.calls == [(["hello"], sampling)]
    assert engine.closed


def test_generate_several_prompts(engines: list[WordEngine], capsys: pytest.CaptureFixture[str]):
    assert main("generate M --prompt a --prompt b --n 2".split()) == 0
    assert capsys.readouterr().out == ">>> a\nA\n\n>>> a\nA\n\n>>> b\nB\n\n>>> b\nB\n\n"
    assert engines[0].calls == [(["a", "b"], {"n": 2})]


def test_generate_json(engines: list[WordEngine], capsys: pytest.CaptureFixture[str]):
    assert main("generate M --prompt ä --json".split()) == 0
    line = capsys.readouterr().out
    assert json.loads(line) == {
        "prompt": "ä",
        "text": "Ä",
        "output_ids": [7],
        "meta_info": {"finish_reason": {"type": "stop"}},
    }


def test_generate_chat_applies_the_template(
    engines: list[WordEngine], capsys: pytest.CaptureFixture[str]
):
    assert main("generate M --prompt hi --chat".split()) == 0
    assert engines[0].calls == [(["<user>hi"], {})]


def test_generate_reads_a_pipe(
    engines: list[WordEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    assert main(["generate", "M"]) == 0
    assert engines[0].calls == [(["one", "two"], {})]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate", "M"]) == 2
    assert "error: no prompt: give --prompt" in capsys.readouterr().err
    assert len(engines) == 1


def test_generate_talks(
    engines: list[WordEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    talk(monkeypatch, ["hi", "", "too long", "you"])
    assert main(["generate", "M", "--chat"]) == 0
    captured = capsys.readouterr()
    assert "<USER>HI\n" in captured.out
    assert "error: the prompt is too long: shorten it\n" in captured.err
    last, _ = engines[0].calls[-1]
    assert last == "<user>hi<assistant><USER>HI<user>you"
    assert engines[0].closed


def test_a_conversation_starts_over(
    engines: list[WordEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    talk(monkeypatch, ["hi", "/new", "you"])
    assert main(["generate", "M", "--chat"]) == 0
    assert [call[0] for call in engines[0].calls] == ["<user>hi", "<user>you"]


def test_generate_cut_short(
    engines: list[WordEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(self: WordEngine, prompt: str) -> Iterator[dict[str, Any]]:
        yield {"text": "par"}
        raise KeyboardInterrupt

    monkeypatch.setattr(WordEngine, "_stream", interrupted)
    talk(monkeypatch, ["a", "b"])
    assert main(["generate", "M"]) == 0
    assert capsys.readouterr().out.count("par\n") == 2


def test_generate_reports_a_missing_folder(
    engines: list[WordEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def missing(self: WordEngine, **kwargs: Any) -> None:
        raise FileNotFoundError(f"no folder {kwargs['model_path']}")

    monkeypatch.setattr(WordEngine, "__init__", missing)
    assert main("generate gone --prompt x".split()) == 2
    assert capsys.readouterr().err == "error: no folder gone\n"
