"""The MPS daemon of a server. A fake program handles files and processes as NVIDIA's does."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moesaic.comm.launch import mps_owner as mps_watch
from moesaic.comm.launch.mps import (
    CROWD,
    PROGRAM,
    QUEUES,
    cramped,
    crowd,
    describe_daemon,
    start_mps,
    terminate_client,
)
from moesaic.comm.launch.mps_owner import LOGS, PIPES, mps_processes
from moesaic.comm.launch.service import Service, ServiceSpec
from moesaic.comm.mesh import Mesh
from moesaic.config.gpus import PERCENT

PROGRAM_TEXT = """#!/bin/sh
control="${CUDA_MPS_PIPE_DIRECTORY:-$FAKE/default}/control"
case "$1" in
-d)
    echo "$CUDA_MPS_PIPE_DIRECTORY $CUDA_VISIBLE_DEVICES" >> "$FAKE/starts"
    if [ -e "$FAKE/fails" ]; then
        echo "no GPU here" > "$CUDA_MPS_LOG_DIRECTORY/control.log"
        echo "a daemon is already running" >&2
        exit 1
    fi
    : > "$control"
    "$0" -f > /dev/null 2>&1 &
    ;;
-f)
    while [ -e "$control" ] || [ -e "$FAKE/stubborn" ]; do sleep 0.05; done
    ;;
*)
    read -r command
    case "$command" in
    get_server_list) [ -e "$control" ] && echo 77 ;;
    terminate_client*) echo "$command" >> "$FAKE/terminated" ;;
    quit) rm "$control" ;;
    esac
    ;;
esac
"""
# A minimal server: it starts the daemon, prints its folder, and waits to be killed.
SERVER = """
import sys, time
from moesaic.comm.launch.mps import start_mps
print(start_mps().environment["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
time.sleep(60)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the fake program, which also records its calls."""
    program = tmp_path / PROGRAM
    program.write_text(PROGRAM_TEXT)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("moesaic.comm.launch.mps.DEFAULT_PIPES", str(tmp_path / "default"))
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.delenv(LOGS, raising=False)
    return tmp_path


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_daemon_of_our_own(fake: Path, monkeypatch: pytest.MonkeyPatch):
    """The daemon starts once, in private folders, and leaves nothing behind."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    mps = start_mps()
    pipes = mps.environment[PIPES]
    assert mps.is_own
    assert any(mps_processes(pipes))
    assert os.stat(pipes).st_mode & 0o777 == 0o700
    assert Path(mps.environment[LOGS]).is_dir()
    assert os.environ.get(PIPES) is None
    # The daemon sees all GPUs, even if this process does not.
    assert (fake / "starts").read_text() == f"{pipes} \n"
    assert set(mps.environment) == {PIPES, LOGS}
    mps.stop()
    assert list(mps_processes(pipes)) == []
    assert not Path(pipes).parent.exists()
    mps.stop()


def test_a_process_that_is_to_be_killed_computes_no_longer(
    fake: Path, monkeypatch: pytest.MonkeyPatch
):
    assert not terminate_client(4711), "no daemon answers"
    with start_mps() as mps:
        for name, value in mps.environment.items():
            monkeypatch.setenv(name, value)
        assert terminate_client(4711)
    assert (fake / "terminated").read_text() == "terminate_client 77 4711\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_dies_leaves_nothing(number: int, fake: Path):
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pipes = server.stdout.readline().strip()
    assert any(mps_processes(pipes))
    server.send_signal(number)
    server.wait()
    server.stdout.close()
    assert until(lambda: not any(mps_processes(pipes)))
    assert until(lambda: not Path(pipes).parent.exists())


def test_a_daemon_that_does_not_go_is_killed(fake: Path, monkeypatch: pytest.MonkeyPatch):
    (fake / "stubborn").touch()
    monkeypatch.setattr(mps_watch, "QUIT_SECONDS", 0.3)
    monkeypatch.setenv(PIPES, str(fake))
    monkeypatch.setenv(LOGS, str(fake))
    program = str(fake / PROGRAM)
    assert mps_watch.start(program) == ""
    assert any(mps_processes(str(fake)))
    mps_watch.stop(program)
    assert until(lambda: not any(mps_processes(str(fake))))


def test_the_daemon_of_the_user(fake: Path, monkeypatch: pytest.MonkeyPatch):
    """The server uses the user's daemon and does not stop it."""
    monkeypatch.setenv(PIPES, str(fake))
    (fake / "control").touch()
    with start_mps() as mps:
        assert mps.environment == {PIPES: str(fake)}
        assert not mps.is_own
        # Other programs may use this daemon: waiting ranks must leave room for them.
        assert mps.for_ranks(4) == {PIPES: str(fake), CROWD: "60", PERCENT: "50"}
        assert mps.for_ranks(8)[PERCENT] == "50"
        assert mps.for_ranks(2) == {PIPES: str(fake), CROWD: "60"}
        assert mps.for_ranks(1) == {}
    assert (fake / "control").exists()
    assert not (fake / "starts").exists()


def test_a_daemon_that_nobody_named(fake: Path, caplog: pytest.LogCaptureFixture):
    """The server leaves the default daemon alone; the log says how to use it."""
    folder = fake / "default"
    folder.mkdir()
    (folder / "control").touch()
    with start_mps() as mps:
        assert mps.is_own and mps.environment[PIPES] != str(folder)
    assert f"the daemon in {folder} is left alone; {PIPES}={folder} takes it" in caplog.text
    assert (folder / "control").exists()


@pytest.mark.parametrize(
    ("given", "wanted"), [("1", None), ("8", None), ("32", "8"), (" 32", "8"), ("", None)]
)
def test_queues_are_left_for_other_ranks(
    given: str, wanted: str | None, fake: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(QUEUES, given)
    with start_mps() as mps:
        assert mps.environment.get(QUEUES) == wanted


@pytest.mark.parametrize(
    ("sharers", "given", "wanted"),
    [(2, "", None), (3, "", "67"), (4, "", "50"), (8, "", "25"), (8, "60", None)],
)
def test_processors_are_left_for_other_ranks(
    sharers: int, given: str, wanted: str | None, fake: Path, monkeypatch: pytest.MonkeyPatch
):
    """A rank may use twice its part; the user's own setting has precedence."""
    monkeypatch.setenv(PERCENT, given)
    with start_mps() as mps:
        assert mps.for_ranks(sharers).get(PERCENT) == wanted
        assert mps.for_ranks(sharers)[PIPES] == mps.environment[PIPES]
        assert mps.for_ranks(1) == {}
        assert mps.for_ranks(sharers)[CROWD] == "0"


def test_what_a_server_would_use(fake: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mps_watch, "mps_processes", lambda pipes=None: iter(()))
    assert describe_daemon() == "none runs; a server starts its own"
    monkeypatch.setenv(PIPES, str(fake))
    assert describe_daemon().startswith(f"none answers in {fake}, which {PIPES} names; ")
    (fake / "control").touch()
    assert describe_daemon() == f"the one in {fake}, as {PIPES} says"
    (fake / PROGRAM).unlink()
    assert describe_daemon() == f"{PROGRAM} is not on PATH"


def test_what_has_ended_is_no_daemon(fake: Path):
    """A zombie process does not count as a daemon."""
    (fake / "stubborn").touch()
    ended = subprocess.Popen([fake / PROGRAM, "-f"])
    assert ended.pid in set(mps_processes())
    ended.kill()
    state = Path(f"/proc/{ended.pid}/stat")
    assert until(lambda: state.read_text().rpartition(") ")[2].startswith("Z"))
    assert ended.pid not in set(mps_processes())
    ended.wait()


def test_a_folder_without_a_daemon(
    fake: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv(PIPES, str(fake / "stale"))
    with start_mps() as mps:
        assert mps.is_own
        assert mps.environment[PIPES] != str(fake / "stale")
    assert f"no daemon answers in {fake / 'stale'}, which {PIPES} names: starting" in caplog.text


def test_a_daemon_that_does_not_start(fake: Path):
    (fake / "fails").touch()
    with pytest.raises(RuntimeError) as caught:
        start_mps()
    assert str(caught.value) == (
        f"no MPS daemon: {fake / PROGRAM} -d ended with 1: a daemon is already running | no GPU "
        "here; ranks that share a GPU need it: fix that, or give each rank a GPU of its own"
    )
    assert list(fake.glob("moesaic-mps-*")) == []


def test_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=f"^{PROGRAM} is not on PATH: .*: install it, or give"):
        start_mps()


def test_no_torch():
    """The process that starts ranks does not import torch, so it stays small."""
    code = (
        "import sys, moesaic.comm.launch.mps, moesaic.config.gpus; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_that_ranks_import_open_no_cuda():
    """A process that opens CUDA before it knows of the daemon never connects to it."""
    files = sorted((Path(__file__).parents[1] / "distributed").glob("*_gpu.py"))
    assert len(files) >= 3
    functions = (ast.FunctionDef, ast.ClassDef)
    for path in files:
        at_import = [n for n in ast.parse(path.read_text()).body if not isinstance(n, functions)]
        assert "torch.cuda" not in "\n".join(map(ast.unparse, at_import)), path


def test_ranks_on_the_daemon_of_the_user(
    fake: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Ranks learn from the service that others may use the daemon, not from its environment."""
    monkeypatch.delenv("TMPDIR")
    monkeypatch.delenv(PERCENT, raising=False)
    monkeypatch.setenv(PIPES, str(fake))
    monkeypatch.setenv(CROWD, "7")
    (fake / "control").touch()
    spec = ServiceSpec(Mesh(), "tests.distributed.fake_rank:run", gpu_sharers=8)
    with caplog.at_level("INFO"):
        service = Service.start(spec)
    try:
        rank = service.facts["ranks"][0]["pid"]  # type: ignore[index]
        environment = Path(f"/proc/{rank}/environ").read_bytes().decode().split("\0")
        assert {f"{PIPES}={fake}", f"{CROWD}=60", f"{PERCENT}=50"} < set(environment)
    finally:
        service.close()
    assert "each rank waits with one program" in caplog.text
    assert "a rank computes on up to 50% of processors" in caplog.text


def test_fewer_processors_than_may_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CROWD, "60")
    assert cramped(66) == "" and crowd() == 60
    assert re.match(
        "a rank may compute on 17 processors .* 60 ranks .*: have no other", cramped(17)
    )
    for alone in ("0", ""):
        monkeypatch.setenv(CROWD, alone)
        assert cramped(17) == "" and crowd() == 0


@pytest.mark.parametrize(
    ("given", "wanted"), [({}, "50"), ({PERCENT: "70"}, "70")], ids=["ours", "the caller's"]
)
def test_ranks_that_share_a_gpu_have_the_daemon_of_their_service(
    given: dict[str, str], wanted: str, fake: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ranks get the service's daemon, and the caller's share of processors if it is set."""
    monkeypatch.delenv("TMPDIR")  # too long for the supervisor's sockets
    monkeypatch.delenv(PERCENT, raising=False)
    spec = ServiceSpec(Mesh(), "tests.distributed.fake_rank:run", gpu_sharers=4)
    service = Service.start(spec, given)
    try:
        rank = service.facts["ranks"][0]["pid"]  # type: ignore[index]
        environment = Path(f"/proc/{rank}/environ").read_bytes().decode().split("\0")
        (pipes,) = (fake / "starts").read_text().split()[:1]
        assert f"{PIPES}={pipes}" in environment and f"{PERCENT}={wanted}" in environment
        # For a moment there are two, until the child of the fake program changes its name.
        assert until(lambda: len(list(mps_processes(pipes))) == 1)
    finally:
        service.close()
    assert until(lambda: not list(mps_processes(pipes))) and not Path(pipes).exists()


def test_without_the_program_no_rank_is_started(fake: Path):
    (fake / PROGRAM).unlink()
    spec = ServiceSpec(Mesh(), "tests.distributed.fake_rank:run", gpu_sharers=4)
    with pytest.raises(RuntimeError, match=f"{PROGRAM} is not on PATH: ranks that share a GPU"):
        Service.start(spec)
