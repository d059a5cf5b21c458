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

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import yaml

from hlat.config import Recipe, TrackingConfig
from hlat.launch.run_request import PreparedRun, RunRequest, ask_scheduler
from hlat.runtime.process import REQUEUE_CODE
from hlat.runtime.terminal import escape_name, line_problems

DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""Name of a job: at most 40 characters, so that controllers can append to it."""

_IMAGE = re.compile(r"[A-Za-z0-9][\x21-\x7e]*")  # [HOST[:PORT]/]NAME[:TAG][@DIGEST]; Kubernetes knows it exactly
_RESOURCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9./-]*=[1-9][0-9]*")
_SELECTOR = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]*=[A-Za-z0-9_.-]+")
_VOLUME = re.compile(r"[a-z0-9][a-z0-9.-]*:/[^:]*")


@dataclass(frozen=True)
class KubernetesOptions:
    """Options of Kubernetes.

    Attributes:
        image: container image with hlat and bash.
        kind: job, jobset or trainjob.
        namespace: namespace; None for the present one of kubectl.
        volumes: persistent volume claims, ``CLAIM:/PATH`` each; one contains the run's folder.
        resources: resources of a pod, ``NAME=COUNT`` each; they replace those of the catalog.
        node_selector: labels of the nodes, ``KEY=VALUE`` each; they replace those of the catalog.
        probes: let Kubernetes ask each pod for its health, over ``tracking.prometheus``.
    """

    image: str
    kind: str = "job"
    namespace: str | None = None
    volumes: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    node_selector: tuple[str, ...] = ()
    probes: bool = True

    def problems(self) -> list[str]:
        found = []
        if not _IMAGE.fullmatch(self.image):
            found.append(f"--image {escape_name(self.image)!r}: expected the name of a container image.")
        if self.namespace is not None and not DNS_LABEL.fullmatch(self.namespace):
            found.append(f"--namespace {escape_name(self.namespace)!r}: expected a DNS label.")
        expected = [
            ("--volume", self.volumes, _VOLUME, "CLAIM:/PATH"),
            ("--resource", self.resources, _RESOURCE, "NAME=COUNT"),
            ("--node-selector", self.node_selector, _SELECTOR, "KEY=VALUE"),
        ]
        for option, values, pattern, form in expected:
            wrong = [text for text in values if not pattern.fullmatch(text)]
            found += [f"{option} {escape_name(text)!r}: expected {form}." for text in wrong]
            found += [problem for text in values for problem in line_problems(option, text)]
        return found

    def recipe_problems(self, recipe: Recipe) -> list[str]:
        """Problems of the options with a recipe: every pod has to see the run's folder, and to answer its probes."""
        return [*self._folder_problems(recipe), *(probe_problems(recipe) if self.probes else [])]

    def _folder_problems(self, recipe: Recipe) -> list[str]:
        folder = PurePosixPath(recipe.run_dir)
        if any(folder.is_relative_to(path) for _, path in self.claims()):
            return []
        remedy = "give --volume CLAIM:/PATH with a claim that all pods may write, and run.dir=/PATH/NAME"
        return [f"run.dir = {escape_name(str(folder))}: it is in no volume of the pods; {remedy}."]

    def claims(self) -> list[tuple[str, str]]:
        return [(claim, path) for claim, _, path in (text.partition(":") for text in self.volumes)]

    def resource_counts(self) -> dict[str, int]:
        return {name: int(count) for name, _, count in (text.partition("=") for text in self.resources)}

    def labels(self) -> dict[str, str]:
        return {key: value for key, _, value in (text.partition("=") for text in self.node_selector)}


_METRICS_PORT = "metrics"
_PROBE_EVERY = 20  # seconds between two questions
_PROBE_TIMEOUT = 10  # seconds for an answer: cores may be busy with preparing text
_LOADING = 1800  # seconds for loading the program: an image or packages on a slow disk
_HANG_PATIENCE = (
    120  # seconds that a hang lasts, as /healthz sees it, before the pod is ended: the ranks find it themselves
)


def served_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with metrics and health on every address of the pod, unless it says where itself."""
    if recipe.tracking.prometheus is not None:
        return recipe
    tracking = TrackingConfig.model_validate({**recipe.tracking.model_dump(), "prometheus": {"address": "0.0.0.0"}})
    return recipe.model_copy(update={"tracking": tracking})


def probe_problems(recipe: Recipe) -> list[str]:
    """Reasons why Kubernetes, which asks from outside of the pod, would get no answer."""
    settings = recipe.tracking.prometheus
    remedy = "leave tracking.prometheus out, which serves the probes, or give --no-probes."
    found = []
    if settings is not None and settings.address.is_loopback:
        reason = "the probes of Kubernetes come from outside of the pod"
        found.append(f"tracking.prometheus.address = {settings.address}: {reason}; give 0.0.0.0, {remedy}")
    if settings is not None and settings.port == 0:
        found.append(f"tracking.prometheus.port = 0: the probes have to know the port; give one, {remedy}")
    return found


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
        "metadata": {"name": name},
        "data": {"recipe.yaml": recipe},
    }


def pod(run: PreparedRun, options: KubernetesOptions, name: str) -> dict[str, Any]:
    """Template of a pod, from options without problems; ``name`` is the job's."""
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
                "command": [*program, "train", f"{_MOUNTED_FILES}/recipe.yaml", *_train_options(run)],
                "env": [
                    *({"name": key, "value": _literal(value)} for key, value in run.environment.items()),
                    {"name": _ADDRESS_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                ],
                **({"resources": {"limits": limits}} if limits else {}),
                **(probe_fields(run.recipe, run.request.grace) if options.probes else {}),
                "volumeMounts": [
                    {"name": "files", "mountPath": _MOUNTED_FILES, "readOnly": True},
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
    """Give manifests to ``kubectl apply``, return its output; LaunchError if it is not installed or fails."""
    missing = "kubectl is not installed here: use --dry-run, and apply the manifests elsewhere."
    return ask_scheduler(["kubectl", "apply", "-f", "-"], text, _KUBECTL_TIMEOUT, missing)


def _manifest(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _job(run: PreparedRun, options: KubernetesOptions, name: str) -> list[dict[str, Any]]:
    return [_manifest("batch/v1", "Job", name, _job_spec(run, pod(run, options, name)))]


def _job_set(run: PreparedRun, options: KubernetesOptions, name: str) -> list[dict[str, Any]]:
    return [_manifest("jobset.x-k8s.io/v1alpha2", "JobSet", name, _job_set_spec(run, options, name))]


def _train_job(run: PreparedRun, options: KubernetesOptions, name: str) -> list[dict[str, Any]]:
    version = "trainer.kubeflow.org/v1alpha1"
    spec = _job_set_spec(run, options, name)
    spec["replicatedJobs"][0]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    nodes = run.request.nodes
    # A runtime of its own, with the pods: a TrainJob alone has no podFailurePolicy.
    runtime = {"mlPolicy": {"numNodes": nodes}, "template": {"spec": spec}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    job = {"runtimeRef": reference, "trainer": {"numNodes": nodes}}
    return [_manifest(version, "TrainingRuntime", name, runtime), _manifest(version, "TrainJob", name, job)]


def _job_set_spec(run: PreparedRun, options: KubernetesOptions, name: str) -> dict[str, Any]:
    job = _job_spec(run, pod(run, options, name))
    return {
        "failurePolicy": {"maxRestarts": 0},  # not created again when it has failed: its pods were replaced before
        "replicatedJobs": [{"name": _JOB_GROUP, "replicas": 1, "template": {"spec": job}}],
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


_KINDS: dict[str, Callable[[PreparedRun, KubernetesOptions, str], list[dict[str, Any]]]] = {
    "job": _job,
    "jobset": _job_set,
    "trainjob": _train_job,
}


def _job_name(request: RunRequest, recipe: Recipe) -> str:
    """Name of the job: the one given, or the run's as a DNS label."""
    # 40 characters, as DNS_LABEL has it; a cut may leave another hyphen at the end
    return request.name or re.sub(r"[^a-z0-9]+", "-", recipe.run.name.lower()).strip("-")[:40].strip("-")


def _name_problems(request: RunRequest, recipe: Recipe) -> list[str]:
    name = _job_name(request, recipe)
    expected = "a letter, then at most 39 small letters, digits and hyphens, not a hyphen at the end"
    return [] if DNS_LABEL.fullmatch(name) else [f"--name {escape_name(name)!r}: expected {expected}."]


class _BlockDumper(yaml.SafeDumper):
    """YAML with texts of several lines as blocks, and without references to earlier values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _represent_text)
