"""Options of Kubernetes: their forms, and their problems with a recipe.

    KubernetesOptions --problems--> forms          recipe --recipe_problems--> paths in no volume, unanswered probes
    KEY=VALUE, KEY=VALUE:EFFECT, CLAIM:/PATH, ... --> fields of the manifests

The named options are those that most clusters ask for. Every other field of a manifest is a change, ``PATH=VALUE``.
"""

import logging
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from hlat.config import Recipe
from hlat.runtime.storage.hub import HubModel
from hlat.runtime.terminal import escape_name, line_problems, listed, plural
from hlat.runtime.urls import is_url

_logger = logging.getLogger(__name__)

LONGEST_NAME = 40
"""Characters of the name of a job, so that controllers can append to it."""

DNS_LABEL = re.compile(rf"[a-z]([a-z0-9-]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?")
"""Name of a job."""

ROOTS = ("metadata", "spec", "job", "pod", "container")
"""First names of the path of a change: fields of the object that is submitted, and parts that every kind has."""

_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][\x21-\x7e]*")  # [HOST[:PORT]/]NAME[:TAG][@DIGEST]; Kubernetes knows it exactly
_QUANTITY = r"[1-9][0-9]*(\.[0-9]+)?([kMGT]|[KMGT]i|m)?"  # of memory as in 900Gi, of cores as in 96
_RESOURCE = re.compile(rf"[A-Za-z0-9][A-Za-z0-9./-]*={_QUANTITY}")
_KEY = r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?"
_LABEL = re.compile(rf"{_KEY}={_VALUE}", re.ASCII)
_TOLERATION = re.compile(
    rf"(?P<key>{_KEY})(=(?P<value>{_VALUE}))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?", re.ASCII
)
_VOLUME = re.compile(r"([a-z0-9][a-z0-9.-]*)?:/[^:]*")
_CHANGE = re.compile(rf"({'|'.join(ROOTS)})\.[^=]+=.*", re.DOTALL)
_OF_MODELS = ("data.tokenizer.path", "checkpoint.init_from")  # fields that take the id of a model of the Hub too


@dataclass(frozen=True)
class KubernetesOptions:
    """Options of Kubernetes.

    Attributes:
        image: container image with hlat and bash.
        kind: job, jobset or trainjob.
        namespace: namespace; None for the present one of kubectl.
        volumes: persistent volume claims, ``CLAIM:/PATH`` each; one contains the run's folder. Without a claim, a
            folder that the image has, or that a change mounts.
        resources: resources of a pod, ``NAME=COUNT`` each; they replace those of the catalog.
        node_selector: labels of the nodes, ``KEY=VALUE`` each; they replace those of the catalog.
        probes: let Kubernetes ask each pod for its health, over ``tracking.prometheus``.
        labels: labels of all objects and pods, ``KEY=VALUE`` each, such as the name of a queue.
        tolerations: taints of nodes that the pods may run on, ``KEY[=VALUE][:EFFECT]`` each.
        changes: other fields of the manifests, ``PATH=VALUE`` each, with values in YAML.
    """

    image: str
    kind: str = "job"
    namespace: str | None = None
    volumes: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    node_selector: tuple[str, ...] = ()
    probes: bool = True
    labels: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        found = []
        if not _IMAGE.fullmatch(self.image):
            found.append(f"--image {escape_name(self.image)!r}: expected the name of a container image.")
        if self.namespace is not None and not _NAMESPACE.fullmatch(self.namespace):
            found.append(f"--namespace {escape_name(self.namespace)!r}: expected a DNS label.")
        forms = "NoSchedule, PreferNoSchedule or NoExecute"
        expected = [
            ("--volume", self.volumes, _VOLUME, "CLAIM:/PATH"),
            ("--resource", self.resources, _RESOURCE, "NAME=COUNT, as in nvidia.com/gpu=8 or memory=900Gi"),
            ("--node-selector", self.node_selector, _LABEL, "KEY=VALUE"),
            ("--label", self.labels, _LABEL, "KEY=VALUE, as in kueue.x-k8s.io/queue-name=training"),
            ("--toleration", self.tolerations, _TOLERATION, f"KEY, KEY=VALUE or KEY=VALUE:EFFECT, with {forms}"),
            ("--set", self.changes, _CHANGE, f"PATH=VALUE, a path below {', '.join(ROOTS)}; pod.spec.hostNetwork=true"),
        ]
        for option, values, pattern, form in expected:
            wrong = [text for text in values if not pattern.fullmatch(text)]
            found += [f"{option} {escape_name(text)!r}: expected {form}." for text in wrong]
            found += [problem for text in values for problem in line_problems(option, text)]
        return found

    def recipe_problems(self, recipe: Recipe) -> list[str]:
        """Problems of the options with a recipe: every pod has to see its folders, and to answer its probes."""
        return [
            *self._folder_problems(recipe),
            *self._input_problems(recipe),
            *(probe_problems(recipe) if self.probes else []),
        ]

    def _folder_problems(self, recipe: Recipe) -> list[str]:
        export = recipe.checkpoint.export
        folders = {
            "run.dir": str(recipe.run_dir),
            "data.prepared_dir": recipe.data.prepared_dir,
            "checkpoint.export.dir": None if export is None else export.dir,
        }
        claims = [path for claim, path in self.mounts() if claim]
        remedy = "give --volume CLAIM:/PATH with a claim that all pods may write, and"
        return [
            f"{field} = {escape_name(folder)}: it is in no volume of the pods{_among(claims)}; "
            f"{remedy} {field}=/PATH/NAME."
            for field, folder in folders.items()
            if folder is not None and not self.claims_of(folder)
        ]

    def _input_problems(self, recipe: Recipe) -> list[str]:
        """Files that the run reads, and that no pod has; only a warning where the tokens may be there without them."""
        places = [path for _, path in self.mounts()]
        outside = [
            f"{field} = {escape_name(path)}"
            for field, path in input_paths(recipe)
            if not is_url(path) and not _is_below(path, places)
        ]
        if not outside:
            return []
        head = f"the recipe names {plural(len(outside), 'path')} in no volume of the pods{_among(places)}"
        remedy = "Give --volume CLAIM:/PATH with a claim that has them, or --volume :/PATH for a folder of the image."
        text = f"{head}: {listed(outside)}. {remedy}"
        if recipe.data.prepared_dir is None or recipe.data.mode == "online":
            return [text]
        # Prepared tokens are read without their text, and only the volume knows whether they are complete.
        _logger.warning("warning: %s Nothing is missing if %s is complete.", text, recipe.data.prepared_dir)
        return []

    def mounts(self) -> list[tuple[str, str]]:
        """Claims and the paths where they are mounted; of a path that the image has, an empty name and the path."""
        return [(claim, path) for claim, _, path in (text.partition(":") for text in self.volumes)]

    def claims_of(self, folder: str) -> list[str]:
        """Claims whose volumes hold a folder."""
        return [claim for claim, path in self.mounts() if claim and _is_below(folder, [path])]

    def resource_amounts(self) -> dict[str, int | str]:
        amounts = pairs(self.resources).items()
        return {name: int(amount) if amount.isdigit() else amount for name, amount in amounts}

    def tolerated(self) -> list[dict[str, str]]:
        """Tolerations as pods have them."""
        found = [match.groupdict() for text in self.tolerations if (match := _TOLERATION.fullmatch(text))]
        return [
            {
                "key": each["key"],
                "operator": "Exists" if each["value"] is None else "Equal",
                **{name: each[name] for name in ("value", "effect") if each[name] is not None},
            }
            for each in found
        ]


def pairs(texts: tuple[str, ...]) -> dict[str, str]:
    """Read ``KEY=VALUE`` texts."""
    return dict(text.partition("=")[::2] for text in texts)


def input_paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Files, folders and URLs that a run reads, by field; ids of models of the Hub are none."""
    data, evaluation = recipe.data, recipe.evaluation
    given = {
        "data.path": data.path,
        **{f"data.sources.{number}.path": source.path for number, source in enumerate(data.sources)},
        "data.tokenizer.path": data.tokenizer.path,
        "data.validation.path": data.validation.path,
        "checkpoint.init_from": recipe.checkpoint.init_from,
        **{f"evaluation.sets.{name}": path for name, path in evaluation.sets.items()},
        **{f"evaluation.tasks.{number}": path for number, path in enumerate(evaluation.tasks)},
    }
    for field, path in given.items():
        is_model = field in _OF_MODELS and path is not None and HubModel.parse(path) is not None
        if path is not None and not is_model:
            yield field, path


def _is_below(path: str, places: list[str]) -> bool:
    return any(PurePosixPath(posixpath.normpath(path)).is_relative_to(place) for place in places)


def _among(places: list[str]) -> str:
    return f" ({listed(sorted(places))})" if places else ""


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
