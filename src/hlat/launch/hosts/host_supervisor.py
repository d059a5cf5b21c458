"""Supervise the processes of one host of a run on several; the same command runs on every host.

hlat train RECIPE --nodes 2 --node 0 --nproc 8   on one host  --+--> they meet in the run's folder, which all hosts
hlat train RECIPE --nodes 2 --node 1 --nproc 8   on the other --+    share, and restart the run together
"""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hlat.launch.hosts.agent import HostAgent, HostPlace, NewLeader
from hlat.launch.hosts.bulletin import Bulletin
from hlat.launch.hosts.cluster_attempts import ClusterAttempts, ClusterSettings
from hlat.launch.hosts.cluster_stops import ClusterStops
from hlat.launch.hosts.host_ranks import Launch
from hlat.launch.hosts.leadership import NotLeaderError
from hlat.launch.hosts.records import FOLDER, AttemptOrder, Orders, read_orders
from hlat.launch.hosts.remote_ranks import HostLimits
from hlat.launch.supervision.run_events import RunEvents
from hlat.launch.supervision.supervisor import Supervision, Supervisor
from hlat.launch.supervision.wait import SignalForwarder
from hlat.resilience import heartbeat_root
from hlat.runtime.errors import HlatError, StorageError
from hlat.runtime.rank_env import host_name

_ALIVE = 10.0  # seconds of silence up to which the signals of a host count


@dataclass(frozen=True)
class HostRun:
    """A run on several hosts, as one of them supervises it.

    Attributes:
        place: this host.
        least: smallest number of hosts.
        most: number of hosts of the complete cluster.
        launch: launches the processes of this host.
        serve: serves the store of a rendezvous on an address within a block, and yields the port.
        fits: returns True if the recipe has a layout for this number of processes.
        examine: examines this host after a failure that it was to blame for, and returns what is wrong with it.
        settings: settings of the supervision.
        observe: context of the run, with the folder of heartbeats and of the account of goodput.
    """

    place: HostPlace
    least: int
    most: int
    launch: Launch
    serve: Callable[[str], AbstractContextManager[int]]
    fits: Callable[[int], bool]
    examine: Callable[[], list[str]]
    settings: Supervision
    observe: Callable[[Path], AbstractContextManager[None]]


def supervise_host(run: HostRun) -> int:
    """Supervise the processes of this host until the run has ended; return its exit code.

    Raises:
        LaunchError: this host cannot take part.
        MissingHostsError: too few hosts have come.
        StorageError: the folder of the run cannot be written.
    """
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
        stops = ClusterStops(lambda: table.living(_ALIVE))
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
    """Return the orders of the earlier leader of this launch, and the attempt that goes on; None without them.

    Files of an earlier launch in the same folder, which may have ended in any way, are no inheritance.
    """
    orders = read_orders(folder)
    living = candidate.table.living(_ALIVE).values()
    launches = {candidate.launch, *(status.launch for status in living)} - {None}
    if orders is None or orders.final is not None or orders.launch not in launches:
        return None, None
    attempt = orders.attempt
    running = attempt is not None and any(status.attempt == attempt.number for status in living)
    return orders, attempt if running else None
