"""torchrun starts a process for each rank: one of each node launches, the others wait."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic.comm.launch.torchrun import Torchrun
from moesaic.comm.supervise.run_folder import RunFolder, mark_of, user_folder

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_environment_of_torchrun():
    assert Torchrun.find({}) is None
    found = Torchrun.find(TORCHRUN)
    assert found == Torchrun(8, 1, 2, 1, "10.0.0.1:29501", 0)
    assert not found.is_launcher
    assert str(found.place) == "torchrun: this is node 1 of 2, which meet at 10.0.0.1:29501"
    ipv6 = Torchrun.find(TORCHRUN | {"MASTER_ADDR": "fd00::1"})
    assert ipv6 is not None and ipv6.dist_init_addr == "[fd00::1]:29501"
    alone = Torchrun.find(TORCHRUN | {"WORLD_SIZE": "4", "GROUP_RANK": "0", "LOCAL_RANK": "0"})
    assert (alone.nnodes, alone.dist_init_addr, alone.is_launcher) == (1, None, True)
    with pytest.raises(ValueError, match="'RANK'"):
        Torchrun.find(TORCHRUN | {"RANK": ""})


WORKER = """
import os, pathlib, signal, sys, time
from moesaic.comm.launch.torchrun import Torchrun
run, folder = Torchrun.find(), pathlib.Path(sys.argv[1])
if run.is_launcher:
    time.sleep(0.3)  # the others come first
    with run.launching():
        (folder / "launched").write_text(f"{run.world} {run.nnodes}")
        time.sleep(0.5)
        (folder / "ended").touch()
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "kill" else None
else:
    run.wait_for_launcher()
    assert (folder / "ended").exists()
    (folder / f"waited{run.local_rank}").touch()
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_processes_of_torchrun_wait_for_the_launcher(tmp_path: Path, end: str):
    """The launcher and two others with one parent, as torchrun starts them; a third comes when all
    is over."""
    both = {**os.environ, **TORCHRUN, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    both["TORCHELASTIC_RESTART_COUNT"] = {"exit": "1000", "kill": "1001"}[end]

    def start(rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WORKER, str(tmp_path), end]
        return subprocess.Popen(command, env=both | {"LOCAL_RANK": str(rank)})

    codes = [worker.wait(60) for worker in [start(rank) for rank in (1, 2, 0)]]
    assert codes == [0, 0, 0 if end == "exit" else -signal.SIGKILL]
    assert (tmp_path / "launched").read_text() == "4 1"
    RunFolder.create().remove()  # sweeps
    assert start(3).wait(60) == 0
    assert all((tmp_path / f"waited{rank}").exists() for rank in (1, 2, 3))
    user_folder().joinpath(
        mark_of("torchrun", os.getpid(), int(both["TORCHELASTIC_RESTART_COUNT"]))
    ).unlink()


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ("--tp 2", "the flags ask for 2 ranks: give --nproc-per-node 2, or --tp-size 4"),
        ("--tp 4 --pp 2", "the flags ask for 8 ranks: give --nproc-per-node 8, or --tp-size 2"),
        ("--tp 1", "the flags ask for 1 rank: give --nproc-per-node 1, or --tp-size 4"),
        ("--tp 6 --ep 6", "the flags ask for 6 ranks: give --nproc-per-node 6"),
    ],
)
def test_wrong_count_of_processes(
    flags: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    alone = {"WORLD_SIZE": "4", "LOCAL_RANK": "0", "RANK": "0", "GROUP_RANK": "0"}
    for name, value in (TORCHRUN | alone).items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "no/such/model", *flags.split()]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: torchrun started 4 processes and {advice}"


def test_torchruns_node_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name, value in (TORCHRUN | {"LOCAL_RANK": "0", "RANK": "4"}).items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO"):
        assert main(["serve", "no/such/model", "--tp", "8"]) == 2
    assert "torchrun: this is node 1 of 2, which meet at 10.0.0.1:29501" in caplog.messages
