"""The pod of a machine of a run, and the files that are mounted in it.

PreparedRun, KubernetesOptions --config_map--> the recipe
--pod---------> one container that takes the accelerators of a machine, with `hlat train`, which starts its processes

The supervisors of the pods meet in the run's folder and restart the run together (docs/hosts.md): a failure of a
process costs no pod, and a pod that is lost is replaced while the others wait for it.
"""

from typing import Any

import yaml

from hlat.launch.submission.kubernetes_options import KubernetesOptions
from hlat.launch.submission.probes import probe_fields
from hlat.launch.submission.request import PreparedRun

CONTAINER = "node"
"""Name of the container; Kubeflow Trainer expects this one."""

_FILES = "/etc/hlat"
_ADDRESS = "HLAT_POD_ADDRESS"  # variable with the pod's address in the cluster


def config_map(run: PreparedRun, name: str) -> dict[str, Any]:
    """ConfigMap with the resolved recipe, which includes and overrides have gone into."""
    recipe = yaml.safe_dump(run.recipe.model_dump(mode="json"), sort_keys=False)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"recipe.yaml": recipe},
    }


def pod(run: PreparedRun, options: KubernetesOptions, name: str) -> dict[str, Any]:
    """Template of a pod.

    Args:
        run: the run.
        options: options of Kubernetes, without problems.
        name: name of the job.
    """
    program = [_literal(word) for word in run.program] or ["hlat"]
    limits = {**run.settings.kubernetes, **options.resource_counts()}
    claims = options.claims()
    spec = {
        "restartPolicy": "Never",  # a new pod is a new start of the run; required by podFailurePolicy
        "terminationGracePeriodSeconds": run.request.grace,
        "containers": [
            {
                "name": CONTAINER,
                "image": options.image,
                "command": [*program, "train", f"{_FILES}/recipe.yaml", *_options(run)],
                "env": [
                    *({"name": key, "value": _literal(value)} for key, value in run.environment.items()),
                    {"name": _ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                ],
                **({"resources": {"limits": limits}} if limits else {}),
                **(probe_fields(run.recipe, run.request.grace) if options.probes else {}),
                "volumeMounts": [
                    {"name": "files", "mountPath": _FILES, "readOnly": True},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                    *({"name": f"volume-{i}", "mountPath": path} for i, (_, path) in enumerate(claims)),
                ],
            }
        ],
        "volumes": [
            {"name": "files", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # NCCL and data workers; 64 MiB otherwise
            *(
                {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}}
                for i, (claim, _) in enumerate(claims)
            ),
        ],
    }
    selector = {**run.settings.node_selector, **options.labels()}
    labels = {"app.kubernetes.io/name": "hlat", "app.kubernetes.io/instance": name}
    return {"metadata": {"labels": labels}, "spec": {**spec, **({"nodeSelector": selector} if selector else {})}}


def _options(run: PreparedRun) -> list[str]:
    """Options of `hlat train` in a pod, which takes its number from the index that Kubernetes gives it."""
    options = ["--nproc", str(run.nproc)]
    if run.request.nodes == 1:
        return options
    least = "" if run.request.least is None else f"{run.request.least}:"
    return [*options, "--nodes", f"{least}{run.request.nodes}", "--address", f"$({_ADDRESS})"]


def _literal(text: str) -> str:
    """Write a text so that Kubernetes does not replace ``$(NAME)`` in it."""
    return text.replace("$", "$$")
