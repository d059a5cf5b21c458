"""Monitor the heartbeats of an attempt while it runs.

heartbeats --a few times a second--> Watchdog --hang--> stacks of every rank, in <run.dir>/logs --> kill all ranks
                                     StragglerDetector -> events
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hlat.launch.supervision.running_ranks import RunningRanks
from hlat.resilience import Hang, HeartbeatReading, Straggler, StragglerDetector, Watchdog, main_thread_stack
from hlat.runtime.process.rank_log import log_path

_EVERY = 0.25  # seconds


@dataclass(frozen=True)
class ObservedHang:
    """A hang with its evidence.

    Attributes:
        hang: the hang that the watchdog found.
        stack: stack of the main thread of the first hanging rank.
        file: file with the stacks of all ranks; None if it cannot be written.
    """

    hang: Hang
    stack: str
    file: Path | None

    def __str__(self) -> str:
        """Describe the hang in one or two sentences."""
        hang = self.hang
        alone = len(hang.ranks) == 1
        who = f"rank {hang.ranks[0]} hangs" if alone else f"ranks {', '.join(map(str, hang.ranks))} hang"
        text = f"{who} in {hang.phase} of step {hang.step} for {hang.seconds:.0f} s: {hang.why}"
        return text if self.file is None else f"{text}\nevery rank's stacks: {self.file}"


@dataclass(frozen=True)
class MonitorObservers:
    """Functions that a monitor calls.

    Attributes:
        on_start: called, perhaps often, once rank 0 has a heartbeat: from then on it shows what it does.
        on_slow: called with each slow rank.
        folder_is_ours: returns True if the run's folder is still the folder of this run.
    """

    on_start: Callable[[], None]
    on_slow: Callable[[Straggler], None]
    folder_is_ours: Callable[[], bool]


class RunMonitor:
    """Monitor of one attempt.

    Args:
        workers: processes of the attempt.
        run_dir: folder of the run, in whose logs the stacks are kept.
        watchdog: finds hangs; it learns over all attempts.
        slowness: finds slow ranks.
        observers: functions that it calls.
    """

    def __init__(
        self,
        workers: RunningRanks,
        run_dir: Path,
        watchdog: Watchdog,
        slowness: StragglerDetector,
        observers: MonitorObservers,
    ) -> None:
        self._workers, self._run_dir = workers, run_dir
        self._watchdog, self._slowness, self._observers = watchdog, slowness, observers
        self._next = time.monotonic()
        self.hang: ObservedHang | None = None
        self._at_hang: list[HeartbeatReading] | None = None

    def __call__(self) -> bool:
        """Check the heartbeats if a check is due; return True if the run hangs."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _EVERY
        beats = self.readings()
        if any(beat.rank == 0 for beat in beats):
            self._observers.on_start()
        for slow in self._slowness.check(beats, now) if len(beats) == len(self._workers.ranks) else []:
            self._observers.on_slow(slow)
        late = self._watchdog.check(beats, now, self._workers.is_stopped)
        hang = self._workers.outage() if late is None else self._workers.locate(late)
        if hang is not None:
            self._at_hang = beats
            self.hang = self._describe(hang, beats)
        return hang is not None

    def readings(self) -> list[HeartbeatReading]:
        """Heartbeats of the ranks that have one; after a hang, the heartbeats at the time it was found.

        A stopped rank that is continued to write its stacks ends the phase that hung. A later heartbeat would then
        count that phase as work.
        """
        if self._at_hang is not None:
            return self._at_hang
        return self._workers.readings()

    def _describe(self, hang: Hang, beats: list[HeartbeatReading]) -> ObservedHang:
        texts = self._workers.stacks()
        file = log_path(self._run_dir, 0).with_name(f"hang-step-{hang.step:08d}.txt")
        content = "\n\n".join(f"{_describe_heartbeat(beat)}\n{texts.get(beat.rank, '')}" for beat in beats) + "\n\n"
        if not self._observers.folder_is_ours():
            return ObservedHang(hang, main_thread_stack(texts.get(hang.ranks[0], "")), None)
        try:
            file.parent.mkdir(exist_ok=True)
            with file.open("a", encoding="utf-8") as log:  # the same step may have hung in an earlier attempt
                log.write(content)
        except OSError:  # code that needs the disk will report its error
            return ObservedHang(hang, main_thread_stack(texts.get(hang.ranks[0], "")), None)
        return ObservedHang(hang, main_thread_stack(texts.get(hang.ranks[0], "")), file)


def _describe_heartbeat(beat: HeartbeatReading) -> str:
    """One line about a heartbeat, for the file of stacks."""
    what = "waits for other ranks" if beat.waiting else "at work"
    location = f", in {beat.location}" if beat.location else ""
    return f"==== rank {beat.rank}, pid {beat.pid}: {beat.phase} of step {beat.current_step}, {what}{location}"
