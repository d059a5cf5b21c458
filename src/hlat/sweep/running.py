"""Runs of a sweep, one after the other on this machine, each a process of its own: ``hlat train``.

run --already finished--> left alone
run --subprocess--> exit code; a run that fails does not keep the others from running
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from hlat.reporting import RunSummary, list_runs
from hlat.sweep.runs import Sweep, SweepRun

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class SweepResult:
    """A run of a sweep as it stands.

    Attributes:
        run: the run.
        summary: its state and last numbers; None if it has not begun.
        exit_code: exit code of its process; None if it was not started this time.
    """

    run: SweepRun
    summary: RunSummary | None
    exit_code: int | None = None

    @property
    def is_finished(self) -> bool:
        """True if nothing is left to be done."""
        found = self.summary
        return found is not None and found.state == "finished" and (found.step or 0) >= self.run.steps


def sweep_results(sweep: Sweep) -> list[SweepResult]:
    """Read how the runs of a sweep stand."""
    return [_result(run) for run in sweep.runs]


def run_sweep(
    sweep: Sweep,
    say: Callable[[str], None],
    *,
    only: int | None = None,
    train_options: Sequence[str] = (),
) -> list[SweepResult]:
    """Train the runs that are not finished.

    Args:
        sweep: the sweep.
        say: shows a message to the user.
        only: number of the run to train, from 0; None trains all.
        train_options: options of ``hlat train``, such as ("--nproc", "2").

    Returns:
        Every run as it stands then. Training ends with the run that a signal interrupted.
    """
    codes: dict[str, int] = {}
    for number, run in enumerate(sweep.runs):
        if only not in (None, number):
            continue
        head = f"run {number + 1} of {len(sweep.runs)}: {run.name}"
        if _result(run).is_finished:
            say(f"{head}: finished before")
            continue
        say(head)
        codes[run.name], interrupted = _train(sweep.recipe, run, train_options)
        if interrupted:
            break
    return [_result(run, codes.get(run.name)) for run in sweep.runs]


def _result(run: SweepRun, exit_code: int | None = None) -> SweepResult:
    found = list_runs(run.folder) if run.folder.is_dir() else []
    return SweepResult(run, next((one for one in found if one.path == run.folder), None), exit_code)


def _train(recipe: str, run: SweepRun, options: Sequence[str]) -> tuple[int, bool]:
    """Train one run; signals are passed on to its process, which saves before it ends.

    Returns:
        The exit code of the process, and True if a signal came.
    """
    command = [sys.executable, "-P", "-m", "hlat", "train", *options, recipe, *run.overrides]
    # A process group of its own: Ctrl-C at a terminal would reach it twice, and twice means at once.
    process = subprocess.Popen(command, process_group=0)
    with _passing_on(process) as passed:
        return process.wait(), bool(passed)


@contextmanager
def _passing_on(process: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Send the signals that end a program to another process instead, except those that this one ignores.

    Yields:
        The signals that have come.
    """
    passed: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        passed.append(number)
        process.send_signal(number)

    heard = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, pass_on) for number in heard}
    try:
        yield passed
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
