"""Observation of a run from its files: heartbeats, goodput, metrics, events.

    attempt-N/rank-00000, ... --Watchdog--> hang or none       goodput.json, heartbeat of rank 0 --> goodput until now
    metrics.jsonl --> newest value of each metric              events.jsonl --> number by kind, time of the newest save

Hangs are judged as the supervisor does, by the same class with the same limits: saving, compiling and preparing text
are none.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hlat.launch.metrics_server.json_tail import JsonTail
from hlat.resilience import GOODPUT_FILE, Goodput, Hang, HeartbeatReading, Watchdog, read_heartbeat
from hlat.runtime.process.process_status import is_running, is_stopped
from hlat.tracking import from_json_value

_METRICS_TAIL = 1 << 20  # bytes of metrics.jsonl to begin with


@dataclass(frozen=True)
class ObservedRun:
    """A run to observe.

    Attributes:
        name: name of the run.
        run_dir: its folder.
        beats: folder of the heartbeats: of each attempt in attempt-N, or of the only one.
        total_steps: optimizer steps of its recipe.
        hang_seconds: as in section ``recovery`` of its recipe.
        parent: process id of the supervisor, or of the machine's first rank if there is none.
        started: time when it began to be observed, in seconds of the heartbeats' clock.
    """

    name: str
    run_dir: Path
    beats: Path
    total_steps: int
    hang_seconds: float | None
    parent: int
    started: float


@dataclass(frozen=True)
class RunObservation:
    """State of a run at one time.

    Attributes:
        attempts: attempts so far, the present one included.
        beats: heartbeats of the present attempt.
        heartbeat_ages: seconds since each was alive, by rank.
        trouble: reason why the run is not alive; None if it is.
        is_training: True if every process that runs has begun its first step, and one runs.
        metrics: newest value of each metric.
        events: number of events of each kind in the run's history.
        checkpoint_age: seconds since the newest checkpoint; None before the first.
        goodput: seconds by part.
    """

    attempts: int
    beats: list[HeartbeatReading]
    heartbeat_ages: dict[int, float]
    trouble: str | None
    is_training: bool
    metrics: dict[str, Any]
    events: dict[str, int]
    checkpoint_age: float | None
    goodput: dict[str, float]


class RunObserver:
    """Observer of a run. ``observe`` has to be called every few seconds, to learn how long phases take.

    Args:
        run: the run.
        clock: seconds, the monotonic clock of heartbeats.
        wall_clock: seconds since 1970, the clock of events.
    """

    def __init__(
        self, run: ObservedRun, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._run, self._clock, self._wall_clock = run, clock, wall_clock
        self._watchdog = Watchdog(run.hang_seconds)
        self._metrics_tail = JsonTail(run.run_dir / "metrics.jsonl", _METRICS_TAIL)
        self._events_tail = JsonTail(run.run_dir / "events.jsonl")
        self._metrics: dict[str, Any] = {}
        self._events: Counter[str] = Counter()
        self._saved_at: float | None = None

    def observe(self) -> RunObservation:
        """Read what is new, and return the state of the run now."""
        now = self._clock()
        attempts, beats = self._heartbeats()
        for record in self._metrics_tail.read():
            self._metrics.update({key: from_json_value(value) for key, value in record.items()})
        for event in self._events_tail.read():
            self._count(event)
        pids = {beat.rank: beat.pid for beat in beats}
        # A rank that has ended does not hang: its supervisor restarts it, perhaps after waiting for another host.
        live = [beat for beat in beats if is_running(beat.pid)]
        trouble = self._trouble(self._watchdog.check(live, now, lambda rank: is_stopped(pids[rank])))
        return RunObservation(
            attempts=attempts,
            beats=beats,
            heartbeat_ages={beat.rank: max(0.0, now - beat.alive_at) for beat in beats},
            trouble=trouble,
            is_training=bool(live) and all(beat.start_step is not None for beat in live),
            metrics=dict(self._metrics),
            events=dict(self._events),
            checkpoint_age=None if self._saved_at is None else max(0.0, self._wall_clock() - self._saved_at),
            goodput=self._goodput(attempts, beats, now),
        )

    def _heartbeats(self) -> tuple[int, list[HeartbeatReading]]:
        """Return the number of attempts, and the heartbeats of the last one."""
        numbers = [int(path.name.rpartition("-")[2]) for path in self._run.beats.glob("attempt-*")]
        folder = self._run.beats / f"attempt-{max(numbers)}" if numbers else self._run.beats
        ranks = sorted(int(path.name.removeprefix("rank-")) for path in folder.glob("rank-" + "[0-9]" * 5))
        found = (read_heartbeat(folder, rank) for rank in ranks)
        return max(1, len(numbers)), [beat for beat in found if beat is not None]

    def _count(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if isinstance(kind, str):
            self._events[kind] += 1
        if kind == "checkpoint":
            try:
                self._saved_at = datetime.fromisoformat(str(event["time"])).timestamp()
            except (KeyError, ValueError):  # written by another program
                return

    def _trouble(self, hang: Hang | None) -> str | None:
        if is_stopped(self._run.parent):
            return f"process {self._run.parent} is stopped by a signal"
        if hang is None:
            return None
        who = ", ".join(map(str, hang.ranks))
        return f"rank {who} hangs in {hang.phase} of step {hang.step} for {hang.seconds:.0f} s: {hang.why}"

    def _goodput(self, attempts: int, beats: list[HeartbeatReading], now: float) -> dict[str, float]:
        """Return the seconds by part until the end of rank 0's last phase; later ones are not known yet.

        None on a host of several that does not have rank 0, whose account is elsewhere.
        """
        account, ended = self._settled()
        first = next((beat for beat in beats if beat.rank == 0), None)
        if beats and first is None:
            return {}
        if ended == attempts:
            account.record_wait(now)
        elif first is None or first.start_step is None:
            account.record_attempt(now, None, failed=False)
        else:
            account.record_attempt(max(first.since, account.accounted_until), first, failed=False)
        return account.totals()

    def _settled(self) -> tuple[Goodput, int]:
        """Return the account of the attempts that have ended, and their number."""
        try:
            state = json.loads((self._run.beats / GOODPUT_FILE).read_text(encoding="utf-8"))
            return Goodput.from_state(state), int(state["attempts"])
        except (OSError, ValueError):  # no supervisor
            return Goodput(self._run.started), 0
