"""A supervisor of one host with ranks that need no torch: ``python -m tests.support.launch.host_worker FOLDER ...``.

host_worker supervise FOLDER NODE LEAST:MOST HANG_SECONDS     as ``hlat train --nodes`` does; fixed limits of silence
                                                              are HANG_SECONDS too if that is longer
host_worker rank FOLDER                                       a rank: steps until the file ``finish`` exists
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from hlat.config.sections.operation import RecoveryConfig
from hlat.launch import hosts_job, worker_context
from hlat.launch.hosts_job import supervise_host
from hlat.launch.local_processes import RankPlaces
from hlat.launch.supervision import agent, cluster_attempts, remote_ranks
from hlat.launch.supervision.agent import HostPlace, HostRun
from hlat.launch.supervision.supervisor import Supervision, Voice
from hlat.resilience import record_durable_step, record_run_id, set_step_counter
from hlat.runtime.process import LAUNCHER_ENV
from hlat.runtime.progress import enter_phase

NPROC = 2
LIMITS = [(remote_ranks, "_SHORT_SILENCE"), (remote_ranks, "_LONGEST_SILENCE"), (cluster_attempts, "_ALIVE")]
LIMITS += [(agent, "_LEADER_SILENCE"), (hosts_job, "_ALIVE_SECONDS")]


class Workers:
    """Ranks of a host, each in its own session."""

    def __init__(self, folder: Path, places: RankPlaces, environment: Mapping[str, str], reports: Path) -> None:
        self._reports, self._processes = reports, {}
        for local in range(places.nproc):
            rank = places.first + local
            own = {
                **os.environ,
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(places.world),
                "MASTER_ADDR": places.address,
                "MASTER_PORT": str(places.port),
                "TORCHELASTIC_ERROR_FILE": str(self.error_file(rank)),
                LAUNCHER_ENV: str(os.getpid()),
            }
            words = [sys.executable, "-m", "tests.support.launch.host_worker", "rank", str(folder)]
            self._processes[rank] = subprocess.Popen(words, env=own, start_new_session=True)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def poll(self, rank: int) -> int | None:
        return self._processes[rank].poll()

    def error_file(self, rank: int) -> Path:
        return self._reports / f"error-{rank}.json"

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def run_rank(folder: Path) -> int:
    """Take a step every 20 ms; save each tenth; stop on SIGUSR1 or SIGTERM as training does."""
    rank, stops = os.environ["RANK"], []
    begin = json.loads((folder / "saved").read_text()) if (folder / "saved").exists() else 0
    with worker_context():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: stops.append(number))
        step = begin
        record_run_id("run-a")
        set_step_counter(lambda: step)
        with (folder / "attempts").open("a") as file:
            file.write(json.dumps({"rank": int(rank), "world": int(os.environ["WORLD_SIZE"]), "step": begin}) + "\n")
        while not (folder / "finish").exists():
            enter_phase("data")
            enter_phase("forward")
            if (folder / f"freeze-{rank}").exists():
                time.sleep(1000)
            time.sleep(0.02)
            step += 1
            if step % 10 == 0 and rank == "0":
                partial = folder / f"saved.{os.getpid()}"
                partial.write_text(json.dumps(step))
                partial.replace(folder / "saved")
            if step % 10 == 0:
                record_durable_step(step)
            if stops:
                return 75 if stops[0] == signal.SIGUSR1 else 143
    return 0


@contextmanager
def launch(folder: Path, places: RankPlaces, environment: Mapping[str, str], reports: Path) -> Iterator[Workers]:
    workers = Workers(folder, places, environment, reports)
    try:
        yield workers
    finally:
        workers.end()


def supervise(folder: Path, node: int, nodes: str, hang_seconds: float) -> int:
    """Supervise two ranks of a host."""
    cluster_attempts.open_store = lambda address: nullcontext(1)  # its ranks meet nowhere
    for module, name in LIMITS:
        setattr(module, name, max(getattr(module, name), hang_seconds))
    least, _, most = nodes.partition(":")

    def examine() -> list[str]:
        (folder / f"examined-{node}").touch()
        return ["its disk is red"] if (folder / f"bad-{node}").exists() else []

    def say(text: str) -> None:
        print(text, flush=True)

    run = HostRun(
        place=HostPlace(node, "127.0.0.1", NPROC),
        least=int(least),
        most=int(most or least),
        launch=lambda places, environment, reports: launch(folder, places, environment, reports),
        fits=lambda world: True,
        examine=examine,
        supervision=Supervision(
            folder / "run", RecoveryConfig(hang_seconds=hang_seconds, backoff_seconds=0.1), Voice(say, say)
        ),
    )
    return supervise_host(run)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["rank", name]:
            sys.exit(run_rank(Path(name)))
        case ["supervise", name, node, nodes, hang_seconds]:
            sys.exit(supervise(Path(name), int(node), nodes, float(hang_seconds)))
