"""Processes of ranks have no secrets, also when the fork server had to be started again."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import multiprocessing.forkserver as forkserver
import os, signal, sys
from moesaic.comm.supervise.spawner import Spawner, kill_children

def start(name):
    spawner.start(name, "os:system", f"env > {sys.argv[1]}/{name}")
    while not (found := spawner.started.drain()):
        pass
    assert not isinstance(found[0], Exception), found
    found[0].join(30)

spawner = Spawner([])
start("first")
pid = forkserver._forkserver._forkserver_pid
os.kill(pid, signal.SIGKILL)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
start("second")
assert forkserver._forkserver._forkserver_pid != pid
assert os.environ["MOESAIC_SECRET"] == "hidden"
kill_children()
os._exit(0)
"""


def test_no_process_gets_a_secret(tmp_path: Path) -> None:
    environment = os.environ | {"MOESAIC_SECRET": "hidden", "OTHER": "seen"}
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    subprocess.run(program, env=environment, check=True, timeout=60)
    for name in ("first", "second"):
        found = (tmp_path / name).read_text()
        assert "OTHER=seen" in found and "hidden" not in found, name
