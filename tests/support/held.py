"""Processes that wait at a place until they are told: what a test does to them is neither too early nor too late."""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hlat.config import FaultConfig
from hlat.resilience import HeartbeatReading, Watchdog
from hlat.resilience.watchdog import Hang

_AT_AN_IMPORT = """
import os, signal, sys
reading, writing = os.pipe()
os.set_blocking(writing, False)
signal.set_wakeup_fd(writing)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            os.read(reading, 1)  # also of a signal that has come already
sys.meta_path.insert(0, Finder())
"""


def hold_imports(folder: Path) -> dict[str, str]:
    """Return variables by which new interpreters wait, where they import torch, until a signal has come.

    ``folder`` gets the file that Python reads at its start.
    """
    (folder / "sitecustomize.py").write_text(_AT_AN_IMPORT)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def wait_for_a_stop_after(step: int) -> None:
    """Let ranks that this process forks take no step after this one of theirs until a signal has asked them to stop."""
    from hlat.training.interruptions import StopRequest  # noqa: PLC0415 - imports torch

    begin, numbers = StopRequest.start_vote, itertools.count()

    def start_vote(stop: StopRequest) -> None:
        while next(numbers) >= step and stop.signal is None:
            time.sleep(0.01)
        begin(stop)

    StopRequest.start_vote = start_vote  # type: ignore[method-assign]


def slow_disks_wait_for(file: Path) -> None:
    """Let an injected slow disk wait until a file exists, in ranks that this process forks and in their savers."""
    from hlat.training.faulty_disk import FaultyDisk  # noqa: PLC0415 - imports torch

    begin = FaultyDisk.__init__

    def wait(seconds: float) -> None:
        while not file.exists():
            time.sleep(0.01)

    def init(disk: FaultyDisk, *given: object) -> None:
        begin(disk, *given, sleep=wait)  # type: ignore[arg-type]

    FaultyDisk.__init__ = init  # type: ignore[method-assign, assignment]


_AN_HOUR = 3600.0


def ahead_in_hangs(is_hung: Callable[[HeartbeatReading], bool]) -> Callable[..., Hang | None]:
    """Return a method for ``Watchdog.check`` whose clock is an hour ahead once a rank hangs, or was stopped.

    Then ``recovery.hang_seconds`` can be so long that no rank of a busy machine is silent for as long.
    """
    check = Watchdog.check

    def early(
        watchdog: Watchdog, beats: Sequence[HeartbeatReading], now: float, is_stopped: Callable[[int], bool]
    ) -> Hang | None:
        hangs = any(is_hung(beat) or is_stopped(beat.rank) for beat in beats)
        return check(watchdog, beats, now + (_AN_HOUR if hangs else 0.0), is_stopped)

    return early


def find_injected_hangs_at_once(folder: Path) -> None:
    """Let the supervisor of this process find hangs that its ranks inject; they note their process ids in a folder."""
    from hlat.resilience.fault_injection import FaultInjector  # noqa: PLC0415 - imports torch

    inject = FaultInjector._inject

    def noted(injector: FaultInjector, fault: FaultConfig) -> None:
        if fault.kind == "hang":
            (folder / f"hangs-{os.getpid()}").touch()
        inject(injector, fault)

    FaultInjector._inject = noted  # type: ignore[method-assign]
    Watchdog.check = ahead_in_hangs(lambda beat: (folder / f"hangs-{beat.pid}").exists())  # type: ignore[method-assign]
