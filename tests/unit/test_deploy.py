"""The files of deploy/: schemas, and that they fit each other and the program."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import ValidationError, latest_version, validate

from moesaic.cli.common import add_model, read_args
from moesaic.config import ServerArgs
from moesaic.config.parser import FlagParser

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES, RAY = DEPLOY / "kubernetes", DEPLOY / "ray"
RAY_GROUP: dict[str, Any] = {
    "type": "object",
    "required": ["rayStartParams", "template"],
    "additionalProperties": False,
    "properties": {
        "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
        "template": {"type": "object"},
    },
}
RAY_WORKERS = RAY_GROUP | {
    "required": ["groupName", "rayStartParams", "template"],
    "properties": RAY_GROUP["properties"]
    | {"groupName": {"type": "string"}}
    | {name: {"type": "integer"} for name in ("replicas", "minReplicas", "maxReplicas")},
}
# The parts of custom resources that are used; pods are checked apart.
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
    "RayJob": {
        "apiVersion": {"const": "ray.io/v1"},
        "spec": {
            "type": "object",
            "required": ["entrypoint", "rayClusterSpec"],
            "additionalProperties": False,
            "properties": {
                "entrypoint": {"type": "string"},
                "backoffLimit": {"type": "integer", "minimum": 0},
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "rayClusterSpec": {
                    "type": "object",
                    "required": ["headGroupSpec"],
                    "additionalProperties": False,
                    "properties": {
                        "rayVersion": {"type": "string"},
                        "headGroupSpec": RAY_GROUP,
                        "workerGroupSpecs": {"type": "array", "items": RAY_WORKERS},
                    },
                },
            },
        },
    },
}
# Of each kind: where its templates of pods are.
PODS = {
    "LeaderWorkerSet": [("spec", "leaderWorkerTemplate", "workerTemplate")],
    "RayJob": [
        ("spec", "rayClusterSpec", "headGroupSpec", "template"),
        ("spec", "rayClusterSpec", "workerGroupSpecs", 0, "template"),
    ],
}


def read(path: Path) -> dict[str, Any]:
    (found,) = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def resources(folder: Path = KUBERNETES) -> dict[str, dict[str, Any]]:
    """By kind, as the kustomization lists them."""
    custom = read(folder / "kustomization.yaml")
    named = [*custom["resources"], *custom.get("configurations", []), "kustomization.yaml"]
    assert sorted(named) == sorted(path.name for path in folder.iterdir())
    return {found["kind"]: found for found in map(read, (folder / n for n in custom["resources"]))}


def at(resource: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        resource = resource[key]
    return resource


def pod_templates(resource: dict[str, Any]) -> list[dict[str, Any]]:
    return [at(resource, path) for path in PODS.get(resource["kind"], [])]


def check(resource: dict[str, Any]) -> None:
    kind = resource["kind"]
    if kind not in CUSTOM:
        validate(resource, latest_version(), strict=True)
        return
    schema = {"type": "object", "required": ["spec", "metadata"], "properties": CUSTOM[kind]}
    jsonschema.validate(resource, schema)
    for template in pod_templates(resource):
        validate({"apiVersion": "v1", "kind": "Pod", **template}, latest_version(), strict=True)


def served(words: Sequence[str]) -> ServerArgs:
    """The arguments of `moesaic serve WORDS`, as it reads them."""
    parser = FlagParser("moesaic serve", "", "")
    add_model(parser)
    parser.add_flags(ServerArgs)
    return read_args(parser.parse(words))


@pytest.mark.parametrize(
    ("folder", "kinds"),
    [
        (KUBERNETES, "LeaderWorkerSet ServiceMonitor Service PodDisruptionBudget"),
        (RAY, "RayJob Service"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_schemas(folder: Path, kinds: str):
    found = resources(folder)
    assert set(found) == set(kinds.split())
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
    job = resources(RAY)["RayJob"]
    pod_templates(job)[1]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(ValidationError):
        check(job)


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


def test_the_group_on_gpus():
    """The patch of the second kustomization, applied as RFC 6902 says."""
    folder, group = KUBERNETES.with_name("kubernetes-gpu"), resources()["LeaderWorkerSet"]
    custom = read(folder / "kustomization.yaml")
    assert [(folder / name).resolve() for name in custom["resources"]] == [KUBERNETES]
    (patch,) = custom["patches"]
    assert patch["target"] == {"kind": group["kind"]}
    for operation in yaml.safe_load((folder / patch["path"]).read_text(encoding="utf-8")):
        *path, last = (
            int(key) if key.isdecimal() else key.replace("~1", "/")
            for key in operation["path"].split("/")[1:]
        )
        parent = at(group, path)
        assert (last in parent) == (operation["op"] == "replace")
        parent[last] = operation["value"]
    check(group)
    (container,) = pod_templates(group)[0]["spec"]["containers"]
    args = served(container["args"])
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    assert (args.device, args.tp_size) == ("cuda", size * gpus)
    assert args.port == container["ports"][0]["containerPort"]


def test_flags_exist():
    container = resources()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"][
        "spec"
    ]["containers"][0]
    assert container["command"] == ["moesaic", "serve"]
    args = served(container["args"])
    size = resources()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"]
    assert args.tp_size % size == 0
    assert args.port == container["ports"][0]["containerPort"]


def test_ray_job():
    found = resources(RAY)
    job, service = found["RayJob"], found["Service"]
    cluster = job["spec"]["rayClusterSpec"]
    program, command, *words = job["spec"]["entrypoint"].split()
    args = served(words)
    assert (program, command) == ("moesaic", "serve") and args.use_ray
    workers = cluster["workerGroupSpecs"]
    assert args.nnodes == 1 + sum(group["replicas"] for group in workers)
    assert args.tp_size % args.nnodes == 0
    head, *others = pod_templates(job)
    (container,) = head["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": args.port}]
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert service["spec"]["selector"] == head["metadata"]["labels"] | {"ray.io/node-type": "head"}
    for template in (head, *others):  # all nodes read the model from one path, and have one image
        (one,) = template["spec"]["containers"]
        assert one["image"] == container["image"] and one["volumeMounts"] == [
            {"name": template["spec"]["volumes"][0]["name"], "mountPath": "/models"}
            | {"readOnly": True}
        ]
    image = (DEPLOY / "docker/Dockerfile.ray").read_text(encoding="utf-8")
    assert f"ray[default]=={cluster['rayVersion']}" in image
    paths = {tuple(entry["path"].split("/")) for entry in read(RAY / "images.yaml")["images"]}
    containers = {tuple(key for key in path if key != 0) for path in PODS["RayJob"]}
    assert paths == {(*path, "spec", "containers", "image") for path in containers}


def test_batch_script():
    path = DEPLOY / "slurm/serve.sbatch"
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o111 and text.startswith("#!/bin/bash\n")
    assert "#SBATCH --ntasks-per-node=1" in text
    # The value of srun's second option is optional, so that a next word would be the program.
    assert "exec srun --ntasks-per-node 1 --kill-on-bad-exit=1 moesaic serve" in text
