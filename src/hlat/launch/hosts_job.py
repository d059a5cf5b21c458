"""A training job on several hosts: ``hlat train RECIPE --nodes N``, the same command on each of them.

hlat train RECIPE --nodes 2 --node 0 --nproc 8   on one host  --+--> they meet in the run's folder, which all hosts
hlat train RECIPE --nodes 2 --node 1 --nproc 8   on the other --+    share, and restart the run together

--node, SLURM_NODEID, JOB_COMPLETION_INDEX, ... --> number of this host
--address, GLOO_SOCKET_IFNAME, the host's name ---> address of this host, on which alone it listens
TrainingJob --supervise_on_hosts--> HostRun --supervise_host--> HostAgent on every host --> exit code
                                                                on the leader also Supervisor of ClusterAttempts
signals that any of the supervisors has received --ClusterStops--> the run is asked to stop
"""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hlat.config import Recipe
from hlat.launch.hosts.records import AttemptOrder, HostStatus, NotLeaderError, Orders, read_orders
from hlat.launch.local_processes import ProcessSet, RankPlaces, hlat_command, launch_ranks
from hlat.launch.preflight.examination import check_before_restart
from hlat.launch.preflight.request import own_address
from hlat.launch.supervision.agent import HostAgent, HostPlace, HostRun, NewLeader
from hlat.launch.supervision.cluster_attempts import ClusterAttempts
from hlat.launch.supervision.remote_ranks import Bulletin
from hlat.launch.supervision.supervisor import Supervisor, Voice, heard_and_observed
from hlat.launch.training_job import TrainingJob, accepted_run, fits, parse_range
from hlat.runtime.distributed.network import is_loopback
from hlat.runtime.errors import HlatError, LaunchError, StorageError
from hlat.runtime.process import host_name
from hlat.runtime.slurm import first_number

# of Slurm, Kubernetes' indexed jobs, torchrun and others; the first that has a number counts
_NODE_VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "GROUP_RANK", "NODE_RANK")


@dataclass(frozen=True)
class HostOptions:
    """Options of ``hlat train`` that say how many hosts a run has, and which of them this is."""

    nodes: str | int  # number of hosts, or a range of it, as in 3:4
    node: int | None = None  # number of this host, from 0; None to take it from the scheduler's environment variables
    # address or name of this host for the others; None for that of the interface in GLOO_SOCKET_IFNAME, in
    # HLAT_ADDRESSES, or of the host's name
    address: str | None = None

    def resolve(self, nproc: int, environment: Mapping[str, str] = os.environ) -> tuple[int, int, HostPlace]:
        """Return the smallest and largest number of hosts, and this host; LaunchError lists every problem."""
        problems: list[str] = []
        try:
            least, most = parse_range("--nodes", str(self.nodes), "hosts", "3:4")
        except LaunchError as error:
            least, most = 0, 0
            problems.append(str(error))
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
        found = first_number(environment, *_NODE_VARIABLES)
        if found is None:
            names = ", ".join(_NODE_VARIABLES)
            problems.append(f"--node is missing: give each host its number, from 0 (none of {names} is set here).")
        return found

    def _find_address(self, environment: Mapping[str, str], most: int, problems: list[str]) -> str:
        try:
            found = own_address(self.address, environment)
        except OSError as error:
            problems.append(f"the address of this host is unknown: {error}. Give it with --address.")
            return ""
        if self.address is None and most > 1 and is_loopback(found):
            problems.append(f"this host is {found}, where no other host reaches it. Give another with --address.")
        return found


def supervise_on_hosts(job: TrainingJob, nproc: int, hosts: HostOptions, voice: Voice) -> int:
    """Train a job in ``nproc`` processes of this host and in others, restarted together; return the exit code.

    Raises:
        RecipeError: with every problem of the recipe, or of a component of another package.
        LaunchError: this host cannot take part.
        MissingHostsError: too few hosts have come.
        StorageError: the folder of the run cannot be written.
    """
    least, most, place = hosts.resolve(nproc)

    def launch(places: RankPlaces, environment: Mapping[str, str], folder: Path) -> AbstractContextManager[ProcessSet]:
        return launch_ranks(hlat_command(job.arguments()), places, environment, folder, voice.show)

    with accepted_run(job, nproc, most * nproc, voice, all_notes=True) as (recipe, run):
        examine = partial(_examine_host, recipe, nproc)
        return supervise_host(HostRun(place, least, most, launch, partial(fits, job), examine, run))


def _examine_host(recipe: Recipe, nproc: int) -> list[str]:
    """Examine this host as ``hlat doctor`` does, without other hosts; return what forbids a restart on it."""
    findings = check_before_restart(recipe, nproc)
    return [str(finding) for finding in findings if not finding.is_warning]


_ALIVE_SECONDS = 10.0  # seconds of silence up to which the signals of a host count


def supervise_host(run: HostRun) -> int:
    """Supervise this host's processes until the run has ended; exit code and errors as ``supervise_on_hosts``."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"run.dir {run.supervision.run_dir}: cannot be written: {error.strerror}."
        raise StorageError(f"{message} Give one on a file system that all hosts share.") from error
    with heard_and_observed(run.supervision) as (stops, beats):
        return HostAgent(run, beats, stops, partial(_lead, run, beats)).run()


def _lead(run: HostRun, beats: Path, candidate: NewLeader) -> None:
    """Lead the hosts: supervise the run as on one machine, with processes that are elsewhere."""
    earlier, attempt = _inheritance(run.folder, candidate)
    table, complain = candidate.table, run.supervision.voice.complain
    try:
        first = Orders(candidate.term, run.place.index, candidate.incarnation, candidate.incarnation)
        if earlier is not None:
            first = replace(
                first, launch=earlier.launch, attempt=attempt, suspects=earlier.suspects, state=earlier.state
            )
        bulletin = Bulletin(run.folder, first)
        attempts = ClusterAttempts(run, table, bulletin)
        if earlier is not None:
            complain(f"host {run.place.index} leads now: the host that led gives no sign of life")
            attempts.events.event("leader", host=host_name())
        stops = ClusterStops(lambda: table.living(_ALIVE_SECONDS))
        inherited = first.state.get("supervision")
        if inherited is not None and attempt is not None:  # it is counted once more when it is taken over
            inherited = inherited | {"count": inherited["count"] - 1}
        supervisor = Supervisor(run.supervision, attempts, stops, beats, inherited, candidate.attempt_age)
        try:
            code = supervisor.run()
        except HlatError as error:
            complain(f"error: {error}")
            code = error.exit_code
        bulletin.finish(code)
    except NotLeaderError:
        complain(f"host {run.place.index} leads no longer: another host has taken over")


def _inheritance(folder: Path, candidate: NewLeader) -> tuple[Orders | None, AttemptOrder | None]:
    """Return the orders of the earlier leader of this launch, and the attempt that goes on; None without them."""
    orders = read_orders(folder)
    living = candidate.table.living(_ALIVE_SECONDS).values()
    launches = {candidate.launch, *(status.launch for status in living)} - {None}
    # Files of an earlier launch in the same folder, which may have ended in any way, are no inheritance.
    if orders is None or orders.final is not None or orders.launch not in launches:
        return None, None
    attempt = orders.attempt
    running = attempt is not None and any(status.attempt == attempt.number for status in living)
    return orders, attempt if running else None


class ClusterStops:
    """Signals received by the supervisors of all hosts; ``living`` returns the statuses of those alive, by index.

    A scheduler sends the same signal to every host; it counts once. A second signal, which ends a run without saving,
    counts as soon as one host has received two.
    """

    def __init__(self, living: Callable[[], Mapping[int, HostStatus]]) -> None:
        self._living = living
        self._received: list[int] = []

    @property
    def received(self) -> list[int]:
        longest = max((list(status.signals) for status in self._living().values()), key=len, default=[])
        self._received += longest[len(self._received) :]
        return self._received
