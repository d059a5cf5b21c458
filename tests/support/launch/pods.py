"""Manifests of a run for Kubernetes, and their pods as processes of this machine."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hlat.launch.run_request import RunRequest
from hlat.launch.schedulers.kubernetes import manifests, manifests_yaml
from hlat.launch.schedulers.kubernetes_options import KubernetesOptions

Manifests = list[dict[str, Any]]
DATA = ("data.path=/data/text", "run.dir=/data/run", "batch.micro_batch=1")


def write(
    recipe_file: Path,
    kind: str = "job",
    *,
    overrides: Sequence[str] = (),
    volumes: tuple[str, ...] = ("shared:/data",),
    options: dict[str, Any] | None = None,
    **request: Any,
) -> Manifests:
    """Manifests of the tiny recipe, as kubectl would read them."""
    request = {"nodes": 2, "nproc": 2, **request}
    asked = RunRequest(str(recipe_file), (*DATA, *overrides), **request)
    chosen = KubernetesOptions("registry/hlat:1", kind, volumes=volumes, **(options or {}))
    return list(yaml.safe_load_all(manifests_yaml(manifests(asked, chosen))))


def job_of(found: Manifests) -> dict[str, Any]:
    """The Job in the last manifest or the one before."""
    by_kind = {manifest["kind"]: manifest.get("spec", {}) for manifest in found}
    runtime = by_kind.get("TrainingRuntime", {}).get("template", {}).get("spec")
    sets = by_kind.get("JobSet", runtime)
    return by_kind["Job"] if sets is None else sets["replicatedJobs"][0]["template"]["spec"]


def pod_of(found: Manifests) -> dict[str, Any]:
    """The pod in the manifests."""
    return job_of(found)["template"]["spec"]


def start_pod(
    found: Manifests,
    folder: Path,
    index: int,
    program: Sequence[str],
    address: str = "127.0.0.1",
    transport: Sequence[str] = (),
    **environment: str,
) -> "subprocess.Popen[str]":
    """Start the container of a pod as a process, with its files and variables.

    Args:
        found: the manifests.
        folder: folder in which its ConfigMap is mounted.
        index: index that Kubernetes gives the pod.
        program: words of the command that stands for `hlat`.
        address: address of the pod.
        transport: words of a command that runs another one as the first process of a container.
        environment: further variables.
    """
    for name, text in found[0]["data"].items():
        (folder / name).write_text(text)
    container = pod_of(found)["containers"][0]
    variables = {}
    for one in container["env"]:
        field = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        variables[one["name"]] = {"status.podIP": address}[field] if field else one["value"].replace("$$", "$")
    command = [word.replace("/etc/hlat", str(folder)) for word in container["command"]]
    for name, value in variables.items():  # as Kubernetes does in commands
        command = [word.replace(f"$({name})", value) for word in command]
    assert command[0] == "hlat"
    return subprocess.Popen(
        [*transport, *program, *command[1:]],
        env={**os.environ, **variables, "JOB_COMPLETION_INDEX": str(index), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
