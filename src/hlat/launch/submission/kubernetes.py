"""Manifests of a run for Kubernetes.

    PreparedRun --> ConfigMap (recipe) and, by kind of job,
        job         Job                         plain Kubernetes
        jobset      JobSet                      for queues and tools that know JobSets
        trainjob    TrainingRuntime, TrainJob   Kubeflow Trainer v2, which makes a JobSet of them

A pod is a machine, with a supervisor that restarts its processes. A pod that is lost is replaced by itself.
"""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import yaml

from hlat.config import Recipe
from hlat.launch.submission.kubernetes_options import DNS_LABEL, KubernetesOptions
from hlat.launch.submission.pod import CONTAINER, config_map, pod
from hlat.launch.submission.probes import served_recipe
from hlat.launch.submission.request import PreparedRun, RunRequest
from hlat.runtime.errors import LaunchError
from hlat.runtime.process.exit_codes import REQUEUE_CODE
from hlat.runtime.terminal_text import escape_name

_FINAL_CODES = (2, 4)  # mistake of the user, diverged: new pods would end the same way
_GROUP = "node"  # name of the replicated job; Kubeflow Trainer expects this one
_TIMEOUT = 120.0  # seconds to wait for kubectl


def manifests(request: RunRequest, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Write the manifests of a run.

    Args:
        request: the run.
        options: options of Kubernetes.

    Raises:
        LaunchError: an option is wrong; every problem of options and recipe is listed.
        RecipeError: only the recipe is wrong; every problem is listed.
    """
    problems = options.problems()
    if options.kind not in _KINDS:
        problems.append(f"--kind {escape_name(options.kind)}: expected {', '.join(_KINDS)}.")

    def check(recipe: Recipe) -> list[str]:
        return [*options.recipe_problems(recipe), *_name_problems(request, recipe)]

    run = request.prepare(problems, check)
    if options.probes:
        run = replace(run, recipe=served_recipe(run.recipe))
    name = _job_name(request, run.recipe)
    found = [config_map(run, name), *_KINDS[options.kind](run, options, name)]
    if options.namespace is not None:
        for manifest in found:
            manifest["metadata"]["namespace"] = options.namespace
    return found


def manifests_yaml(found: list[dict[str, Any]]) -> str:
    """Write manifests as YAML, texts of several lines as blocks."""
    return yaml.dump_all(found, Dumper=_BlockDumper, sort_keys=False, width=120)


def apply_manifests(text: str) -> str:
    """Give manifests to ``kubectl apply``; return its output.

    Raises:
        LaunchError: kubectl is not installed here, or fails.
    """
    command = ["kubectl", "apply", "-f", "-"]
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except FileNotFoundError as error:
        raise LaunchError("kubectl is not installed here: use --dry-run, and apply the manifests elsewhere.") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"kubectl has not answered for {_TIMEOUT:g} s.") from error
    if done.returncode:
        raise LaunchError(f"kubectl failed: {done.stderr.strip()}")
    return done.stdout


def _job(run: PreparedRun, options: KubernetesOptions, name: str) -> list[dict[str, Any]]:
    """Indexed Job."""
    spec = _job_spec(run, pod(run, options, name))
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}]


def _job_set(run: PreparedRun, options: KubernetesOptions, name: str) -> list[dict[str, Any]]:
    metadata = {"name": name}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": _job_set_spec(run, options, name),
        }
    ]


def _train_job(run: PreparedRun, options: KubernetesOptions, name: str) -> list[dict[str, Any]]:
    """TrainingRuntime with the pods, and the TrainJob that starts it: a TrainJob alone has no podFailurePolicy."""
    version = "trainer.kubeflow.org/v1alpha1"
    spec = _job_set_spec(run, options, name)
    spec["replicatedJobs"][0]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    nodes = run.request.nodes
    runtime = {
        "apiVersion": version,
        "kind": "TrainingRuntime",
        "metadata": {"name": name},
        "spec": {"mlPolicy": {"numNodes": nodes}, "template": {"spec": spec}},
    }
    job = {
        "apiVersion": version,
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {"numNodes": nodes},
        },
    }
    return [runtime, job]


def _job_set_spec(run: PreparedRun, options: KubernetesOptions, name: str) -> dict[str, Any]:
    """Spec of a JobSet of one Job. It is not created again when it has failed: its pods were replaced before."""
    job = _job_spec(run, pod(run, options, name))
    return {
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": {"spec": job}}],
    }


def _job_spec(run: PreparedRun, template: dict[str, Any]) -> dict[str, Any]:
    """Spec of an Indexed Job with a pod per machine.

    A supervisor that gives up ends its pod, and then all others end: so many pods fail for each failure of the run.
    """
    final = {"containerName": CONTAINER, "operator": "In", "values": list(_FINAL_CODES)}
    saved = {"containerName": CONTAINER, "operator": "In", "values": [REQUEUE_CODE]}
    return {
        "completionMode": "Indexed",
        "completions": run.request.nodes,
        "parallelism": run.request.nodes,
        "backoffLimit": run.recipe.recovery.restarts * run.request.nodes,
        # The first rule that fits decides; other exit codes (3, 5, a killed process) count as failures.
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": final},
                {"action": "Ignore", "onExitCodes": saved},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }


_KINDS: dict[str, Callable[[PreparedRun, KubernetesOptions, str], list[dict[str, Any]]]] = {
    "job": _job,
    "jobset": _job_set,
    "trainjob": _train_job,
}


def _job_name(request: RunRequest, recipe: Recipe) -> str:
    """Name of the job: the one given, or the run's as a DNS label."""
    return request.name or re.sub(r"[^a-z0-9]+", "-", recipe.run.name.lower()).strip("-")[:40].strip("-")


def _name_problems(request: RunRequest, recipe: Recipe) -> list[str]:
    name = _job_name(request, recipe)
    expected = "a letter, then at most 39 small letters, digits and hyphens, not a hyphen at the end"
    return [] if DNS_LABEL.fullmatch(name) else [f"--name {escape_name(name)!r}: expected {expected}."]


class _BlockDumper(yaml.SafeDumper):
    """YAML with texts of several lines as blocks, and without references to earlier values."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value again instead of a reference to it."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _represent_text)
