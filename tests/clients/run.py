"""Runs clients that others wrote, each from its real package, against the server.

    python -m tests.clients.run openai litellm      # all of them without a name

Every tool has an environment of its own in .venv-clients. Its tests run there, by pytest. Two
servers answer: the house model, whose replies are compared with those of transformers, and a tiny
model that calls tools."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.http_server import free_port

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REQUIREMENTS = HERE / "requirements"
ENVIRONMENTS = ROOT / ".venv-clients"
SECONDS = 900  # for the tests of one tool
SERVERS = {
    "house": "models/house-moe --dtype float32",
    "tiny": "tiny:qwen2_moe --metric-names sglang",
}


@dataclass(frozen=True)
class Tool:
    package: str | None  # its version is in the table; None: a program, which is not installed here
    files: tuple[str, ...]
    program: str = ""  # how to install it


TOOLS = {
    "openai": Tool("openai", ("client_openai.py",)),
    "anthropic": Tool("anthropic", ("client_anthropic.py",)),
    "langchain-openai": Tool("langchain-openai", ("client_langchain.py",)),
    "litellm": Tool("litellm", ("client_litellm.py",)),
    "openai-agents": Tool("openai-agents", ("client_openai_agents.py",)),
    "pydantic-ai": Tool("pydantic-ai-slim", ("client_pydantic_ai.py",)),
    "instructor": Tool("instructor", ("client_instructor.py",)),
    "lm-eval": Tool("lm-eval", ("client_lm_eval.py",)),
    "sglang": Tool("sglang", ("client_sglang_lang.py", "client_sglang_bench.py")),
    "guidellm": Tool("guidellm", ("client_guidellm.py",)),
    "aiperf": Tool("aiperf", ("client_aiperf.py",)),
    "ollama": Tool("ollama", ("client_ollama.py",)),
    "promtool": Tool(None, ("client_promtool.py",), "Debian: apt install prometheus"),
}


@dataclass(frozen=True)
class Outcome:
    tool: str
    version: str
    result: str
    seconds: float
    ok: bool
    ran: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all tests pass that can run; a tool that is asked for by its name must run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=" ".join(TOOLS))
    named = parser.parse_args(argv).tools
    chosen = named or list(TOOLS)
    if unknown := [name for name in chosen if name not in TOOLS]:
        parser.error(f"unknown tools: {' '.join(unknown)}; there are: {' '.join(TOOLS)}")
    ENVIRONMENTS.mkdir(exist_ok=True)
    absent = [not_run(name, ok=not named) for name in chosen if is_absent(name)]
    chosen = [name for name in chosen if not is_absent(name)]
    outcomes = run_tools(chosen) if chosen else []
    print(table([*outcomes, *absent]))
    return not all(outcome.ok for outcome in [*outcomes, *absent])


def is_absent(name: str) -> bool:
    return TOOLS[name].package is None and shutil.which(name) is None


def not_run(name: str, ok: bool) -> Outcome:
    result = f"NOT RUN: it is not installed ({TOOLS[name].program})"
    return Outcome(name, "-", result, 0, ok, ran=False)


def run_tools(chosen: list[str]) -> list[Outcome]:
    pythons = {name: environment(name) for name in chosen}
    outcomes = []
    with servers() as given:
        for number, name in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {name}", flush=True)
            outcomes.append(run_tool(name, pythons[name], given))
    return outcomes


def environment(name: str) -> Path:
    """The Python that has the tool; it is made anew when the requirements change."""
    if TOOLS[name].package is None:
        return Path(sys.executable)
    files = sorted(REQUIREMENTS.glob(f"{name}.*"))
    folder, wanted = ENVIRONMENTS / name, "".join(file.read_text() for file in files)
    python, stamp = folder / "bin" / "python", folder / "requirements"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {name} in {folder.relative_to(ROOT)}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        for file in reversed(files):  # NAME.txt, then NAME.no-deps.txt
            options = ["--no-deps"] if "no-deps" in file.name else ["pytest"]
            pip = [python, "-m", "pip", "install", "--quiet", *options, "--requirement", file]
            subprocess.run(pip, check=True)
        stamp.write_text(wanted)
    return python


@contextmanager
def servers() -> Iterator[Path]:
    """A file that has the addresses of the servers and what they must answer."""
    from tests.clients.expected import expected_answers

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print("starting the servers", flush=True)
        given: dict[str, Any] = {"profile_dir": str(folder)}
        given |= {name: stack.enter_context(server(name, folder)) for name in SERVERS}
        print("asking transformers", flush=True)
        given |= expected_answers(ROOT / "models/house-moe")
        file = folder / "given.json"
        file.write_text(json.dumps(given))
        yield file


@contextmanager
def server(name: str, profile_dir: Path) -> Iterator[str]:
    port = free_port()
    flags = f"{SERVERS[name]} --port {port} --enable-metrics --enable-cache-report"
    flags += f" --profile-dir {profile_dir}"
    command = [sys.executable, "-m", "moesaic.launch_server", "--model-path", *flags.split()]
    log = ENVIRONMENTS / f"server-{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, cwd=ROOT
        )
    try:
        assert process.stdout is not None
        if not process.stdout.readline().startswith("ready: "):
            raise SystemExit(f"the server of {SERVERS[name]} did not start: see {log}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def run_tool(name: str, python: Path, given: Path) -> Outcome:
    start = time.monotonic()
    options = f"-q -rs --tb=short -p no:warnings -c /dev/null --rootdir {HERE}".split()
    files = [str(HERE / file) for file in TOOLS[name].files]
    log = ENVIRONMENTS / f"{name}.log"
    command = [str(python), "-m", "pytest", *options, *files]
    status = limited(command, settings(python, given), log)
    output = log.read_text(errors="replace").strip()
    print(output if status else "    " + output.rpartition("\n")[2], flush=True)
    result = "no end" if status is None else output.rpartition("\n")[2].partition(" in ")[0]
    return Outcome(name, version(name, python), result, time.monotonic() - start, status == 0)


def settings(python: Path, given: Path) -> dict[str, str]:
    """Nothing of the caller's keys and addresses, no downloads, no reports to makers."""
    kept = {key: os.environ[key] for key in ("HOME", "LANG", "TMPDIR") if key in os.environ}
    return kept | {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "MOESAIC_CLIENTS": str(given),
        "HF_HUB_OFFLINE": "1",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "DO_NOT_TRACK": "1",
    }


def limited(command: list[str], environ: dict[str, str], log: Path) -> int | None:
    """The exit status; None: it took too long, and it and its children were ended."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=ROOT, env=environ, start_new_session=True
        )
    try:
        return process.wait(timeout=SECONDS)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None


def version(name: str, python: Path) -> str:
    package = TOOLS[name].package
    if package is None:
        said = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
        return said.split()[2]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def table(outcomes: list[Outcome]) -> str:
    rows = [("tool", "version", "result", "s")]
    rows += [(o.tool, o.version, o.result, f"{o.seconds:.0f}") for o in outcomes]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(("", *lines, summary(outcomes)))


def summary(outcomes: list[Outcome]) -> str:
    """How many tools passed, and which failed or had tests that did not run."""
    absent = [o.tool for o in outcomes if not o.ran]
    failed = [o.tool for o in outcomes if o.ran and not o.ok]
    skipped = [o.tool for o in outcomes if o.ok and "skipped" in o.result]
    others = {"failed": failed, "skipped": skipped, "not run": absent}
    num_passed = len(outcomes) - sum(map(len, others.values()))
    parts = [f"passed: {num_passed} of {len(outcomes)}"]
    parts += [f"{what}: {', '.join(names)}" for what, names in others.items() if names]
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
