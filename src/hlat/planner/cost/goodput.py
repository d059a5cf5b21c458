"""How much of a run's time counts, and what it costs: failures, saves, restarts.

    cluster, bytes to save -> stall of a save, restart, mean time between failures -> interval, goodput (Daly 2006)
                                                                                   -> a run lived through, many times

The formula is that of checkpoint_interval.py; the simulation draws failures and plays the run with them, as a check of
the formula where its assumptions wear thin, and for the spread: how bad a bad run is.
"""

import random
from dataclasses import dataclass

from hlat.hardware import Cluster
from hlat.resilience import best_interval, expected_goodput
from hlat.runtime import PlanError

_DAY = 86400.0
_MOST_LOST = 5.0  # mean times between failures that may pass from one to the next save: e^-5 get that far
_SPARED = 0.002  # of goodput, for saves that are not made

# What nobody can look up in a data sheet; a plan states them among its assumptions.
HOST_COPY_RATE = 10e9
"""Bytes per second that a device copies its state to the host's memory at, while training stands still."""
STORE_RATE_PER_INSTANCE = 2e9
"""Bytes per second that an instance writes to and reads from the shared file system at."""
STORE_RATE_LIMIT = 2e12
"""Bytes per second that the file system takes in all: what Tectonic sustained (The Llama 3 herd, section 3.3.1)."""
DETECTION = 120.0
"""Seconds until a failure is noticed and the run is given up."""
START_UP = {"trainium": 900.0}
"""Seconds from starting processes to the first step; graphs are compiled on Trainium."""
OTHER_START_UP = 180.0
SOFTWARE_FAILURES_PER_DAY = 0.1
"""Interruptions of a run by what is not hardware, per day, whatever its size."""


@dataclass(frozen=True)
class Reliability:
    """What goes wrong with a run, in seconds.

    Attributes:
        mtbf: mean time between interruptions.
        stall: that training stands still for a save.
        writing: from there until the save is durable.
        restart: from an interruption until steps go on.
        interval: of training between two saves: Daly's, doubled while that costs next to nothing.
        goodput: share of the time that counts, by Daly's formula.
    """

    mtbf: float
    stall: float
    writing: float
    restart: float
    interval: float
    goodput: float


def predict_reliability(cluster: Cluster, state_bytes: float) -> Reliability:
    """What a run on a cluster has to expect.

    Args:
        state_bytes: of weights and optimizer over all devices, each once.

    Raises:
        PlanError: it fails so often that it would not get on.
    """
    per_day = cluster.instance.failures.per_day * cluster.count + SOFTWARE_FAILURES_PER_DAY
    mtbf = _DAY / per_day
    stall = state_bytes / cluster.devices / HOST_COPY_RATE
    writing = state_bytes / min(STORE_RATE_PER_INSTANCE * cluster.count, STORE_RATE_LIMIT)
    restart = DETECTION + START_UP.get(cluster.chip.family or "", OTHER_START_UP) + writing
    interval = max(best_interval(max(stall, 1e-3), mtbf), writing)
    if restart + writing + interval > _MOST_LOST * mtbf:
        raise PlanError(
            f"{cluster.name} fails every {mtbf:,.0f} seconds, and a restart takes {restart:,.0f}: a run would not get "
            f"on. Failures per day are those of {cluster.instance.name} in the catalog."
        )

    def share(seconds: float) -> float:
        return expected_goodput(seconds, stall, mtbf, restart, writing)

    # Where saves cost next to nothing the best is to save all the time. Whoever saves less often, and loses next to
    # nothing by it, spares the file system.
    best = share(interval)
    while share(2 * interval) >= best - _SPARED:
        interval *= 2
    return Reliability(mtbf, stall, writing, restart, interval, share(interval))


@dataclass(frozen=True)
class Simulated:
    """Goodput over many simulated runs: mean, and the one that nine of ten runs are better than."""

    mean: float
    worst_tenth: float


def simulate_goodput(one: Reliability, work: float, rng: random.Random, runs: int = 100) -> Simulated:
    """Play runs of ``work`` seconds of steps with failures that come at random.

    Args:
        one: of the run.
        work: seconds of steps that have to be made.
        rng: where failures come from.
        runs: how many.
    """
    shares = sorted(work / _wall(one, work, rng) for _ in range(runs))
    return Simulated(sum(shares) / runs, shares[runs // 10])


def _wall(one: Reliability, work: float, rng: random.Random) -> float:
    """Seconds that one run takes."""
    clock = kept = 0.0  # kept: work that a durable save holds
    until = rng.expovariate(1 / one.mtbf)  # of running time, the next failure
    most = 1000 * work
    while clock < most:
        # From the last durable save on: as many whole intervals as fit before the failure.
        cycle = one.interval + one.stall
        left = work - kept
        cycles = int(left // one.interval)
        needed = left + cycles * one.stall
        if until >= needed:
            return clock + needed
        clock += until
        saves = int(max(0.0, until - one.writing) // cycle)  # begun so early that they were durable by then
        kept += saves * one.interval
        clock += one.restart
        until = rng.expovariate(1 / one.mtbf)
    return clock
