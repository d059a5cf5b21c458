"""Goodput of a run: the share of time spent on steps that count, after failures, saves and restarts.

    cluster, bytes to save -> stall per save, restart, mean time between failures -> interval, goodput (Daly 2006)
                                                                                  -> many simulated runs

The formula is that of resilience/goodput.py. The simulation draws random failures. It checks the formula where its
assumptions are weak, and shows how much runs differ.
"""

import random
from dataclasses import dataclass

from hlat.hardware import Cluster, StorageRate
from hlat.resilience import best_interval, expected_goodput
from hlat.runtime.errors import PlanError

_DAY = 86400.0
_MAX_CYCLE = 5.0  # longest restart plus interval, in mean times between failures: a share e^-5 survives it
_GOODPUT_TRADE = 0.002  # goodput given up for fewer saves

# Numbers that no data sheet has. Every plan lists them among its assumptions.
HOST_COPY_RATE = 10e9
"""Bytes per second of a device's copy of its state to host memory, during which training stalls."""
STORE_RATE_PER_INSTANCE = 2e9
"""Bytes per second between an instance and the shared file system, reading or writing."""
STORE_RATE_LIMIT = 2e12
"""Bytes per second of the whole file system: what Tectonic sustained (The Llama 3 herd, section 3.3.1)."""
DETECTION_SECONDS = 120.0
"""Seconds until a failure is detected and the run stopped."""
START_UP_SECONDS = {"trainium": 900.0}
"""Seconds from process start to the first step. Trainium compiles its graphs in that time."""
DEFAULT_START_UP_SECONDS = 180.0
SOFTWARE_FAILURES_PER_DAY = 0.1
"""Interruptions of a run per day by causes other than hardware, for any cluster size."""


@dataclass(frozen=True)
class Reliability:
    """Failures, saves and restarts of a run, in seconds."""

    mtbf: float  # mean time between interruptions
    stall: float  # a save stops training
    writing: float  # from the stall until the checkpoint is durable
    restart: float  # from an interruption until steps resume
    interval: float  # between two saves: Daly's optimum, doubled as long as that costs almost no goodput
    goodput: float  # share of time spent on steps that count, by Daly's formula
    saved_bytes: float = 0.0  # of a checkpoint
    start_up: float = 0.0  # share of restart: from the start of processes to the first step, without loading


def storage_rate(cluster: Cluster, storage: StorageRate | None) -> float:
    """Bytes per second in which all instances together save or load; None for the assumed rate."""
    if storage is not None:
        return storage.of(cluster)
    return min(STORE_RATE_PER_INSTANCE * cluster.count, STORE_RATE_LIMIT)


def predict_reliability(cluster: Cluster, state_bytes: float, storage: StorageRate | None = None) -> Reliability:
    """Predict failures, saves and restarts of a run.

    A save copies the state to the hosts while training stalls, then writes it to the file system beside the training. A
    restart loads it at the same rate. ``state_bytes`` counts each element once over all devices.

    Raises:
        PlanError: failures are so frequent that the run would make no progress.
    """
    per_day = cluster.instance.failures.per_day * cluster.count + SOFTWARE_FAILURES_PER_DAY
    mtbf = _DAY / per_day
    stall = state_bytes / cluster.devices / HOST_COPY_RATE
    writing = state_bytes / storage_rate(cluster, storage)
    start_up = START_UP_SECONDS.get(cluster.chip.family or "", DEFAULT_START_UP_SECONDS)
    restart = DETECTION_SECONDS + start_up + writing
    # A new save cannot begin before the last one is durable. Daly's formula needs a stall above 0.
    interval = max(best_interval(max(stall, 1e-3), mtbf), writing)
    if restart + writing + interval > _MAX_CYCLE * mtbf:
        raise PlanError(
            f"{cluster.name} fails every {mtbf:,.0f} seconds, and a restart takes {restart:,.0f}: a run would make no "
            f"progress. {writing:,.0f} seconds of the restart load the checkpoint (--storage); the failures per day "
            f"are those of {cluster.instance.name} in the catalog, or of --interruptions."
        )

    def goodput(seconds: float) -> float:
        return expected_goodput(seconds, stall, mtbf, restart, writing)

    # Cheap saves make the optimal interval very short. Saving less often costs almost nothing and spares the file
    # system.
    best = goodput(interval)
    while goodput(2 * interval) >= best - _GOODPUT_TRADE:
        interval *= 2
    return Reliability(mtbf, stall, writing, restart, interval, goodput(interval), state_bytes, start_up)


def simulate_goodput(expected: Reliability, work: float, rng: random.Random, runs: int = 100) -> tuple[float, float]:
    """Simulate runs of ``work`` seconds of steps with random failures; return the mean, and what nine of ten exceed."""
    shares = sorted(work / _run_seconds(expected, work, rng) for _ in range(runs))
    return sum(shares) / runs, shares[runs // 10]


def _run_seconds(expected: Reliability, work: float, rng: random.Random) -> float:
    clock = saved = 0.0  # saved: seconds of work in a durable checkpoint
    until_failure = rng.expovariate(1 / expected.mtbf)  # seconds of running time
    # A run that makes no progress would never end.
    limit = 1000 * work
    while clock < limit:
        # Since the last durable save: as many complete intervals as fit before the failure.
        cycle = expected.interval + expected.stall
        left = work - saved
        cycles = int(left // expected.interval)
        needed = left + cycles * expected.stall
        if until_failure >= needed:
            return clock + needed
        clock += until_failure
        saves = int(max(0.0, until_failure - expected.writing) // cycle)  # those that were durable by then
        saved += saves * expected.interval
        clock += expected.restart
        until_failure = rng.expovariate(1 / expected.mtbf)
    return clock
