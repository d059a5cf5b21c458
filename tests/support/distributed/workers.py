"""A pool of processes that join gloo groups of any size, one job after another.

Starting a process costs more than joining a group, which takes milliseconds. So the processes stay, and for each job
the first ``world`` of them become the ranks of a new world:

    pool.run(world, job, *arguments) -> [job(runtime, *arguments) of rank 0, of rank 1, ...]

A rank that raises ends the job: the error of the first rank that failed is raised here with its traceback, and the pool
is started anew, since the other ranks may be waiting for the one that left. If ranks hang, their stacks are dumped.
"""

import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.commands import forking
from tests.support.launch.ports import free_port

_ALONE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = 300.0  # seconds without a message from any rank: a deadlock


class JobFailed(AssertionError):
    """A rank raised an exception; the message has its traceback."""


class Pool:
    """Processes for jobs of up to ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ports: set[int] = set()
        self._start()

    def _start(self) -> None:
        context = forking()
        pairs = [context.Pipe() for _ in range(self.size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [context.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pairs]
        for process in self._processes:
            process.start()

    def run(self, world: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a job on ``world`` ranks; return the results by rank."""
        assert world <= self.size
        # Ranks distinguish two worlds on one port by counting the worlds that they joined, and that number differs
        # between ranks if an earlier world was smaller.
        while (port := free_port()) in self._ports:
            pass
        self._ports.add(port)
        pipes = self._pipes[:world]
        for rank, pipe in enumerate(pipes):
            pipe.send((rank, world, port, job, arguments))
        results: dict[int, Any] = {}
        while len(results) < world:
            left = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(left, _TIMEOUT)
            if not ready:
                stacks = self._stacks(world)
                self._restart()
                raise JobFailed(f"{world} ranks: no word from {len(left)} of them for {_TIMEOUT:.0f} s\n{stacks}")
            for pipe in ready:
                rank = pipes.index(pipe)
                good, value = _receive(pipe)
                if not good:
                    self._restart()
                    raise JobFailed(f"rank {rank} of {world}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(world)]

    def _stacks(self, world: int) -> str:
        """Dump the stacks of all threads of the ranks."""
        for process in self._processes[:world]:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(2)  # they write on their own
        files = [_stack_file(process.pid) for process in self._processes[:world]]
        return "\n".join(f"rank {rank}:\n{file.read_text()}" for rank, file in enumerate(files))

    def _restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            _stack_file(process.pid).unlink(missing_ok=True)


def _stack_file(pid: int | None) -> Path:
    return Path(tempfile.gettempdir()) / f"hlat-rank-{pid}.stacks"


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "the process has gone"


def _forget_meshes() -> None:
    """Clear DTensor's caches of device meshes.

    DTensor treats a mesh of the same ranks as the same mesh: in the next world it would use the last world's mesh,
    whose groups are gone. A normal program joins only one world.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: PLC0415

    _clear_sharding_prop_cache()


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch  # noqa: PLC0415  (after the number of threads is set)

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, _stack_file(os.getpid()).open("w"))
    from hlat.runtime.distributed.join import join_run, leave_run  # noqa: PLC0415

    while True:
        rank, world, port, job, arguments = pipe.recv()
        values = (rank, world, rank, world, "127.0.0.1", port)
        os.environ.update({name: str(value) for name, value in zip(_ALONE, values, strict=True)})
        try:
            runtime = join_run("cpu")
            result = job(runtime, *arguments)
            leave_run(runtime)
            _forget_meshes()
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        else:
            pipe.send((True, result))
