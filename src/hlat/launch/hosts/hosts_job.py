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
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hlat.config import Recipe
from hlat.launch.hosts.agent import HostAgent, HostPlace, Launch, NewLeader
from hlat.launch.hosts.cluster_attempts import ClusterAttempts, ClusterSettings
from hlat.launch.hosts.records import FOLDER, AttemptOrder, HostStatus, NotLeaderError, Orders, read_orders
from hlat.launch.hosts.remote_ranks import Bulletin, HostLimits
from hlat.launch.local_processes import ProcessSet, RankPlaces
from hlat.launch.metrics_process import metrics_server
from hlat.launch.preflight.examination import check_before_restart
from hlat.launch.start_checks import Here
from hlat.launch.start_examination import check_extensions, load_and_check
from hlat.launch.supervision.incidents import RunEvents
from hlat.launch.supervision.running_ranks import SignalForwarder
from hlat.launch.supervision.supervisor import Supervision, Supervisor
from hlat.launch.training_job import SupervisionOptions, TrainingJob, fits
from hlat.resilience import heartbeat_root
from hlat.runtime.distributed.addresses import address_of, is_loopback, resolve_addresses
from hlat.runtime.errors import HlatError, LaunchError, StorageError
from hlat.runtime.process import host_name

ADDRESSES_ENV = "HLAT_ADDRESSES"
"""Environment variable with the addresses of hosts whose names may not resolve: NAME=ADDRESS, separated by spaces."""

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
            launch=partial(_launch_ranks, job, options.show),
            serve=_serve_store,
            fits=partial(fits, job),
            examine=partial(_examine_host, recipe, options.most),
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
def _launch_ranks(
    job: TrainingJob,
    show: Callable[[str], None] | None,
    places: RankPlaces,
    environment: Mapping[str, str],
    folder: Path,
) -> Iterator[ProcessSet]:
    from hlat.launch.multiprocess_launcher import hlat_command, launch_ranks  # noqa: PLC0415  (imports torch)

    with launch_ranks(hlat_command(job.arguments()), places, environment, folder, show) as workers:
        yield workers


def _examine_host(recipe: Recipe, nproc: int) -> list[str]:
    """Examine this host as ``hlat doctor`` does, without other hosts; return what forbids a restart on it."""
    findings = check_before_restart(recipe, nproc, recipe.run_dir)
    return [str(finding) for finding in findings if not finding.is_warning]


@contextmanager
def _serve_store(address: str) -> Iterator[int]:
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


_ALIVE_SECONDS = 10.0  # seconds of silence up to which the signals of a host count


@dataclass(frozen=True)
class HostRun:
    """A run on several hosts, as one of them supervises it."""

    place: HostPlace
    least: int  # smallest number of hosts
    most: int  # number of hosts of the complete cluster
    launch: Launch  # launches the processes of this host
    # serves the store of a rendezvous on an address within a block, and yields the port
    serve: Callable[[str], AbstractContextManager[int]]
    fits: Callable[[int], bool]  # returns True if the recipe has a layout for this number of processes
    # examines this host after a failure that it was to blame for, and returns what is wrong with it
    examine: Callable[[], list[str]]
    settings: Supervision
    # context of the run, with the folder of heartbeats and of the account of goodput
    observe: Callable[[Path], AbstractContextManager[None]]


def supervise_host(run: HostRun) -> int:
    """Supervise this host's processes until the run has ended; exit code and errors as ``supervise_on_hosts``."""
    folder = run.settings.run_dir / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"run.dir {run.settings.run_dir}: cannot be written: {error.strerror}."
        raise StorageError(f"{message} Give one on a file system that all hosts share.") from error
    with (
        SignalForwarder() as stops,
        tempfile.TemporaryDirectory(prefix="hlat-", dir=heartbeat_root()) as name,
        run.observe(Path(name)),
    ):
        lead = partial(_lead, run, folder, Path(name))
        agent = HostAgent(folder, run.place, run.launch, Path(name), stops, lead, run.examine)
        return agent.run()


def _lead(run: HostRun, folder: Path, beats: Path, candidate: NewLeader) -> None:
    """Lead the hosts: supervise the run as on one machine, with processes that are elsewhere."""
    earlier, attempt = _inheritance(folder, candidate)
    table = candidate.table
    try:
        limits = HostLimits.of(run.settings.recovery.hang_seconds)
        events = RunEvents(run.settings.run_dir / "events.jsonl", lambda: True, run.settings.show_event)
        settings = ClusterSettings(
            folder,
            run.place.index,
            run.least,
            run.most,
            run.fits,
            limits,
            run.serve,
            run.settings.complain,
            events.event,
        )
        first = Orders(candidate.term, run.place.index, candidate.incarnation, candidate.incarnation)
        if earlier is not None:
            first = replace(
                first, launch=earlier.launch, attempt=attempt, suspects=earlier.suspects, state=earlier.state
            )
        bulletin = Bulletin(folder, first)
        if earlier is not None:
            run.settings.complain(f"host {run.place.index} leads now: the host that led gives no sign of life")
            events.event("leader", host=host_name())
        attempts = ClusterAttempts(settings, table, bulletin, first.launch, first.state.get("attempts"))
        stops = ClusterStops(lambda: table.living(_ALIVE_SECONDS))
        inherited = first.state.get("supervision")
        if inherited is not None and attempt is not None:  # it is counted once more when it is taken over
            inherited = inherited | {"count": inherited["count"] - 1}
        supervisor = Supervisor(run.settings, attempts, stops, beats, inherited, candidate.attempt_age)
        try:
            code = supervisor.run()
        except HlatError as error:
            run.settings.complain(f"error: {error}")
            code = error.exit_code
        bulletin.finish(code)
    except NotLeaderError:
        run.settings.complain(f"host {run.place.index} leads no longer: another host has taken over")


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
