"""The files of deploy/: schemas, and that they fit each other and the program."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import ValidationError, latest_version, validate

from moesaic.config import ServerArgs
from moesaic.config.parser import FlagParser

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
# The parts of LeaderWorkerSet (v1) and ServiceMonitor (v1) that are used; pods are checked apart.
CUSTOM: dict[str, dict[str, Any]] = {
    "LeaderWorkerSet": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "spec": {
            "type": "object",
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "required": ["size", "workerTemplate"],
                    "additionalProperties": False,
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["None", "RecreateGroupOnPodRestart"]},
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                    },
                },
            },
        },
    },
    "ServiceMonitor": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "spec": {
            "type": "object",
            "required": ["selector", "endpoints"],
            "additionalProperties": False,
            "properties": {
                "selector": {"type": "object"},
                "endpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"port": {"type": "string"}, "path": {"type": "string"}},
                    },
                },
            },
        },
    },
}


def read(path: Path) -> dict[str, Any]:
    (found,) = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def resources() -> dict[str, dict[str, Any]]:
    """By kind, as the kustomization lists them."""
    listed = read(KUBERNETES / "kustomization.yaml")["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == sorted(p.name for p in KUBERNETES.iterdir())
    return {found["kind"]: found for found in map(read, (KUBERNETES / name for name in listed))}


def check(resource: dict[str, Any]) -> None:
    kind = resource["kind"]
    if kind not in CUSTOM:
        validate(resource, latest_version(), strict=True)
        return
    schema = {"type": "object", "required": ["spec", "metadata"], "properties": CUSTOM[kind]}
    jsonschema.validate(resource, schema)
    template = resource["spec"].get("leaderWorkerTemplate", {}).get("workerTemplate")
    if template is not None:
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        validate(pod, latest_version(), strict=True)


def test_schemas():
    found = resources()
    assert set(found) == {*CUSTOM, "Service", "PodDisruptionBudget"}
    for resource in found.values():
        check(resource)


def test_the_check_finds_mistakes():
    service, group = resources()["Service"], resources()["LeaderWorkerSet"]
    service["spec"]["prots"] = []
    with pytest.raises(ValidationError):
        check(service)
    container = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    container["readinessProbe"]["failureTreshold"] = 3
    with pytest.raises(ValidationError):
        check(group)
    group["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Never"
    with pytest.raises(jsonschema.ValidationError):
        check(group)


def test_pods_find_each_other_and_their_settings():
    found = resources()
    group, service, monitor = (
        found[kind] for kind in ("LeaderWorkerSet", "Service", "ServiceMonitor")
    )
    template = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    pod = template["spec"]
    (container,) = pod["containers"]
    (port,) = container["ports"]
    name = {"leaderworkerset.sigs.k8s.io/name": group["metadata"]["name"]}
    first = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert service["spec"]["selector"] == name | first
    assert service["metadata"]["name"] != group["metadata"]["name"], "its own service has that"
    assert found["PodDisruptionBudget"]["spec"]["selector"] == {"matchLabels": name}
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    names = {read_from(entry): entry["name"] for entry in container["env"]}
    told = (KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8")
    created = {("moesaic", key) for key in re.findall(r"--from-literal ([\w-]+)=", told)}
    assert set(names) == created
    assert set(names.values()) == {"MOESAIC_SECRET", "MOESAIC_API_KEY"}
    for kind in ("startupProbe", "readinessProbe"):
        program, option, script = container[kind]["exec"]["command"]
        assert (program, option) == ("python3", "-c")
        ast.parse(script)
        assert f"127.0.0.1:{port['containerPort']}/health" in script


def read_from(entry: dict[str, Any]) -> tuple[str, str]:
    reference = entry["valueFrom"]["secretKeyRef"]
    return reference["name"], reference["key"]


def test_flags_exist():
    container = resources()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"][
        "spec"
    ]["containers"][0]
    assert container["command"] == ["moesaic", "serve"]
    parser = FlagParser("moesaic serve", "", "")
    parser.add_flags(ServerArgs)
    given = parser.parse(container["args"][1:])
    size = resources()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"]
    assert int(given["tp_size"]) % size == 0
    assert given["port"] == str(container["ports"][0]["containerPort"])


def test_batch_script():
    path = DEPLOY / "slurm/serve.sbatch"
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o111 and text.startswith("#!/bin/bash\n")
    assert "#SBATCH --ntasks-per-node=1" in text
    # The value of srun's second option is optional, so that a next word would be the program.
    assert "exec srun --ntasks-per-node 1 --kill-on-bad-exit=1 moesaic serve" in text
