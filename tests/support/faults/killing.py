"""Runs of the real command that are killed at random instants, and what is compared when they are done.

    command --kill a rank, all ranks, the supervisor, everything--> the same command again, if need be --> final state

The supervisor restarts what it survives; where it is killed too, the same command is given again, as a scheduler would.
"""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from hlat.checkpoint.protocol import open_checkpoint, resolve

TIMINGS = {"tokens_per_second", "mfu", "mfu_full", "memory_bytes", "seconds"}
VICTIMS = ("a rank", "a rank", "all ranks", "supervisor", "everything")

_TIMEOUT = 300.0  # for a run that would otherwise never end
_SPREAD = 1.5  # seconds of training within which the next kill comes
_STARTING = 0.2  # the share of kills that do not wait until training goes on


@dataclass
class Killer:
    """Kills, and keeps count.

    Attributes:
        rng: chooses instants and victims.
        wanted: kills in all.
        kills: done so far, by victim.
    """

    rng: random.Random
    wanted: int
    kills: Counter[str] = field(default_factory=Counter)

    @property
    def left(self) -> int:
        """Kills still to come."""
        return self.wanted - self.kills.total()

    def drive(self, arguments: list[str]) -> None:
        """Give the command until it has finished, killing as long as kills are left.

        Raises:
            AssertionError: it ended in another way than by being killed or finished.
        """
        while True:
            code, output = self._once(arguments)
            if code == 0:
                return
            assert code == -signal.SIGKILL, output

    def _once(self, arguments: list[str]) -> tuple[int, str]:
        """Give the command once: its exit code, and what it said."""
        command = [sys.executable, "-m", "hlat", *arguments]
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
            try:
                while process.poll() is None and self.left:
                    self._kill(process, _run_dir(arguments))
                process.wait(_TIMEOUT)
            finally:
                _end(process)
            said.seek(0)
            return process.returncode, said.read()

    def _kill(self, process: "subprocess.Popen[bytes]", run: Path) -> None:
        if self.rng.random() > _STARTING:
            before = _starts(run)
            while process.poll() is None and _starts(run) == before:
                time.sleep(0.02)
        time.sleep(self.rng.uniform(0, _SPREAD))
        victim = self.rng.choice(VICTIMS)
        chosen = list(self._chosen(victim, process.pid))
        if process.poll() is not None or not chosen:
            return
        for one in chosen:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.kills[victim] += 1

    def _chosen(self, victim: str, supervisor: int) -> Iterator[psutil.Process]:
        try:
            parent = psutil.Process(supervisor)
            ranks = [child for child in parent.children() if child.status() != psutil.STATUS_ZOMBIE]
            everything = [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        if victim == "supervisor":
            yield parent
        elif victim == "everything":
            yield from everything
        elif ranks:
            yield from ranks if victim == "all ranks" else [self.rng.choice(ranks)]


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()


def _starts(run: Path) -> int:
    """How often training has begun in a run folder."""
    try:
        return sum(line.count('"event": "start"') + line.count('"event": "resume"') for line in _lines(run))
    except FileNotFoundError:
        return 0


def _lines(run: Path) -> list[str]:
    return (run / "events.jsonl").read_text().splitlines()


def _run_dir(arguments: list[str]) -> Path:
    return Path(next(a for a in arguments if a.startswith("run.dir=")).removeprefix("run.dir="))


def final_state(run: Path) -> dict[str, torch.Tensor]:
    """Weights, optimizer, generators, cursors."""
    return open_checkpoint(resolve(run)).load("")


def consumed(run: Path) -> list[dict[str, object]]:
    """What every step read and gave, without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def assert_same_run(run: Path, undisturbed: Path) -> None:
    """The two ended with the same bits, and every step read the same samples."""
    state, expected = final_state(run), final_state(undisturbed)
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name
    assert consumed(run) == consumed(undisturbed)
