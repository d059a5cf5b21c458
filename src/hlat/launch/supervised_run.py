"""Supervise a run whose processes are all on this machine."""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config import RecoveryConfig
from hlat.launch.local_ranks import LocalAttempts, Start
from hlat.launch.supervision.root_cause import RunOutcome
from hlat.launch.supervision.supervisor import Supervision, Supervisor, show_no_start
from hlat.launch.supervision.wait import SignalForwarder
from hlat.resilience import WorldSizePolicy, heartbeat_root


def _ignore(*arguments: object) -> None:
    """Do nothing."""


def _unobserved(beats: Path) -> AbstractContextManager[None]:
    """Observe nothing."""
    return nullcontext()


@dataclass(frozen=True)
class SupervisedRun:
    """A run to supervise.

    Attributes:
        start: launches its processes.
        sizes: numbers of processes to run with.
        run_dir: its folder.
        recovery: section ``recovery`` of its recipe.
        complain: shows an error to the user.
        say: shows other messages to the user.
        failed: called with the reason if the run fails for good.
        show_event: called with each event of the supervisor, kind and fields.
        show_start: shows what is being started until the function that it returns is called.
        observe: context of the run, with the folder of its heartbeats and of its account of goodput.
    """

    start: Start
    sizes: WorldSizePolicy
    run_dir: Path
    recovery: RecoveryConfig
    complain: Callable[[str], None]
    say: Callable[[str], None]
    failed: Callable[[RunOutcome], None] = _ignore
    show_event: Callable[[str, Mapping[str, Any]], None] = _ignore
    show_start: Callable[[str], Callable[[], None]] = show_no_start
    observe: Callable[[Path], AbstractContextManager[None]] = _unobserved


def supervise(run: SupervisedRun) -> int:
    """Run until it succeeds or fails for good.

    Signals that ask it to stop are forwarded, and the run saves and stops without a time limit. A second signal is
    forwarded too, and ends it at once.

    Returns:
        The exit code of the same command in a single process without a supervisor.
    """
    with (
        SignalForwarder() as stops,
        tempfile.TemporaryDirectory(prefix="hlat-", dir=heartbeat_root()) as name,
        run.observe(Path(name)),
    ):
        beats = Path(name)
        settings = Supervision(
            run.run_dir, run.recovery, run.complain, run.say, run.failed, run.show_event, run.show_start
        )
        return Supervisor(settings, LocalAttempts(run.start, run.sizes, beats), stops, beats).run()
