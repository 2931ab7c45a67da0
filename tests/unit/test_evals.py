"""`eval` without a model: statistics, problem files and comparisons."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import stat
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import jsonschema
import msgspec
import pytest

from moesaic.cli.main import main
from moesaic.evals.ask import Asker, ModelReply, Options
from moesaic.evals.compare import block, compare
from moesaic.evals.data import check_target, read_problems, write_problems, write_whole
from moesaic.evals.figures import Z95, mcnemar, wilson
from moesaic.evals.report import errors, failures, table
from moesaic.evals.result import Result, digest
from moesaic.evals.run import evaluate
from moesaic.evals.server_url import ServerUrl
from moesaic.evals.tasks import draw
from moesaic.evals.tasks.problem import ChatTurn, Problem, grade, is_kept

# The schema that `eval --out` promises.
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
SCORE = ["accuracy", "invalid", "n", "ci_low", "ci_high", "failed"]
POSITIVE = ("temperature", "seconds", "output_throughput", "requests_per_second")
OUTPUT = {
    "task": {"type": "string"},
    "id": {"type": "string"},
    "prompt": {"type": "string"},
    "messages": {"type": "array", "items": {"required": ["role", "content"]}},
    "answer": {"type": "string"},
    "reply": {"type": "string"},
    "found": {"type": ["string", "null"]},
    "right": {"type": "boolean"},
    "finish_reason": {"type": ["string", "null"]},
    "prompt_tokens": {"type": ["integer", "null"]},
    "completion_tokens": {"type": ["integer", "null"]},
    "latency_s": {"type": "number", "minimum": 0},
    "error": {"type": "string"},
}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "tasks": {
            "additionalProperties": {
                "required": SCORE,
                "additionalProperties": False,
                "properties": dict.fromkeys(SCORE, SHARE)
                | {"n": {"type": "integer"}, "failed": {"type": "integer"}},
            }
        },
        "outputs": {
            "items": {
                "additionalProperties": False,
                "properties": OUTPUT,
                "required": [key for key in OUTPUT if key not in ("prompt", "messages", "error")],
                "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
            }
        },
        "latency": {"required": ["mean", "p50", "p90", "p99"]},
        "accuracy": SHARE,
        "data": {"pattern": "^[0-9a-f]{64}$"},
        "arguments": {"type": "object"},
        "complete": {"type": "boolean"},
        "num": {"type": ["integer", "null"]},
        "top_p": SHARE,
        "system": {"type": ["string", "null"]},
        **{key: {"type": "string"} for key in ("target", "version")},
        **{key: {"type": "integer"} for key in ("seed", "max_new_tokens")},
        **{key: {"type": "number", "minimum": 0} for key in POSITIVE},
    },
}
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]


class Known(Asker):
    """Looks replies up by prompt. A reply that begins with ! is an error; None never arrives."""

    target = "known"

    def __init__(self, replies: dict[str, str | None]) -> None:
        self.replies = replies
        self.options: list[Options] = []
        self.opens = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self.opens += 1
        yield

    async def ask(self, problem: Problem, options: Options) -> ModelReply:
        self.options.append(options)
        text = self.replies[problem.conversation[-1].content]
        if text is None:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        assert text is not None
        if text.startswith("!"):
            return ModelReply(error=text[1:])
        return ModelReply(text, "stop", 5, len(text), 0.25)


QUIET = Options(progress=False)


def problem(prompt: str, answer: str, match: str = "exact", task: str = "t") -> Problem:
    return Problem(task, prompt, answer, match=match)


@pytest.mark.parametrize(
    ("right", "number", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), table I, the score method.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_as_published(right: int, number: int, low: float, high: float) -> None:
    found = wilson(right, number)
    assert found == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(number - right, number)
    assert mirrored == pytest.approx((1 - found[1], 1 - found[0]), abs=1e-12)
    for bound in found:  # at the bound the test just rejects the observed share
        if 0 < bound < 1:
            deviation = math.sqrt(bound * (1 - bound) / number)
            assert abs(right / number - bound) / deviation == pytest.approx(Z95)


def test_wilson_ends() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(7, 7)[1] == 1.0 and wilson(0, 7)[0] == 0.0


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    # The p values are from R's binom.test(lost, lost + won).
    [
        (0, 0, 1),
        (0, 6, 0.03125),
        (1, 9, 0.02148438),
        (9, 1, 0.02148438),
        (3, 12, 0.03515625),
        (5, 5, 1),
    ],
)
def test_mcnemar(lost: int, won: int, p: float) -> None:
    assert mcnemar(lost, won) == pytest.approx(p, rel=1e-6)


def lines(path: Path, *entries: object) -> str:
    path.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
    return str(path)


def test_files_of_problems(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = lines(
        tmp_path / "mine.jsonl",
        {"prompt": "two\u2028lines", "answer": 4, "match": "number", "level": "easy"},
        {"messages": turns, "answer": "B", "match": "choice", "task": "talk", "id": 7},
        {"question": "How many?", "answer": "3 * 6 = <<3*6=18>>18\n#### 1,018"},
    )
    first, second, third = read_problems(path)
    assert first == Problem("mine", "two\u2028lines", "4", match="number", id="1")
    assert second.messages == (ChatTurn("system", "s"), ChatTurn("user", "u"))
    assert (second.task, second.id, second.prompt) == ("talk", "7", "")
    assert (third.answer, third.match, third.task) == ("1018", "number", "mine")
    assert third.solution.endswith("#### 1,018") and grade(third, third.solution).right
    copy = str(tmp_path / "copy.jsonl")
    write_problems(copy, [first, second, third])
    assert read_problems(copy) == [first, second, third]
    assert digest(read_problems(copy)) == digest([first, second, third])
    assert digest([first, third]) != digest([third, first])
    assert sorted(tmp_path.iterdir()) == [tmp_path / "copy.jsonl", tmp_path / "mine.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is not an object"),
        ('{"answer": "1"}', 'it has neither: give one of "prompt" and "messages"'),
        ('{"prompt": "a", "messages": [], "answer": "1"}', "it has prompt and messages"),
        ('{"prompt": "a"}', '"answer" is missing'),
        ('{"prompt": "a", "answer": true}', '"answer" is True'),
        ('{"prompt": " ", "answer": "1"}', "\"prompt\" is ' '"),
        ('{"messages": [], "answer": "1"}', '"messages" must be a list that is not empty'),
        ('{"messages": [{"role": "me", "content": "x"}], "answer": "1"}', "message 0 must be"),
        ('{"prompt": "a", "answer": "1", "match": "numbr"}', "did you mean number?"),
        ('{"prompt": "a", "answer": "x", "match": "number"}', "give a number"),
        ('{"prompt": "a", "answer": "1/2", "match": "number"}', "give a number, and nothing"),
        ('{"prompt": "a", "answer": "6 eggs", "match": "number"}', "give a number, and nothing"),
        ('{"prompt": "a \\ud800 b", "answer": "1"}', '"prompt" has half a surrogate pair'),
        ('{"prompt": "a", "answer": "\\udfff"}', '"answer" has half a surrogate pair'),
        ('{"prompt": "a", "answer": "1", "task": "\\ud800"}', '"task" has half'),
        ('{"prompt": "a", "answer": "1", "id": "\\ud800"}', '"id" has half'),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}], "answer": "1"}',
            '"messages" has half',
        ),
        ('{"prompt": "a", "answer": "1", "task": "all"}', 'its task is "all"'),
        ('{"question": "a", "answer": "#### none"}', "give a number"),
        ('{"prompt": "a", "answer": "F", "match": "choice"}', "give a letter from A to E"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data is checked before the model is loaded."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "good", "answer": "1"}\n\n' + line + "\n")
    assert main(["eval", "--model-path", "tiny:qwen3_moe", "--data", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"--data {path}, line 3: " in error and message in error


def test_a_question_need_not_be_of_gsm8k(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "q.jsonl",
        {"question": "Capital of France?", "answer": "Paris"},
        {"question": "3 * 6?", "answer": "18"},
        {"question": "3 * 6?", "answer": "18", "match": "exact"},
        {"question": "A pair?", "answer": "😀"},
    )
    found = read_problems(path)
    assert [one.match for one in found] == ["auto", "number", "exact", "auto"]
    assert grade(found[0], "Paris").right and grade(found[1], "It is 18.0.").right


def test_what_a_problem_breaks_is_its_own() -> None:
    """One problem's error does not affect the others: Known raises KeyError for b."""
    problems = [problem("a", "1"), problem("b", "1"), problem("c", "1")]
    result = evaluate(Known({"a": "1", "c": "1"}), problems, QUIET)
    assert (result.failed, result.complete, result.accuracy) == (1, True, 2 / 3)
    assert result.outputs[1].error == "KeyError: 'b'"
    assert [one.right for one in result.outputs] == [True, False, True]


def test_names_cannot_write_to_the_terminal() -> None:
    """Names print no escape sequences and no fake lines of a table."""
    evil = "t\x1b[2J\nall  9  1.0000"
    problems = [
        Problem(evil, "a", "\x1b]0;x\x07", match="exact", id="i\nj"),
        Problem("u", "b", "1", match="exact"),
    ]
    result = evaluate(Known({"a": "2", "b": "!no\x1b[31m\nmore"}), problems, QUIET)
    texts = [table(result), failures(result, 9), *errors(result)]
    texts.append(block(("a", "b"), result, evaluate(Known({"a": "2", "b": "1"}), problems, QUIET)))
    assert all(char.isprintable() or char == "\n" for text in texts for char in text)
    assert sum(line.startswith("all ") for line in texts[0].splitlines()) == 1
    assert "t�[2J�all  9  1.0000 i�j: wanted �]0;x�" in texts[1]
    assert texts[3] == "  1 x no�[31m�more"


def test_figures_of_a_run() -> None:
    asker = Known({"a": "1", "b": "2", "c": "", "d": "!no", "e": "5"})
    problems = [
        problem("a", "1"),
        problem("b", "1"),
        problem("c", "1"),
        problem("d", "1"),
        Problem("u", "", "5", messages=(ChatTurn("system", "s"), ChatTurn("user", "e")), id="z"),
    ]
    result = evaluate(asker, problems, Options(progress=False, seed=3, num=4))
    assert (asker.opens, len(asker.options)) == (1, 5)
    t, low_high = result.tasks["t"], wilson(1, 4)
    assert (t.accuracy, t.invalid, t.n, t.failed) == (0.25, 0.25, 4, 1)
    assert (t.ci_low, t.ci_high) == low_high
    assert result.failed == 1 and result.complete
    assert (result.latency.mean, result.latency.p99) == (0.25, 0.25)
    assert result.output_throughput == pytest.approx(3 / result.seconds)
    assert result.requests_per_second == pytest.approx(4 / result.seconds)
    written = json.loads(result.to_json())
    jsonschema.validate(written, SCHEMA)
    assert [one["id"] for one in written["outputs"]] == ["0", "1", "2", "3", "z"]
    assert written["outputs"][3]["error"] == "no" and "messages" in written["outputs"][4]
    assert msgspec.json.decode(result.to_json(), type=Result) == result
    assert errors(result) == ["1 requests failed and count as wrong:", "  1 x no"]
    assert failures(result, 1).startswith("3 wrong replies, 1 shown\n--- t 1: wanted 1, found 2")
    rows = [line.split() for line in table(result).splitlines()]
    assert rows[1][:6] == ["t", "4", "0.2500", "0.0456–0.6994", "25.0%", "1"]
    assert rows[3][:3] == ["all", "5", "0.2000"]


def test_ctrl_c_keeps_what_there_is() -> None:
    result = evaluate(
        Known({"a": "1", "b": "0", "c": None}),
        [problem("a", "1"), problem("b", "1"), problem("c", "1")],
        Options(progress=False, concurrency=1),
    )
    assert (result.complete, len(result.outputs), result.accuracy) == (False, 2, 0.5)
    assert "interrupted" in table(result)


def test_no_problems() -> None:
    with pytest.raises(ValueError, match="there are no problems"):
        evaluate(Known({}), [])


def save(path: Path, replies: dict[str, str | None], problems: list[Problem]) -> str:
    path.write_bytes(evaluate(Known(replies), problems, QUIET).to_json())
    return str(path)


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six answers are lost and none is won, for which R gives p = 0.03125."""
    names = "abcdefgh"
    problems = [problem(name, "1", task="t" if name < "e" else "u") for name in names]
    a = save(tmp_path / "a.json", dict.fromkeys(names, "1"), problems)
    wrong = {name: "1" if name in "ah" else "2" for name in names}
    b = save(tmp_path / "b.json", wrong, problems)
    assert main(["eval", "--compare", a, b]) == 0
    text = capsys.readouterr().out
    assert "the same 8 problems" in text and "6 of 8 texts differ" in text
    assert "right in A, wrong in B: 6 (t/1, t/2, t/3, u/4, u/5, u/6)" in text
    assert "wrong in A, right in B: 0\n" in text and "McNemar's exact p: 0.03125" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["t", "4", "1.0000", "0.2500", "-0.7500"] in rows
    assert ["all", "8", "1.0000", "0.2500", "-0.7500"] in rows
    assert main(["eval", "--compare", a, a]) == 0
    assert "all 8 texts are identical" in capsys.readouterr().out
    assert main(["eval", "--compare", a]) == 2
    assert main(["eval", "--compare", a, str(tmp_path)]) == 2


def test_compare_of_other_problems() -> None:
    """A problem that occurs twice in both runs makes two pairs."""
    a = evaluate(Known({"a": "1", "b": "1"}), [problem("a", "1")] * 2 + [problem("b", "1")], QUIET)
    b = evaluate(Known({"a": "1", "c": "1"}), [problem("a", "1")] * 2 + [problem("c", "1")], QUIET)
    found = compare(a, b)
    assert (len(found.pairs), found.alone, found.differing) == (2, (1, 1), 0)
    assert "2 problems in common; 1 only in A, 1 only in B" in block(("a", "b"), a, b)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--data {data}", "nothing to evaluate: give --model-path DIR, or --base-url URL"),
        ("--base-url http://x --model-path y", "--base-url http://x and --model-path y: keep one"),
        ("M --base-url http://x", "--base-url http://x and --model-path M: keep one"),
        ("--base-url x:1 --data {data}", "--base-url is 'x:1': give http://HOST:PORT"),
        ("--base-url http://x --tp 2", "--tp-size: for an engine, not for a server at --base-url"),
        ("A --model B", "two models, A and --model B: keep one"),
        ("tiny:qwen3_moe --data {data} --out no/such/x.json", "--out no/such/x.json: there is no"),
        ("tiny:qwen3_moe --data {data} --out .", "--out . is a folder: name a file"),
        ("tiny:qwen3_moe --data gone.jsonl", "--data gone.jsonl: cannot be read"),
        ("tiny:qwen3_moe --skip-tokenizer-init", "an evaluation needs a tokenizer"),
        ("tiny:qwen3_moe --num 0", "--num is 0: give at least 1"),
        ("tiny:qwen3_moe --data {data} --out=", "--out is empty: name a file"),
        ("tiny:qwen3_moe --data {data} --out /proc/x.json", "--out /proc/x.json: nothing can be"),
        ("tiny:qwen3_moe --data {data} --out {loop}", "--out {loop}: nothing can be written"),
        ("--data {data} --write-data=", "--write-data is empty: name a file"),
        ("tiny:qwen3_moe --data {data} --system=", "--system is '': give a text"),
        ("--base-url http://127.0.0.1:9 --port 3", "--port: for an engine, not for a server"),
        ("tiny:qwen3_moe --timeout 3", "--timeout: for a server, and there is no --base-url"),
        ("tiny:qwen3_moe --extra-body {{}}", "--extra-body: for a server, and there is no"),
        ("--base-url http://x --extra-body [1]", "--extra-body is not an object"),
        ("--base-url http://x --extra-body {{", "--extra-body is not JSON"),
        ("--base-url http://x --timeout 0", "--timeout is 0.0: give"),
        ("--base-url u:SECRET@x:1", "--base-url is 'x:1': give http://HOST:PORT"),
        ("--base-url ftp://u:SECRET@x", "--base-url is 'x': give http://HOST:PORT"),
        ("--base-url http://u:SEC/RET@x", "--base-url has an @ after its first /"),
        ("--base-url http://u:SECRET@x M", "--base-url http://x and --model-path M: keep one"),
        ("--base-url http://u:SECRET@x --api-key k --data {data}", "a name before http://x and"),
    ],
)
def test_wrong_flags(
    argv: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, loop = lines(tmp_path / "d.jsonl", {"prompt": "a", "answer": "1"}), tmp_path / "loop"
    loop.symlink_to(loop)
    assert main(["eval", *argv.format(data=data, loop=loop).split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message.format(loop=loop)}") and captured.out == ""
    assert "SECRET" not in captured.err and "RET" not in captured.err


@pytest.mark.parametrize(
    "text",
    [
        "http://h:1",
        "http://h:1/",
        "http://h:1/v1",
        "http://h:1/v1/",
        "http://h:1/v1/chat/completions",
        "http://h:1/v1/chat/completions/",
        "http://u:p%40@h:1/v1",
    ],
)
def test_addresses_of_one_server(text: str) -> None:
    place = ServerUrl.of(text)
    assert place.url == "http://h:1" and "p@" not in repr(place)
    assert place.login == ("u:p@" if "@" in text else "")
    assert ServerUrl.of(text.replace("h:1", "h:1/proxy")).url == "http://h:1/proxy"


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    """Writing keeps a pipe a pipe and a link a link, and keeps a file's mode."""
    pipe, file, link = (tmp_path / name for name in ("pipe", "file", "link"))
    dangling, new = tmp_path / "dangling", tmp_path / "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to(file)
    dangling.symlink_to("new")
    for path in (pipe, link, dangling):
        check_target("--out", str(path))
        write_whole(path, b"content")
    assert os.read(reader, 100) == b"content" and pipe.is_fifo()
    os.close(reader)
    assert link.is_symlink() and file.read_bytes() == b"content"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert dangling.is_symlink() and new.read_bytes() == b"content"
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "file", "link", "dangling", "new"}


def test_two_runs_with_one_file(tmp_path: Path) -> None:
    """Concurrent writers never mix their contents."""
    path, contents = tmp_path / "out", [bytes([65 + n]) * 100_000 for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: write_whole(path, content), contents * 4))
    assert path.read_bytes() in contents and list(tmp_path.iterdir()) == [path]


def test_a_task_that_is_nearly_exhausted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing stops although a long tail yields a new problem now and then."""
    draws = 0

    def tail(rng: random.Random) -> Problem:
        nonlocal draws
        draws += 1
        return Problem("tail", str(int(rng.random() ** -1.5)), "1")

    monkeypatch.setitem(draw.TASKS, "tail", tail)
    with pytest.raises(ValueError, match=r"task tail: only \d+ distinct test problems") as e:
        draw.distinct("tail", "test", 0, 100_000)
    found = int(str(e.value).split("only ")[1].split()[0])
    assert 10 < found < 5_000
    assert draws < 40 * (draw.FREE_DRAWS + draw.DRAWS_EACH * found)
    few = draw.distinct("tail", "test", 0, found)
    assert len({one.prompt for one in few}) == found


def test_write_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Writes the first problems of each task."""
    entries = [{"prompt": f"{n}", "answer": "1", "task": "ab"[n % 2]} for n in range(6)]
    data, out = lines(tmp_path / "d.jsonl", *entries), tmp_path / "out.jsonl"
    flags = ["--data", data, "--num", "2", "--write-data", str(out)]
    assert main(["eval", *flags]) == 0
    assert capsys.readouterr().out == f"wrote 4 problems to {out}\n"
    assert [one.prompt for one in read_problems(str(out))] == ["0", "1", "2", "3"]


def test_drawn_problems_are_those_kept_for_testing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Problems survive writing and reading, and the solution of each is graded as right."""
    files = [str(tmp_path / name) for name in ("a", "b", "c")]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        flags = ["--tasks", "all", "--num", "5", "--seed", str(seed), "--write-data", file]
        assert main(["eval", *flags]) == 0
    first, again, other = (read_problems(file) for file in files)
    assert first == again != other
    assert len(first) == 5 * len({one.task for one in first}) >= 30
    assert all(is_kept(one.prompt) and grade(one, one.solution).right for one in [*first, *other])
    flags = ["--tasks", "words,list", "--write-data", files[0]]
    assert main(["eval", *flags]) == 2
    assert "unknown task list: choose of words, lists," in capsys.readouterr().err


def test_drawn_and_own_problems_together(tmp_path: Path) -> None:
    data = lines(tmp_path / "mine.jsonl", *[{"prompt": "a", "answer": "1"}] * 3)
    out = str(tmp_path / "out")
    flags = ["--tasks", "lists", "--num", "2", "--data", data, "--write-data", out]
    assert main(["eval", *flags]) == 0
    assert [one.task for one in read_problems(out)] == ["lists"] * 2 + ["mine"] * 2
