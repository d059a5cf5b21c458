"""The pod of a machine of a run, and the files that are mounted in it.

PreparedRun, KubernetesOptions --config_map--> the recipe and the script that starts the processes
--pod---------> one container that takes the accelerators of a machine
"""

from typing import Any

import yaml

from hlat.launch.submission.kubernetes_options import KubernetesOptions
from hlat.launch.submission.node_script import node_script
from hlat.launch.submission.probes import probe_fields
from hlat.launch.submission.request import PreparedRun

CONTAINER = "node"
"""Name of the container; Kubeflow Trainer expects this one."""

_FILES = "/etc/hlat"
_PORT = 29500


def config_map(run: PreparedRun, name: str) -> dict[str, Any]:
    """ConfigMap with the resolved recipe, which includes and overrides have gone into, and the script of the pods."""
    recipe = yaml.safe_dump(run.recipe.model_dump(mode="json"), sort_keys=False)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"recipe.yaml": recipe, "node.sh": node_script(run.nproc, run.request.grace)},
    }


def pod(run: PreparedRun, options: KubernetesOptions, name: str, first_host: str) -> dict[str, Any]:
    """Template of a pod.

    Args:
        run: the run.
        options: options of Kubernetes, without problems.
        name: name of the job.
        first_host: name of the first pod in the cluster's DNS.
    """
    own = {"WORLD_SIZE": run.world, "MASTER_ADDR": first_host, "MASTER_PORT": _PORT}
    environment = {**run.environment, **own}
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
                "command": ["/bin/bash", f"{_FILES}/node.sh", *program, "train", f"{_FILES}/recipe.yaml"],
                "env": [{"name": key, "value": _literal(str(value))} for key, value in environment.items()],
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


def _literal(text: str) -> str:
    """Write a text so that Kubernetes does not replace ``$(NAME)`` in it."""
    return text.replace("$", "$$")
