"""Monitor the heartbeats of an attempt while it runs.

heartbeats --a few times a second--> Watchdog --hang--> stacks of every rank, in <run.dir>/logs --> kill all ranks
                                     StragglerDetector -> events
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hlat.launch.process_set import ProcessSet, send_signal
from hlat.resilience import (
    STACKS_SIGNAL,
    Hang,
    HeartbeatReading,
    Straggler,
    StragglerDetector,
    Watchdog,
    main_thread_stack,
    read_heartbeat,
    stacks_path,
)
from hlat.runtime.process import is_stopped, log_path

_EVERY = 0.25  # seconds
_WRITING = 2.0  # seconds for ranks to write their stacks
_MOMENT = 0.2  # seconds for a stopped rank to write its stacks


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


class RunMonitor:
    """Monitor of one attempt.

    Args:
        workers: processes of the attempt.
        beats: folder of their heartbeats.
        run_dir: folder of the run, in whose logs the stacks are kept.
        watchdog: finds hangs; it learns over all attempts.
        slowness: finds slow ranks.
        on_slow: called with each slow rank.
        is_there: returns True if ``run_dir`` is still the folder of this run.
    """

    def __init__(
        self,
        workers: ProcessSet,
        beats: Path,
        run_dir: Path,
        watchdog: Watchdog,
        slowness: StragglerDetector,
        on_slow: Callable[[Straggler], None],
        folder_is_ours: Callable[[], bool],
    ) -> None:
        self._workers, self._beats, self._run_dir = workers, beats, run_dir
        self._watchdog, self._slowness, self._on_slow = watchdog, slowness, on_slow
        self._folder_is_ours = folder_is_ours
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
        for slow in self._slowness.check(beats, now) if len(beats) == len(self._workers.pids) else []:
            self._on_slow(slow)
        hang = self._watchdog.check(beats, now, is_stopped)
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
        found = (read_heartbeat(self._beats, rank) for rank in self._workers.pids)
        return [beat for beat in found if beat is not None]

    def _describe(self, hang: Hang, beats: list[HeartbeatReading]) -> ObservedHang:
        texts = self._collect_stacks()
        file = log_path(self._run_dir, 0).with_name(f"hang-step-{hang.step:08d}.txt")
        content = "\n\n".join(f"{_describe_heartbeat(beat)}\n{texts.get(beat.rank, '')}" for beat in beats) + "\n\n"
        if not self._folder_is_ours():
            return ObservedHang(hang, main_thread_stack(texts.get(hang.ranks[0], "")), None)
        try:
            file.parent.mkdir(exist_ok=True)
            with file.open("a", encoding="utf-8") as log:  # the same step may have hung in an earlier attempt
                log.write(content)
        except OSError:  # code that needs the disk will report its error
            return ObservedHang(hang, main_thread_stack(texts.get(hang.ranks[0], "")), None)
        return ObservedHang(hang, main_thread_stack(texts.get(hang.ranks[0], "")), file)

    def _collect_stacks(self) -> dict[int, str]:
        """Stacks of every rank that writes them in time."""
        ranks = list(self._workers.pids)
        stopped = [rank for rank in ranks if is_stopped(self._workers.pids[rank])]
        send_signal(self._workers, ranks, STACKS_SIGNAL)
        for rank in stopped:  # it writes its stacks first, and must not do much else
            send_signal(self._workers, [rank], signal.SIGCONT)
            self._wait_for([rank], _MOMENT)
            send_signal(self._workers, [rank], signal.SIGSTOP)
        self._wait_for([rank for rank in ranks if rank not in stopped], _WRITING)
        return {rank: self._stacks(rank) for rank in ranks}

    def _wait_for(self, ranks: list[int], seconds: float) -> None:
        """Wait until ranks have completely written their stacks, for at most ``seconds``."""
        deadline, before, texts = time.monotonic() + seconds, [""], [""]
        while time.monotonic() < deadline and (not all(texts) or texts != before):
            time.sleep(_MOMENT / 100)
            before, texts = texts, [self._stacks(rank) for rank in ranks]

    def _stacks(self, rank: int) -> str:
        try:
            return stacks_path(self._beats, rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def _describe_heartbeat(beat: HeartbeatReading) -> str:
    """One line about a heartbeat, for the file of stacks."""
    what = "waits for other ranks" if beat.waiting else "at work"
    location = f", in {beat.location}" if beat.location else ""
    return f"==== rank {beat.rank}, pid {beat.pid}: {beat.phase} of step {beat.current_step}, {what}{location}"
