"""A run to submit to a scheduler: recipe, number of nodes and processes, kind of machine, environment variables.

    RunRequest, problems of the scheduler's options --prepare--> PreparedRun, or one error with every problem
    PreparedRun --> slurm: batch script    kubernetes: manifests

Recipe and options are checked where the command is given, long before a node is allocated.
"""

import logging
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hlat.config import Recipe, RecipeError
from hlat.hardware import Cluster, LaunchSettings
from hlat.launch.preflight.request import cluster_of
from hlat.launch.start_checks import check_device_memory, findings
from hlat.launch.start_place import Here, StartPlace, sections_of
from hlat.planner import load_run_recipe, resolve_defaults
from hlat.runtime.errors import LaunchError
from hlat.runtime.terminal import escape_controls, line_problems, plural
from hlat.runtime.urls import find_secret

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# variables that hlat or the scheduler sets in each process, to values that differ
_OWN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "SLURM_JOB_END_TIME",
    "HLAT_POD_ADDRESS",
)


_logger = logging.getLogger(__name__)


def _warn_of_devices(instance: str, per_node: int, nproc: int) -> None:
    """Warn of accelerators that are reserved and idle, or shared by processes: the job takes all of a machine's."""
    what, share = "starts more processes than that", ""
    if nproc < per_node:
        what = f"uses {nproc} of them"
        share = f"; or, to share machines, leave out --instance and ask the scheduler for {nproc}"
    _logger.warning(
        "warning: the job reserves the %s of each %s, and --nproc %d %s. Use --nproc %d, which is the default%s.",
        *(plural(per_node, "device"), instance, nproc, what, per_node, share),
    )


@dataclass(frozen=True)
class RunRequest:
    """A run to submit to a scheduler, before anything is checked."""

    recipe: str  # recipe file, or the name of a shipped recipe
    overrides: tuple[str, ...] = ()  # changes of the recipe, a.b=c each
    nodes: int = 1
    nproc: int | None = None  # processes per machine; None for one per accelerator of the instance, or one
    # name of the machines in the hardware catalog; None sets nothing that depends on the hardware
    instance: str | None = None
    hardware: str | None = None  # file with a catalog on top of the one that ships with hlat
    environment: tuple[str, ...] = ()  # variables for the processes, NAME=VALUE each; they replace those of the catalog
    name: str | None = None  # name of the job; None for the run's
    grace: int = 120  # seconds before the end at which the run is told to save
    program: str | None = None  # words of the command that runs hlat on the machines; None for the scheduler's default
    least: int | None = None  # smallest number of machines with which the run goes on if others are lost; None for all
    anyway: bool = False  # only warn of a run that does not fit into the devices' memory

    def prepare(self, problems: Sequence[str], check: Callable[[Recipe], list[str]]) -> "PreparedRun":
        """Check the request, and fill in what follows from the recipe and the instance.

        Args:
            problems: problems of the scheduler's options, which are reported together with those found here.
            check: returns the problems of the scheduler's options with the recipe.

        Raises:
            LaunchError: an option is wrong; every problem of options and recipe is listed.
            RecipeError: only the recipe is wrong; every problem is listed.
        """
        found = [*problems, *self._count_problems()]
        cluster = cluster_of(self.instance, max(1, self.nodes), self.hardware, found)
        settings = LaunchSettings() if cluster is None else cluster.instance.launch
        per_node = 1 if cluster is None else cluster.devices_per_instance
        variables = self._variables(found)
        words = self._program_words(found)
        nproc = self.nproc if self.nproc is not None else per_node
        recipe, chosen = self._load(nproc, cluster, found)
        if recipe is not None:
            found += [*check(recipe), *self._memory_problems(recipe, cluster, nproc)]
        if found or recipe is None:
            raise problems_error(found)
        if self.instance is not None and nproc != per_node:
            _warn_of_devices(self.instance, per_node, nproc)
        # The nodes get them as overrides, and need not choose: all take the same, and the script shows them.
        request = replace(self, overrides=(*self.overrides, *chosen))
        return PreparedRun(request, recipe, nproc, settings, {**settings.environment, **variables}, words)

    def _count_problems(self) -> list[str]:
        wrong = small_counts({"--nodes": self.nodes, "--nproc": self.nproc, "--grace": self.grace})
        if self.least is not None and not 1 <= self.least <= max(1, self.nodes):
            wrong.append(f"least {self.least}: expected a number between 1 and {max(1, self.nodes)}.")
        if self.name == "":
            wrong.append("--name: expected a name.")
        given = {"recipe": (self.recipe,), "override": self.overrides, "--name": (self.name or "",)}
        return [
            *wrong,
            *(found for what, texts in given.items() for text in texts for found in line_problems(what, text)),
        ]

    def _memory_problems(self, recipe: Recipe, cluster: Cluster | None, nproc: int) -> list[str]:
        """Return a run that does not fit into the devices of the instance; only warn of it if it is to go on."""
        # Nothing is found without a cluster.
        here = Here(None, max(1, self.nodes) * max(1, nproc), cluster, files=False)
        found = list(findings(StartPlace(sections_of(recipe), recipe, here), (check_device_memory,)))
        if not self.anyway:
            return [f"memory: {problem} Or --anyway submits it as it is." for problem in found]
        for problem in found:
            _logger.warning("warning: memory: %s", problem)
        return []

    def _variables(self, problems: list[str]) -> dict[str, str]:
        variables: dict[str, str] = {}
        for text in self.environment:
            name, equals, value = text.partition("=")
            if not equals or not _VARIABLE.fullmatch(name):
                problems.append(f"--env {escape_controls(name)}: expected NAME=VALUE.")
            elif name in _OWN_VARIABLES:
                problems.append(f"--env {name}: hlat sets this variable itself, in each process.")
            elif unfit := line_problems(f"--env {name}", value):
                problems += unfit
            elif find_secret(value) is not None:
                problems.append(f"--env {name}: the value contains a secret, and scripts and manifests are not secret.")
            else:
                variables[name] = value
        return variables

    def _program_words(self, problems: list[str]) -> list[str]:
        try:
            words = shlex.split(self.program or "")
        except ValueError as error:
            problems.append(f"--program {escape_controls(self.program or '')}: {error}.")
            return []
        if self.program is not None and not words:
            problems.append("--program: expected the words of a command.")
        problems += line_problems("--program", self.program or "")
        return words

    def _load(self, nproc: int, cluster: Cluster | None, problems: list[str]) -> tuple[Recipe | None, list[str]]:
        """Load the recipe, and choose what it leaves open by the instance; return it and the choices as overrides.

        Its problems are appended to other problems if there are any.
        """
        # max: a wrong number is a problem already, and those of the recipe are to be listed with it.
        world = max(1, self.nodes) * max(1, nproc)
        try:
            recipe, choices = resolve_defaults(
                load_run_recipe(self.recipe, self.overrides, world=world), world, cluster, here=False
            )
        except RecipeError as error:
            if not problems:
                raise
            problems.append(str(error))
            return None, []
        for choice in choices if cluster is not None else ():
            _logger.info("chosen: %s", choice)
        return recipe, [word for choice in choices for word in choice.overrides] if cluster is not None else []


@dataclass(frozen=True)
class PreparedRun:
    """A request that has been checked."""

    request: RunRequest
    recipe: Recipe  # with all defaults filled in
    nproc: int
    settings: LaunchSettings  # settings of the instance, from the catalog
    environment: dict[str, str]  # variables for the processes: those of the catalog, and the request's on top
    program: list[str]  # words of the command that runs hlat, if the request names one

    @property
    def name(self) -> str:
        return self.request.name or self.recipe.run.name


def small_counts(counts: Mapping[str, int | None]) -> list[str]:
    """Return problems of numbers, by option, that must be 1 or more; None is none."""
    return [f"{name} {value}: expected 1 or more." for name, value in counts.items() if value is not None and value < 1]


def ask_scheduler(command: Sequence[str], text: str | None, seconds: float, missing: str) -> str:
    """Run a scheduler's command on a text, and return its output; LaunchError if it is not installed or fails."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds, check=False
        )
    except FileNotFoundError as error:
        raise LaunchError(missing) from error  # with what to do, which differs
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{command[0]} has not answered for {seconds:g} s.") from error
    if done.returncode:
        raise LaunchError(f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def problems_error(problems: Sequence[str]) -> LaunchError:
    """Make one error of all problems."""
    return LaunchError("\n".join([f"{plural(len(problems), 'problem')}:", *(f"  {problem}" for problem in problems)]))
