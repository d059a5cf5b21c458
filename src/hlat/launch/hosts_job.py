"""A training job on several hosts: ``hlat train RECIPE --nodes N``, the same command on each of them.

--node, SLURM_NODEID, JOB_COMPLETION_INDEX, ... --> number of this host
--address, GLOO_SOCKET_IFNAME, the host's name ---> address of this host, on which alone it listens
TrainingJob --supervise_on_hosts--> exit code
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hlat.config import Recipe
from hlat.launch.extension_check import check_extensions
from hlat.launch.hosts.agent import HostPlace
from hlat.launch.hosts.host_supervisor import HostRun, supervise_host
from hlat.launch.metrics_server.start import metrics_server
from hlat.launch.preflight.restart_check import check_before_restart
from hlat.launch.process_set import ProcessSet, RankPlaces
from hlat.launch.start_checks.examine import load_and_check
from hlat.launch.start_checks.place import Here
from hlat.launch.supervision.supervisor import Supervision
from hlat.launch.training_job import SupervisionOptions, TrainingJob, fits
from hlat.runtime.distributed.addresses import address_of, is_loopback, resolve_addresses
from hlat.runtime.errors import LaunchError
from hlat.runtime.rank_env import host_name

ADDRESSES_ENV = "HLAT_ADDRESSES"
"""Environment variable with the addresses of hosts whose names may not resolve: NAME=ADDRESS, separated by spaces."""

_NODE_VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "GROUP_RANK", "NODE_RANK")


@dataclass(frozen=True)
class HostOptions:
    """Hosts of a run.

    Attributes:
        nodes: number of hosts, or a range of it, as in 3:4.
        node: number of this host, from 0; None to take it from the scheduler's environment variables.
        address: address or name of this host for the others; None for that of the interface in GLOO_SOCKET_IFNAME, in
            HLAT_ADDRESSES, or of the host's name.
    """

    nodes: str | int
    node: int | None = None
    address: str | None = None

    def resolve(self, nproc: int, environment: Mapping[str, str] = os.environ) -> tuple[int, int, HostPlace]:
        """Return the smallest and the largest number of hosts, and this host.

        Args:
            nproc: processes of this host.
            environment: environment variables.

        Raises:
            LaunchError: the options are wrong, or this host's number or address cannot be found; all problems at once.
        """
        problems: list[str] = []
        least, most = _parse_nodes(str(self.nodes), problems)
        node = self._number(environment, problems)
        if node is not None and most and not 0 <= node < most:
            problems.append(f"--node {node}: with --nodes {self.nodes} it is between 0 and {most - 1}.")
        address = self._find_address(environment, most, problems)
        if problems:
            raise LaunchError("\n".join(problems))
        assert node is not None, "a missing number is a problem"
        return least, most, HostPlace(node, address, nproc)

    def _number(self, environment: Mapping[str, str], problems: list[str]) -> int | None:
        if self.node is not None:
            return self.node
        found = next((environment[name] for name in _NODE_VARIABLES if environment.get(name, "").isdecimal()), None)
        if found is None:
            names = ", ".join(_NODE_VARIABLES)
            problems.append(f"--node is missing: give each host its number, from 0 (none of {names} is set here).")
        return None if found is None else int(found)

    def _find_address(self, environment: Mapping[str, str], most: int, problems: list[str]) -> str:
        interface = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        name = host_name(environment)
        listed = dict(each.partition("=")[::2] for each in environment.get(ADDRESSES_ENV, "").split())
        given = self.address or (interface and address_of(interface)) or listed.get(name)
        wanted = given or name
        try:
            found = resolve_addresses(wanted)[0]
        except OSError as error:
            problems.append(f"the address of this host, {wanted}, is unknown: {error}. Give it with --address.")
            return ""
        if given is None and most > 1 and is_loopback(found):
            problems.append(f"{wanted} is {found}, where no other host reaches this one. Give another with --address.")
        return found


def supervise_on_hosts(
    job: TrainingJob, options: SupervisionOptions, hosts: HostOptions, ready: Callable[[Recipe], None]
) -> int:
    """Train a job in processes of this host and others, and restart it on all of them after failures.

    Args:
        job: the job.
        options: ``most`` is the number of processes of this host; and where messages go.
        hosts: hosts of the run.
        ready: called with the recipe when it has been accepted, before any process starts.

    Returns:
        The exit code of the command.

    Raises:
        RecipeError: with every problem of the recipe, or of a component of another package.
        LaunchError: this host cannot take part.
        MissingHostsError: too few hosts have come.
        StorageError: the folder of the run cannot be written.
    """
    least, most, place = hosts.resolve(options.most)
    world = most * options.most
    report = load_and_check(partial(job.load, world), Here(options.most, world, stores=False), forked=True)
    recipe = report.recipe
    ready(recipe)
    for note in report.notes:
        options.say(f"warning: {note}")
    check_extensions(recipe)
    with metrics_server(recipe, options.say) as observe:
        run = HostRun(
            place=place,
            least=least,
            most=most,
            launch=partial(_launch, job, options.show),
            serve=_serve,
            fits=partial(fits, job),
            examine=partial(_examine, recipe, options.most),
            settings=Supervision(
                recipe.run_dir,
                recipe.recovery,
                options.complain,
                options.say,
                options.failed,
                options.show_event,
                options.show_start,
            ),
            observe=observe,
        )
        return supervise_host(run)


@contextmanager
def _launch(
    job: TrainingJob,
    show: Callable[[str], None] | None,
    places: RankPlaces,
    environment: Mapping[str, str],
    folder: Path,
) -> Iterator[ProcessSet]:
    from hlat.launch.multiprocess_launcher import hlat_command, launch_ranks  # noqa: PLC0415  (imports torch)

    with launch_ranks(hlat_command(job.arguments()), places, environment, folder, show) as workers:
        yield workers


def _examine(recipe: Recipe, nproc: int) -> list[str]:
    """Examine this host as ``hlat doctor`` does, without other hosts; return what forbids a restart on it."""
    findings = check_before_restart(recipe, nproc, recipe.run_dir)
    return [str(finding) for finding in findings if not finding.is_warning]


@contextmanager
def _serve(address: str) -> Iterator[int]:
    from hlat.launch.multiprocess_launcher import open_store  # noqa: PLC0415  (imports torch)

    with open_store(address) as port:
        yield port


def _parse_nodes(text: str, problems: list[str]) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    least, most = (int(part) if part.isascii() and part.isdigit() else 0 for part in (low, high if colon else low))
    if not 1 <= least <= most:
        problems.append(f"--nodes {text}: expected a number of hosts, 1 or more, or a range as in 3:4.")
        return 0, 0
    return least, most
