"""Goodput: the time of a run by what it was spent on, and the goodput to expect from an interval between checkpoints.

    heartbeats, starts and ends of attempts --Goodput--> seconds by part, from the start of the command to its end:

    productive  steps up to a durable checkpoint, or up to the end of the run
    saving      training stalled for a save
    lost        steps that have to be repeated, and the time until a failure was detected and its processes ended
    starting    until the first step of the first attempt; shutdown of processes that end without failure
    recovering  until the first step of a later attempt
    waiting     for data, and before a restart

    stall per save, mean time between failures, restart time --> best_interval, expected_goodput

The parts add up to the total time. The lost time is known once the next attempt reports the step it started from.

The interval is that of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22 (2006), whose first-order form is J. W. Young's (1974). Failures are independent
and exponentially distributed, and may hit a save or a restart as well as a step.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hlat.resilience.heartbeat import HeartbeatReading

GOODPUT_PARTS = ("productive", "saving", "lost", "starting", "recovering", "waiting")


GOODPUT_FILE = "goodput.json"  # account of the attempts that have ended, beside the folders of their heartbeats


@dataclass(frozen=True)
class _UnsecuredSteps:
    """Productive seconds of a failed attempt, and the steps they were spent on."""

    start_step: int  # that the attempt started from
    step: int  # last one that it did
    durable_step: int | None  # newest that it knew to be durable
    durable_seconds: float  # productive seconds up to ``durable_step``
    seconds: float  # productive seconds up to ``step``

    def seconds_until(self, newest: int | None) -> float:
        """Seconds of the steps up to the newest durable one, interpolated between the known steps."""
        if newest is None or newest <= self.start_step:
            return 0.0
        points = [(self.start_step, 0.0), (self.step, self.seconds)]
        if self.durable_step is not None and self.start_step < self.durable_step < self.step:
            points.insert(1, (self.durable_step, self.durable_seconds))
        for (low, before), (high, after) in pairwise(points):
            if newest <= high and high > low:
                return before + (after - before) * (newest - low) / (high - low)
        return self.seconds


class Goodput:
    """Account of a run's time from ``now``, the start of the command; times are on the heartbeats' monotonic clock."""

    def __init__(self, now: float) -> None:
        self._seconds = dict.fromkeys(GOODPUT_PARTS, 0.0)
        self.accounted_until = now
        self._attempts = 0
        self._unsecured: _UnsecuredSteps | None = None

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Goodput":
        account = cls(state["accounted_until"])
        account._seconds, account._attempts = dict(state["seconds"]), state["attempts"]
        account._unsecured = None if state["unsecured"] is None else _UnsecuredSteps(**state["unsecured"])
        return account

    def state(self) -> dict[str, Any]:
        """Return the account as JSON values; ``attempts`` is the number of attempts that have ended."""
        return {
            "seconds": self._seconds,
            "accounted_until": self.accounted_until,
            "attempts": self._attempts,
            "unsecured": None if self._unsecured is None else asdict(self._unsecured),
        }

    def record_wait(self, now: float) -> None:
        self._seconds["waiting"] += now - self.accounted_until
        self.accounted_until = now

    def record_attempt(self, now: float, heartbeat: HeartbeatReading | None, failed: bool) -> None:
        """Count an attempt whose last process ended at ``now``, from rank 0's last heartbeat if it wrote one."""
        startup_part = "recovering" if self._attempts else "starting"
        self._attempts += 1
        if heartbeat is None or heartbeat.first_step_at is None or heartbeat.start_step is None:
            self._seconds[startup_part] += now - self.accounted_until
            self.accounted_until = now
            return
        # This attempt shows from which step the run went on.
        self._settle_lost(heartbeat.start_step)
        saving = sum(heartbeat.seconds.get(phase, 0.0) for phase in ("saving", "checkpoint"))
        waiting = heartbeat.seconds.get("data", 0.0)
        startup = heartbeat.first_step_at - self.accounted_until
        self._seconds[startup_part] += startup
        self._seconds["saving"] += saving
        self._seconds["waiting"] += waiting
        self._seconds["productive"] += heartbeat.productive
        rest = now - self.accounted_until - startup - saving - waiting - heartbeat.productive
        # After a failure, the time until it was detected; else the shutdown.
        self._seconds["lost" if failed else "starting"] += rest
        self.accounted_until = now
        if failed:
            self._unsecured = _UnsecuredSteps(
                heartbeat.start_step,
                heartbeat.step,
                heartbeat.durable_step,
                heartbeat.durable_seconds,
                heartbeat.productive,
            )

    def totals(self) -> dict[str, float]:
        """Seconds by part so far; steps after the newest known save count as lost."""
        # On a copy: a later attempt may find a newer save.
        account = Goodput.from_state(self.state())
        if self._unsecured is not None:
            account._settle_lost(self._unsecured.durable_step)
        return account._seconds

    def _settle_lost(self, newest: int | None) -> None:
        """Count the failed attempt's steps after ``newest``, from which the run continues, as lost."""
        if self._unsecured is None:
            return
        durable = self._unsecured.seconds_until(newest)
        self._seconds["productive"] -= self._unsecured.seconds - durable
        self._seconds["lost"] += self._unsecured.seconds - durable
        self._unsecured = None


def best_interval(stall: float, mtbf: float) -> float:
    """Seconds of training between saves of ``stall`` seconds that maximize goodput (Daly 2006, equation 37)."""
    # The series of the other case holds below this.
    if stall >= 2 * mtbf:
        return mtbf
    share = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - stall


def expected_goodput(interval: float, stall: float, mtbf: float, restart: float, delay: float = 0.0) -> float:
    """Share of time spent on steps that are not lost, 0 to 1 (Daly 2006, equation 20); arguments in seconds."""
    # A failure in the ``delay`` until a background save is durable loses these seconds too, as if the restart took
    # that much longer.
    wall = mtbf * math.exp((restart + delay) / mtbf) * math.expm1((interval + stall) / mtbf)
    return interval / wall
