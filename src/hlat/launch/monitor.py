"""Looking at the heartbeats of an attempt while it runs.

heartbeats --a few times a second--> Watchdog --hang--> stacks of every rank, in <run.dir>/logs --> all are killed
                                     Slowness ------> events
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hlat.launch.process_set import ProcessSet, send_signal
from hlat.resilience import ASK, Hang, Reading, Slow, Slowness, Watchdog, main_stack, read_beat, stacks_path
from hlat.runtime.process import is_stopped, log_path

_EVERY = 0.25  # seconds
_WRITING = 2.0  # seconds that ranks are given to write their stacks
_MOMENT = 0.2  # seconds that a rank which was stopped is given


@dataclass(frozen=True)
class ObservedHang:
    """A hang, as it is told."""

    hang: Hang
    stack: str  # of the main thread of the first rank that is to blame
    file: Path | None  # with the stacks of all; None where it cannot be written

    def __str__(self) -> str:
        """In a sentence or two."""
        hang = self.hang
        alone = len(hang.ranks) == 1
        who = f"rank {hang.ranks[0]} hangs" if alone else f"ranks {', '.join(map(str, hang.ranks))} hang"
        text = f"{who} in {hang.phase} of step {hang.step} for {hang.seconds:.0f} s: {hang.why}"
        return text if self.file is None else f"{text}\nevery rank's stacks: {self.file}"


class RunMonitor:
    """Looks at one attempt.

    Args:
        workers: its processes.
        beats: the folder of their heartbeats.
        run_dir: where stacks are kept.
        watchdog: finds hangs; it learns over all attempts.
        slowness: finds slow ranks.
        on_slow: told of each.
        is_there: whether the folder of that name is the run's.
    """

    def __init__(
        self,
        workers: ProcessSet,
        beats: Path,
        run_dir: Path,
        watchdog: Watchdog,
        slowness: Slowness,
        on_slow: Callable[[Slow], None],
        is_there: Callable[[], bool],
    ) -> None:
        self._workers, self._beats, self._run_dir = workers, beats, run_dir
        self._watchdog, self._slowness, self._on_slow, self._is_there = watchdog, slowness, on_slow, is_there
        self._next = time.monotonic()
        self.seen: ObservedHang | None = None
        self._when_seen: list[Reading] | None = None

    def __call__(self) -> bool:
        """Look, if it is time; whether the run hangs."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _EVERY
        beats = self.readings()
        for slow in self._slowness.look(beats, now) if len(beats) == len(self._workers.pids) else []:
            self._on_slow(slow)
        hang = self._watchdog.look(beats, now, is_stopped)
        if hang is not None:
            self._when_seen = beats
            self.seen = self._describe(hang, beats)
        return hang is not None

    def readings(self) -> list[Reading]:
        """The heartbeats of the ranks that have one; of a run that hangs, those with which it was seen.

        A stopped rank that goes on for its stacks ends the phase that hung, which would then count as work.
        """
        if self._when_seen is not None:
            return self._when_seen
        found = (read_beat(self._beats, rank) for rank in self._workers.pids)
        return [beat for beat in found if beat is not None]

    def _describe(self, hang: Hang, beats: list[Reading]) -> ObservedHang:
        texts = self._ask()
        file = log_path(self._run_dir, 0).with_name(f"hang-step-{hang.step:08d}.txt")
        content = "\n\n".join(f"{_line(beat)}\n{texts.get(beat.rank, '')}" for beat in beats) + "\n\n"
        if not self._is_there():
            return ObservedHang(hang, main_stack(texts.get(hang.ranks[0], "")), None)
        try:
            file.parent.mkdir(exist_ok=True)
            with file.open("a", encoding="utf-8") as log:  # the step may have hung before
                log.write(content)
        except OSError:  # what is wrong with the disk will be said by those who need it
            return ObservedHang(hang, main_stack(texts.get(hang.ranks[0], "")), None)
        return ObservedHang(hang, main_stack(texts.get(hang.ranks[0], "")), file)

    def _ask(self) -> dict[int, str]:
        """The stacks of every rank that writes them in time."""
        ranks = list(self._workers.pids)
        stopped = [rank for rank in ranks if is_stopped(self._workers.pids[rank])]
        send_signal(self._workers, ranks, ASK)
        for rank in stopped:  # it writes its stacks before it does anything else, and is not to do much else
            send_signal(self._workers, [rank], signal.SIGCONT)
            self._wait_for([rank], _MOMENT)
            send_signal(self._workers, [rank], signal.SIGSTOP)
        self._wait_for([rank for rank in ranks if rank not in stopped], _WRITING)
        return {rank: self._stacks(rank) for rank in ranks}

    def _wait_for(self, ranks: list[int], seconds: float) -> None:
        """Until ranks have written their stacks to the end, or so many seconds have passed."""
        deadline, before, texts = time.monotonic() + seconds, [""], [""]
        while time.monotonic() < deadline and (not all(texts) or texts != before):
            time.sleep(_MOMENT / 100)
            before, texts = texts, [self._stacks(rank) for rank in ranks]

    def _stacks(self, rank: int) -> str:
        try:
            return stacks_path(self._beats, rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def _line(beat: Reading) -> str:
    """What a heartbeat says, in a line."""
    what = "waits for other ranks" if beat.waiting else "at work"
    where = f", in {beat.where}" if beat.where else ""
    return f"==== rank {beat.rank}, pid {beat.pid}: {beat.phase} of step {beat.step_at_work}, {what}{where}"
