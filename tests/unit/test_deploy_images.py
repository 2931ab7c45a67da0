"""Images and Compose files of deploy/: that they fit each other, the README and the program."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesaic.config import ServerArgs
from moesaic.config.resolve import resolve
from moesaic.core.process import NODE_SECRET, SECRETS
from moesaic.server.admin import ROUTES
from tests.unit.test_deploy import DEPLOY, read, served

ROOT = DEPLOY.parent
COMPOSE = sorted((DEPLOY / "compose").glob("*.yaml"))
SERVERS = ["Dockerfile", "Dockerfile.cuda"]
IMAGES = [*SERVERS, "Dockerfile.ray"]
PORT = ServerArgs(model_path="").port


def instructions(name: str) -> list[tuple[str, str]]:
    text = (DEPLOY / "docker" / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in whole)]


def of(name: str, word: str) -> list[str]:
    return [rest for found, rest in instructions(name) if found == word]


def last(name: str, word: str) -> str:
    return of(name, word)[-1]


def test_all_images_are_known():
    assert sorted(path.name for path in (DEPLOY / "docker").iterdir()) == sorted(IMAGES)


@pytest.mark.parametrize("name", IMAGES)
def test_image_has_no_root_and_no_secrets(name: str):
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last(name, "USER"))  # Kubernetes reads numbers only
    settings = " ".join([*of(name, "ENV"), *of(name, "ARG")])
    assert not any(secret in settings for secret in SECRETS)
    (base,) = of(name, "FROM")
    assert base == "${BASE}" or re.search(r":\d+\.\d+", base), "a base without a version"


@pytest.mark.parametrize("name", SERVERS)
def test_image_installs_as_the_readme_says(name: str):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = [rest for rest in of(name, "RUN") if "pip install '." in rest]
    assert line in [one.partition("  #")[0].strip() for one in readme.splitlines()]
    (torch,) = of(name, "ARG")
    wanted = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert wanted is not None
    assert torch.removeprefix("TORCH=").strip('"').split()[0] == wanted[1]


@pytest.mark.parametrize("name", SERVERS)
def test_image_gets_its_files(name: str):
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[1] == "*"
    for line in of(name, "COPY"):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists() and f"!{source}" in ignored


@pytest.mark.parametrize("name", SERVERS)
def test_image_serves(name: str):
    assert json.loads(last(name, "ENTRYPOINT")) == ["moesaic", "serve"]
    args = served(json.loads(last(name, "CMD")))
    assert args.host == "0.0.0.0"
    assert last(name, "EXPOSE") == str(args.port)
    program, option, script = json.loads(last(name, "HEALTHCHECK").partition("CMD ")[2])
    assert (program, option) == ("python3", "-c")
    ast.parse(script)
    address = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)'", script)
    assert address is not None and int(address[1]) == args.port
    assert address[2] in {route.path for route in ROUTES if route.probe}


def schema_errors(path: Path) -> str:
    """What the schema of the Compose specification says."""
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    return subprocess.run([*words, path], check=False, capture_output=True, text=True).stdout


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_schema(path: Path, tmp_path: Path):
    assert schema_errors(path).startswith("ok")
    changed = read(path)
    next(iter(changed["services"].values()))["prots"] = []
    (wrong := tmp_path / "compose.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
    assert "'prots' was unexpected" in schema_errors(wrong)


def mounts(service: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for mount in service.get("volumes", []):
        source, target, *_ = mount.split(":")
        yield source, target


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_fits_the_image(path: Path):
    found = read(path)
    for name, service in found["services"].items():
        for source, _ in mounts(service):
            assert source in found.get("volumes", {}) or (path.parent / source).exists()
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is open to all"
        if service["image"] == "moesaic":
            args = resolve(served(service["command"]))
            published = [port.rpartition(":")[2] for port in service.get("ports", [])]
            assert published == ([str(args.port)] if args.node_rank == 0 else [])
            assert args.host == ("127.0.0.1" if args.node_rank else "0.0.0.0")
            # The image's check of health asks the port, which other nodes do not have.
            assert service.get("healthcheck", {}) == ({"disable": True} if args.node_rank else {})
        else:
            assert re.search(r":v?\d+\.\d+", service["image"]), "an image without a version"


def test_compose_nodes_meet():
    services = read(DEPLOY / "compose/two-nodes.yaml")["services"]
    nodes = [served(service["command"]) for service in services.values()]
    assert [node.node_rank for node in nodes] == list(range(nodes[0].nnodes))
    own = ("--node-rank", "--host")
    shared = [
        [word for word in service["command"] if not word.startswith(own)]
        for service in services.values()
    ]
    assert all(words == shared[0] for words in shared)
    host, _, _ = (nodes[0].dist_init_addr or "").partition(":")
    assert host == next(iter(services)), "node 0 is not found by its name"
    for service in services.values():
        assert service["networks"] == ["nodes"]
        assert service["environment"][NODE_SECRET].startswith("${MOESAIC_SECRET:?")


def test_compose_shows_metrics():
    services = read(DEPLOY / "compose/compose.yaml")["services"]
    folder = DEPLOY / "compose"
    (job,) = read(DEPLOY / "prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"localhost:{PORT}"]}]
    assert services["prometheus"]["network_mode"] == "service:server"
    (source,) = read(folder / "grafana/datasource.yaml")["datasources"]
    assert source["type"] == "prometheus" and source["url"] == "http://server:9090"
    (provider,) = read(folder / "grafana/dashboards.yaml")["providers"]
    inside = {target: folder / local for local, target in mounts(services["grafana"])}
    shown = inside[provider["options"]["path"]]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert "panels" in json.loads((shown / Path(home).name).read_text(encoding="utf-8"))


def written_commands() -> Iterator[tuple[str, str]]:
    """The lines with `moesaic serve` of docs/deployment.md and of comments in deploy/."""
    paths = [ROOT / "docs/deployment.md", *sorted(DEPLOY.rglob("*"))]
    for path in paths:
        if path.is_file() and path.suffix != ".json":
            text = path.read_text(encoding="utf-8").replace("\\\n", " ")
            for words in re.findall(r"(?:^|-- |\s{2})moesaic serve ([^`#\n]+)", text, re.M):
                yield path.name, words


def test_written_commands_parse():
    found = list(written_commands())
    assert len(found) >= 3
    for name, words in found:
        given = shlex.split(words)
        if "$@" not in given:
            assert served(given).model_path, f"{name}: {words}"
