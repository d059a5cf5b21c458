"""Cost of joining a run: ``join_run()`` in 2, 8 and 32 processes of this machine, without the time to import torch.

The store is served by a process of its own that is started first, as under ``hlat train --nproc``.

    python benchmarks/startup.py [PROCESSES ...]

"CPU" is the processor time of one process, which is the cost where each process has a core of its own; "waited" is the
wall time here, where they share the cores. If the cost of a process grows in proportion to the number of processes, CPU
per peer is constant.
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

from hlat.launch.local_processes import open_store
from hlat.runtime.distributed import rendezvous as meeting
from hlat.runtime.distributed.join import join_run, leave_run
from results import Recorder

HEAD = f"{'processes':>9}  {'waited':>8}  {'CPU':>8}  {'CPU per peer':>12}  {'store keys each':>15}"


def join_once(rank: int, world: int, port: int, gate: Barrier, pipe: Connection) -> None:
    """Run one process: wait for all, join, report (seconds waited, CPU seconds, keys in the store)."""
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
    """Serve the store as the launcher does, and report its port."""
    with open_store() as port:
        pipe.send(port)
        signal.pause()


def measure(world: int) -> Iterator[tuple[float, float, int]]:
    """Yield the report of each process of a run. They are forked, so that torch is imported once."""
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
    """Print and record the table."""
    record = Recorder(__file__, "processes.md")
    print(f"start() on {os.cpu_count()} cores, gloo: medians over the processes")
    print(HEAD)
    for world in map(int, sys.argv[1:] or ["2", "8", "32"]):
        waited, computed, keys = zip(*measure(world), strict=True)
        cpu = statistics.median(computed)
        print(
            f"{world:>9}  {statistics.median(waited):>6.3f} s  {cpu:>6.3f} s  {1e3 * cpu / (world - 1):>9.2f} ms  "
            f"{sum(keys) / world:>15.1f}"
        )
        note = f"processor time of each {1e3 * cpu:.0f} ms; {sum(keys) / world:.1f} keys of the store each"
        record.add(f"wait of each of {world} processes to join a run on one machine", "s", waited, note=note)
    record.write()


if __name__ == "__main__":
    main()
