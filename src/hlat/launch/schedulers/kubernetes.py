"""Kubernetes: the manifests of a run.

    RunRequest, KubernetesOptions --manifests--> ConfigMap (recipe) and, by kind of job,
        job         Job                         plain Kubernetes
        jobset      JobSet                      for queues and tools that know JobSets
        trainjob    TrainingRuntime, TrainJob   Kubeflow Trainer v2, which makes a JobSet of them
    manifests --manifests_yaml--> YAML --apply_manifests--> kubectl

    pod: one container with the accelerators of a machine, and `hlat train`, which starts its processes
        startupProbe ----> /healthz answers: the program has been loaded, and from now on livenessProbe counts
        livenessProbe ---> /healthz: alive and not hanging; preparing, compiling, saving and restarting are healthy
        readinessProbe --> /readyz: training

The supervisors of the pods meet in the run's folder and restart the run together (docs/hosts.md): a failure of a
process costs no pod, and a pod that is lost is replaced while the others wait for it.

Probes ask the metrics server of the supervisor. Hangs are judged with the limits of ``recovery.hang_seconds``
(docs/operators.md), so a probe is never stricter than the run's own watchdog, which comes first.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import yaml

from hlat.config import Recipe, TrackingConfig, apply_overrides
from hlat.launch.run_request import PreparedRun, RunRequest, ask_scheduler, problems_error
from hlat.launch.schedulers.kubernetes_options import DNS_LABEL, LONGEST_NAME, KubernetesOptions, pairs
from hlat.runtime.process import REQUEUE_CODE
from hlat.runtime.terminal import escape_name

_METRICS_PORT = "metrics"
_PROBE_EVERY = 20  # seconds between two questions
_PROBE_TIMEOUT = 10  # seconds for an answer: cores may be busy with preparing text
_LOADING = 1800  # seconds for loading the program: an image or packages on a slow disk
# Seconds that a hang lasts, as /healthz sees it, before the pod is ended: the ranks find it themselves.
_HANG_PATIENCE = 120


def served_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with metrics and health on every address of the pod, unless it says where itself."""
    if recipe.tracking.prometheus is not None:
        return recipe
    tracking = TrackingConfig.model_validate({**recipe.tracking.model_dump(), "prometheus": {"address": "0.0.0.0"}})
    return recipe.model_copy(update={"tracking": tracking})


def probe_fields(recipe: Recipe, grace: int) -> dict[str, Any]:
    """Port and probes of the container, of a recipe with metrics; the pod has ``grace`` seconds to save."""
    assert recipe.tracking.prometheus is not None, "served_recipe has set it"
    return {
        "ports": [{"name": _METRICS_PORT, "containerPort": recipe.tracking.prometheus.port, "protocol": "TCP"}],
        "startupProbe": _probe("/healthz", _LOADING),
        "livenessProbe": _probe("/healthz", _HANG_PATIENCE + grace),
        "readinessProbe": _probe("/readyz", _PROBE_EVERY),
    }


def _probe(path: str, seconds: int) -> dict[str, Any]:
    """Probe that fails when there has been no good answer for so many seconds."""
    return {
        "httpGet": {"path": path, "port": _METRICS_PORT},
        "periodSeconds": _PROBE_EVERY,
        "timeoutSeconds": _PROBE_TIMEOUT,
        "failureThreshold": -(-seconds // _PROBE_EVERY),
    }


CONTAINER = "node"
"""Name of the container; Kubeflow Trainer expects this one."""

_MOUNTED_FILES = "/etc/hlat"
_ADDRESS_VARIABLE = "HLAT_POD_ADDRESS"  # variable with the pod's address in the cluster


def config_map(run: PreparedRun, name: str) -> dict[str, Any]:
    """ConfigMap with the resolved recipe, which includes and overrides have gone into."""
    recipe = yaml.safe_dump(run.recipe.model_dump(mode="json"), sort_keys=False)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        # Another recipe has another name: it cannot take the place of the one that the pods of a job mount.
        "metadata": {"name": f"{name}-{_digest(recipe)}"},
        "data": {"recipe.yaml": recipe},
    }


def pod(run: PreparedRun, options: KubernetesOptions, files: str) -> dict[str, Any]:
    """Spec of a pod, from options without problems; ``files`` is the name of its ConfigMap."""
    program = [_literal(word) for word in run.program] or ["hlat"]
    limits = {**run.settings.kubernetes, **options.resource_amounts()}
    claims = [mount for mount in options.mounts() if mount[0]]
    selector = {**run.settings.node_selector, **pairs(options.node_selector)}
    tolerations = [*_device_tolerations(limits), *options.tolerated()]
    return {
        "restartPolicy": "Never",  # a new pod is a new start of the run; required by podFailurePolicy
        "terminationGracePeriodSeconds": run.request.grace,
        "enableServiceLinks": False,  # a Service named master would set MASTER_PORT in the processes
        "containers": [
            {
                "name": CONTAINER,
                "image": options.image,
                "command": [*program, "train", f"{_MOUNTED_FILES}/recipe.yaml", *_train_options(run)],
                "env": [
                    *({"name": key, "value": _literal(value)} for key, value in run.environment.items()),
                    {"name": _ADDRESS_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                ],
                "resources": _resources(limits, run.nproc),
                **(_LOCKING_MEMORY if any(name.startswith("rdma/") for name in limits) else {}),
                "terminationMessagePolicy": "FallbackToLogsOnError",  # `kubectl describe pod` says why it ended
                **(probe_fields(run.recipe, run.request.grace) if options.probes else {}),
                "volumeMounts": [
                    {"name": "files", "mountPath": _MOUNTED_FILES, "readOnly": True},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                    *({"name": f"volume-{i}", "mountPath": path} for i, (_, path) in enumerate(claims)),
                ],
            }
        ],
        "volumes": [
            {"name": "files", "configMap": {"name": files}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # NCCL and data workers; 64 MiB otherwise
            *(
                {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}}
                for i, (claim, _) in enumerate(claims)
            ),
        ],
        **({"nodeSelector": selector} if selector else {}),
        **({"tolerations": tolerations} if tolerations else {}),
    }


_LOCKING_MEMORY = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
"""Permission to register memory with InfiniBand beyond the limit of the container; it has no effect but for root."""

_CORES = "cpu"  # what Kubernetes calls them
_LEAST_MEMORY = 4  # GiB of a process: its libraries and the context of its device


def _resources(limits: dict[str, Any], nproc: int) -> dict[str, Any]:
    """Limits, and requests for the cores and memory without which no process starts.

    A pod that asks for neither is the first that a node evicts. More than a node has would never be scheduled, and how
    much it has is not known here.
    """
    least = {_CORES: nproc, "memory": f"{_LEAST_MEMORY * nproc}Gi"}
    requests = {name: amount for name, amount in least.items() if name not in limits}  # a limit is a request too
    return {**({"requests": requests} if requests else {}), **({"limits": limits} if limits else {})}


def _device_tolerations(limits: dict[str, Any]) -> list[dict[str, str]]:
    # Nodes with devices are tainted with the name of their resource, so that other pods keep away.
    return [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in limits if "/" in name]


def _train_options(run: PreparedRun) -> list[str]:
    """Options of `hlat train` in a pod, which takes its number from the index that Kubernetes gives it."""
    options = ["--nproc", str(run.nproc)]
    if run.request.nodes == 1:
        return options
    least = "" if run.request.least is None else f"{run.request.least}:"
    return [*options, "--nodes", f"{least}{run.request.nodes}", "--address", f"$({_ADDRESS_VARIABLE})"]


def _literal(text: str) -> str:
    """Write a text so that Kubernetes does not replace ``$(NAME)`` in it."""
    return text.replace("$", "$$")


_FINAL_CODES = (2, 4)  # mistake of the user, diverged: new pods would end the same way
_INSTANCE = "app.kubernetes.io/instance"  # label of all objects of a run, with the name of its job
_JOB_GROUP = "node"  # name of the replicated job; Kubeflow Trainer expects this one
_KUBECTL_TIMEOUT = 120.0  # seconds to wait for kubectl


def manifests(request: RunRequest, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Write the manifests of a run.

    Raises:
        LaunchError: an option is wrong; every problem of options and recipe is listed.
        RecipeError: only the recipe is wrong; every problem is listed.
    """
    problems = options.problems()
    if options.kind not in _KINDS:
        problems.append(f"--kind {escape_name(options.kind)}: expected {', '.join(_KINDS)}.")

    def check(recipe: Recipe) -> list[str]:
        return [*options.recipe_problems(recipe), *_name_problems(request)]

    run = request.prepare(problems, check)
    if options.probes:
        run = replace(run, recipe=served_recipe(run.recipe))
    name = request.name or job_name(run.recipe, options)
    files = config_map(run, name)
    labels = {"app.kubernetes.io/name": "hlat", _INSTANCE: name, **pairs(options.labels)}
    template = {"metadata": {"labels": labels}, "spec": pod(run, options, files["metadata"]["name"])}
    kind = _KINDS[options.kind]
    found = [files, *kind.write(run, {"spec": _job_spec(run, template)}, name)]
    for manifest in found:
        own = {} if options.namespace is None else {"namespace": options.namespace}
        manifest["metadata"] |= {**own, "labels": labels}
    return _changed(found, kind, options.changes)


def _changed(found: list[dict[str, Any]], kind: "_Kind", changes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Make changes in the last manifest, or where this kind has its Job; LaunchError lists those that lead nowhere."""
    problems = []
    for text in changes:
        root, _, rest = text.partition(".")
        index, path = (kind.jobs, f"{kind.job}{_PARTS[root]}.{rest}".lstrip(".")) if root in _PARTS else (-1, text)
        found[index], wrong = apply_overrides(found[index], [path])
        problems += [f"--set {escape_name(text)}: {one.reason} {one.remedy}".rstrip() for one in wrong]
    if problems:
        raise problems_error(problems)
    return found


def manifests_yaml(found: list[dict[str, Any]]) -> str:
    """Write manifests as YAML, texts of several lines as blocks."""
    return yaml.dump_all(found, Dumper=_BlockDumper, sort_keys=False, width=120)


def pods_query(text: str) -> str:
    """Command that lists the pods of manifests."""
    metadata = next(yaml.safe_load_all(text))["metadata"]
    where = f" -n {metadata['namespace']}" if "namespace" in metadata else ""
    return f"kubectl get pods -l {_INSTANCE}={metadata['labels'][_INSTANCE]}{where}"


def apply_manifests(text: str) -> str:
    """Give manifests to ``kubectl apply``, return its output; LaunchError if it is not installed or fails."""
    missing = "kubectl is not installed here: use --dry-run, and apply the manifests elsewhere."
    return ask_scheduler(["kubectl", "apply", "-f", "-"], text, _KUBECTL_TIMEOUT, missing)


def _manifest(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _train_job(run: PreparedRun, job: dict[str, Any], name: str) -> list[dict[str, Any]]:
    version = "trainer.kubeflow.org/v1alpha1"
    spec = _job_set_spec({"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, **job})
    nodes = run.request.nodes
    # A runtime of its own, with the pods: a TrainJob alone has no podFailurePolicy.
    runtime = {"mlPolicy": {"numNodes": nodes}, "template": {"spec": spec}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    spec_of_job = {"runtimeRef": reference, "trainer": {"numNodes": nodes}}
    return [_manifest(version, "TrainingRuntime", name, runtime), _manifest(version, "TrainJob", name, spec_of_job)]


def _job_set_spec(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "failurePolicy": {"maxRestarts": 0},  # not created again when it has failed: its pods were replaced before
        "replicatedJobs": [{"name": _JOB_GROUP, "replicas": 1, "template": job}],
    }


def _job_spec(run: PreparedRun, template: dict[str, Any]) -> dict[str, Any]:
    final = {"containerName": CONTAINER, "operator": "In", "values": list(_FINAL_CODES)}
    saved = {"containerName": CONTAINER, "operator": "In", "values": [REQUEUE_CODE]}
    return {
        "completionMode": "Indexed",
        "completions": run.request.nodes,
        "parallelism": run.request.nodes,
        # A supervisor that gives up ends its pod, and then all others end: so many pods fail for each failure of the
        # run.
        "backoffLimit": run.recipe.recovery.restarts * run.request.nodes,
        # The first rule that fits decides; other exit codes (3, 5, a killed process) count as failures.
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": final},
                {"action": "Ignore", "onExitCodes": saved},  # saved and stopped: the new pod goes on
                # evicted or preempted: no failure of the run
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }


@dataclass(frozen=True)
class _Kind:
    """A kind of object that Kubernetes makes pods of."""

    write: Callable[[PreparedRun, dict[str, Any], str], list[dict[str, Any]]]  # from the template of a Job, and a name
    jobs: int = -1  # the manifest that has the Job, counted from the last one
    job: str = ""  # path of the Job in it


_IN_JOB_SET = "spec.replicatedJobs.0.template"
_KINDS = {
    "job": _Kind(lambda run, job, name: [_manifest("batch/v1", "Job", name, job["spec"])]),
    "jobset": _Kind(
        lambda run, job, name: [_manifest("jobset.x-k8s.io/v1alpha2", "JobSet", name, _job_set_spec(job))],
        job=_IN_JOB_SET,
    ),
    "trainjob": _Kind(_train_job, -2, f"spec.template.{_IN_JOB_SET}"),
}
_PARTS = {"job": "", "pod": ".spec.template", "container": ".spec.template.spec.containers.0"}  # paths in a Job


def job_name(recipe: Recipe, options: KubernetesOptions) -> str:
    """Name of the objects of a run: the run's as a DNS label, and a digest of where its folder is.

    So runs of one name in two folders have two names. The same command has the same name, and Kubernetes does not start
    a second job that would write into the folder of the first.
    """
    label = re.sub(r"[^a-z0-9]+", "-", recipe.run.name.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"run-{label}"
    digest = _digest("\n".join([str(recipe.run_dir), *options.claims_of(str(recipe.run_dir))]))
    return f"{label[: LONGEST_NAME - len(digest) - 1].strip('-')}-{digest}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _name_problems(request: RunRequest) -> list[str]:
    if request.name is None or DNS_LABEL.fullmatch(request.name):
        return []
    expected = "a letter, then at most 39 small letters, digits and hyphens, not a hyphen at the end"
    return [f"--name {escape_name(request.name)!r}: expected {expected}. Without --name it is made of the run's."]


class _BlockDumper(yaml.SafeDumper):
    """YAML with texts of several lines as blocks, and without references to earlier values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _represent_text)
