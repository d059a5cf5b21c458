"""Rank processes of this host: started early, questioned by lines of JSON, and ended when their time is over.

RankProcesses(command, count) --ask: orders, a line of JSON each--> ``rank_program``, which imports torch
                              <--answers of each process until it says that it is done, or dies--
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from hlat.runtime.process import LAUNCHER_ENV

Answer = dict[str, Any]

# of a launcher around this command: these processes are no ranks of its run
_OTHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "HLAT_LAUNCHER", "HLAT_BEATS")
_MESSAGE = 400  # characters of a dead process's last words


def rank_command(local_rank: int) -> list[str]:
    """Return the words that start a rank process with this Python; they are the same for all."""
    # -P: the current folder must not hide installed packages.
    return [sys.executable, "-P", "-m", "hlat.launch.preflight.rank_program"]


@dataclass
class _RankProcess:
    process: "subprocess.Popen[bytes]"
    errors: IO[bytes]
    buffer: bytes = b""
    answers: list[Answer] = field(default_factory=list)
    is_done: bool = False
    has_ended: bool = False


class RankProcesses:
    """Rank processes of this host; ``command`` returns the words that start one, by its index on this host."""

    def __init__(self, count: int, command: Callable[[int], Sequence[str]] = rank_command) -> None:
        self.count = count
        threads = max(1, len(os.sched_getaffinity(0)) // count if hasattr(os, "sched_getaffinity") else 1)
        environment = {
            name: value for name, value in os.environ.items() if name not in _OTHERS and not name.startswith(_PREFIXES)
        }
        environment[LAUNCHER_ENV] = str(os.getpid())
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        self._ranks = [_start(command(index), environment) for index in range(count)]

    def ask(self, orders: Sequence[Mapping[str, Any]], seconds: float) -> list[list[Answer]]:
        """Give each process its order, and collect what they answer until all have done it, died, or time is over.

        ``orders`` are those of the first processes; the others get none. Of a process that finished, the last answer is
        ``{"done": true}``.
        """
        asked = self._ranks[: len(orders)]
        for rank, order in zip(asked, orders, strict=True):
            rank.answers, rank.is_done = [], False
            with suppress(OSError):  # it has died
                assert rank.process.stdin is not None, "it is a pipe"
                rank.process.stdin.write(json.dumps(order).encode() + b"\n")
                rank.process.stdin.flush()
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for rank in asked:
                if not rank.has_ended:
                    assert rank.process.stdout is not None, "it is a pipe"
                    selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    _read(key.data)
                    if key.data.is_done or key.data.has_ended:
                        selector.unregister(key.fileobj)
        return [rank.answers for rank in asked]

    def end_of(self, index: int) -> str:
        """Describe the end of a process that has died; empty if it lives."""
        rank = self._ranks[index]
        if not rank.has_ended:
            return ""
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(5)
        code = rank.process.returncode
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"ended with exit code {code}"
        )
        rank.errors.seek(0)
        lines = rank.errors.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1][:_MESSAGE]}" if lines else how

    def close(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.process.wait()
            for stream in (rank.process.stdin, rank.process.stdout, rank.errors):
                with suppress(OSError):
                    if stream is not None:
                        stream.close()


def _start(command: Sequence[str], environment: Mapping[str, str]) -> _RankProcess:
    # A pipe that nobody reads would fill, and the process would wait.
    errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=dict(environment),
        start_new_session=True,
    )
    return _RankProcess(process, errors)


def _read(rank: _RankProcess) -> None:
    """Read what a process has written, and keep complete lines as answers."""
    assert rank.process.stdout is not None, "it is a pipe"
    content = os.read(rank.process.stdout.fileno(), 1 << 16)
    rank.has_ended = not content
    *lines, rank.buffer = (rank.buffer + content).split(b"\n")
    for line in lines:
        answer = json.loads(line)
        rank.answers.append(answer)
        rank.is_done = rank.is_done or bool(answer.get("done"))
