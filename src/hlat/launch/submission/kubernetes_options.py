"""Options of a run on Kubernetes, and their problems."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from hlat.config import Recipe
from hlat.launch.submission.probes import probe_problems
from hlat.runtime.terminal_text import escape_name, line_problems

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
        """Every problem of the options."""
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
        """Pairs of claim and path."""
        return [(claim, path) for claim, _, path in (text.partition(":") for text in self.volumes)]

    def resource_counts(self) -> dict[str, int]:
        """Count by name of a resource."""
        return {name: int(count) for name, _, count in (text.partition("=") for text in self.resources)}

    def labels(self) -> dict[str, str]:
        """Labels of the nodes."""
        return {key: value for key, _, value in (text.partition("=") for text in self.node_selector)}
