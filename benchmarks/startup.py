"""What joining a run costs: ``join_run()`` in 2, 8 and 32 processes of this machine, without the time to import torch.

The store is served by a process of its own that is there first, as under ``hlat train --nproc``.

    python benchmarks/startup.py [PROCESSES ...]

"CPU" is what one process computes itself, which is what it costs where each has a core of its own; "waited" is what
passes on the clock here, where they share the cores. A cost that grows with the number of processes and no faster shows
as CPU per peer that does not grow.
"""

import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from hlat.launch.multiprocess_launcher import open_store
from hlat.runtime.distributed import join_run
from hlat.runtime.distributed import rendezvous as meeting
from hlat.runtime.distributed.join import leave_run

HEAD = f"{'processes':>9}  {'waited':>8}  {'CPU':>8}  {'CPU per peer':>12}  {'store keys each':>15}"


def join_once(rank: int, world: int, port: int, gate: Barrier, pipe: Connection) -> None:
    """One process: waits until all are there, joins, reports (seconds waited, CPU seconds, keys in the store)."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    gate.wait()
    waited, computed = time.perf_counter(), time.process_time()
    runtime = join_run("cpu")
    waited, computed = time.perf_counter() - waited, time.process_time() - computed
    runtime.ranks.barrier()
    keys = meeting._connect("127.0.0.1", port, rank).num_keys() if rank == 0 else 0
    runtime.ranks.barrier()
    leave_run(runtime)
    pipe.send((waited, computed, keys))


def serve_store(pipe: Connection) -> None:
    """The process that serves the store, as the launcher does: reports its port."""
    with open_store() as port:
        pipe.send(port)
        signal.pause()


def measure(world: int) -> Iterator[tuple[float, float, int]]:
    """What each process of a run of so many reports. They are forked, so that torch is imported once."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(world)
    ours, theirs = context.Pipe()
    server = context.Process(target=serve_store, args=(theirs,))
    server.start()
    port = ours.recv()
    pipes = [context.Pipe() for _ in range(world)]
    ranks = [
        context.Process(target=join_once, args=(rank, world, port, gate, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for ours, _ in pipes:
        yield ours.recv()
    for process in ranks:
        process.join()
    server.terminate()
    server.join()


def main() -> None:
    """Print the table."""
    print(f"start() on {os.cpu_count()} cores, gloo: medians over the processes")
    print(HEAD)
    for world in map(int, sys.argv[1:] or ["2", "8", "32"]):
        waited, computed, keys = zip(*measure(world), strict=True)
        cpu = statistics.median(computed)
        print(
            f"{world:>9}  {statistics.median(waited):>6.3f} s  {cpu:>6.3f} s  {1e3 * cpu / (world - 1):>9.2f} ms  "
            f"{sum(keys) / world:>15.1f}"
        )


if __name__ == "__main__":
    main()
