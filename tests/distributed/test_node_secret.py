"""The secret that nodes share: where it comes from, who has it, and what is refused without it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.http_server import free_port
from moesaic.cli.main import main
from moesaic.comm.launch.service import Service
from moesaic.comm.network.handshake import Identity, Role
from moesaic.comm.network.listener import Listener
from moesaic.comm.network.node_secret import NO_SECRET, check_is_secret, own_secret
from moesaic.comm.network.store import StoreTable
from moesaic.comm.supervise.address import check_init_address
from tests.distributed.test_nodes import family, spec, two_nodes

ME, SECRET = Identity(0, 0), b"a secret of some length"


def secret_file(folder: Path, text: bytes, mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_bytes(text)
    path.chmod(mode)
    return str(path)


def test_the_secret_of_a_file(tmp_path: Path):
    path = secret_file(tmp_path, b"0123456789abcdef0123456789abcdef\n")
    secret = b"0123456789abcdef0123456789abcdef"
    assert own_secret({}, path) == secret
    assert own_secret({"MOESAIC_SECRET": secret.decode()}, path) == secret
    assert own_secret({"MOESAIC_SECRET": secret.decode()}) == secret
    assert own_secret({"MOESAIC_SECRET": secret.decode() + "\n"}, path) == secret
    assert own_secret({}) == b""
    with pytest.raises(
        ValueError, match=f"{path} has another secret than MOESAIC_SECRET: give one"
    ):
        own_secret({"MOESAIC_SECRET": "another secret of some length"}, path)


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        (
            b"0123456789abcdef",
            0o644,
            r"\(mode 644, of user \d+\) is open to other users: run `chmod 600 ",
        ),
        (b"0123456789abcdef", 0o640, r"chmod 600 .*/secret`"),
        (b"0123456789abcde\n", 0o600, "has 15 bytes: give 16 or more, the same on all nodes"),
        (b"", 0o600, "has 0 bytes"),
        (bytes(range(32)), 0o600, "is not a line of text: make one with `openssl rand -hex 32"),
        (b"\xff" * 32, 0o600, "is not a line of text"),
    ],
)
def test_files_that_are_refused(text: bytes, mode: int, told: str, tmp_path: Path):
    path = secret_file(tmp_path, text, mode)
    with pytest.raises(ValueError, match=f"--node-secret-file {path} .*{told}"):
        own_secret({}, path)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ValueError, match=r"none cannot be read \(No such file.*openssl rand -hex"):
        own_secret({}, str(tmp_path / "none"))


def test_a_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = secret_file(tmp_path, b"0123456789abcdef")
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ValueError, match=r"is open to other users: run `chown \d+ .*; chmod 600 "):
        own_secret({}, path)


def test_no_secret_beyond_loopback(monkeypatch: pytest.MonkeyPatch):
    for address in ("127.0.0.1", "127.8.0.1", "::1"):
        check_is_secret(b"", address)
        check_is_secret(NO_SECRET, address)
    for secret in (b"", NO_SECRET):
        for address in ("10.0.0.1", "0.0.0.0", "::", "fe80::1"):
            check_is_secret(SECRET, address)
            with pytest.raises(
                ValueError, match="the nodes have no secret, and every process that"
            ):
                check_is_secret(secret, "127.0.0.1", address)
    with pytest.raises(ValueError, match="chmod 600 FILE` and give all nodes --node-secret-file"):
        check_init_address(0, "127.0.0.1:29500", b"", "10.0.0.1")
    monkeypatch.setattr("moesaic.comm.supervise.address.address_towards", lambda *_: "10.0.0.2")
    with pytest.raises(ValueError, match=r"that reaches 10\.0\.0\.1 could join"):
        check_init_address(1, "10.0.0.1:29500", b"")
    check_init_address(1, "10.0.0.1:29500", SECRET)


def test_no_listener_without_a_secret_beyond_loopback():
    with (
        socket.create_server(("0.0.0.0", 0)) as listening,
        pytest.raises(ValueError, match=r"that reaches 0\.0\.0\.0 could join"),
    ):
        Listener(listening, ME, NO_SECRET, {Role.STORE: StoreTable().serve})


def test_two_nodes_with_a_file(tmp_path: Path):
    """The supervisors have the secret in their environment; ranks do not."""
    path = secret_file(tmp_path, SECRET)
    with two_nodes(secret_file=path) as nodes:
        for node in nodes:
            processes = family(node.pid)
            told = [Path(f"/proc/{one.pid}/environ").read_bytes() for one in processes]
            assert len(told) > 2
            holders = [one.pid for one, text in zip(processes, told, strict=True) if SECRET in text]
            assert holders == [node.pid]
    assert SECRET.decode() not in os.environ.values()


def test_services_that_are_refused(tmp_path: Path):
    """Before anything is started."""
    beyond = replace(spec(0, free_port()), host="10.0.0.9")
    with pytest.raises(ValueError, match=r"every process that reaches 10\.0\.0\.9 could join"):
        Service(beyond)
    path = secret_file(tmp_path, SECRET)
    with pytest.raises(ValueError, match="has another secret than MOESAIC_SECRET"):
        Service(replace(beyond, secret_file=path), {"MOESAIC_SECRET": SECRET.decode() + "!"})


@pytest.mark.parametrize("command", ["serve no/such/model", "doctor --cluster"])
def test_a_file_on_the_command_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = secret_file(tmp_path, SECRET, 0o644)
    flags = f"--tp 2 --nnodes 2 --dist-init-addr 127.0.0.1:{free_port()} --node-secret-file {path}"
    assert main([*command.split(), *flags.split()]) == 2
    assert f"error: --node-secret-file {path} (mode 644" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve no/such/model", "doctor --cluster"])
def test_no_secret_on_the_command_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moesaic.comm.supervise.address.address_towards", lambda *_: "10.0.0.2")
    flags = "--tp 2 --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:29500"
    assert main([*command.split(), *flags.split()]) == 2
    told = capsys.readouterr().err
    assert "error: the nodes have no secret" in told and "openssl rand -hex 32 > FILE" in told


def test_one_node_does_not_import_cryptography():
    code = "import sys, moesaic.comm.network.store; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
