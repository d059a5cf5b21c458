"""Runs of the real command that are killed at random times, and the comparison of their final states.

    command --kill a rank, all ranks, the supervisor, everything--> the same command again, if needed --> final state

The supervisor restarts killed ranks; if it is killed itself, the same command is run again, as a scheduler would do.
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
from typing import IO

import psutil
import torch

from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
from tests.support.commands import StartedCommand

TIMINGS = {"tokens_per_second", "mfu", "mfu_full", "memory_bytes", "seconds"}
VICTIMS = ("a rank", "a rank", "all ranks", "supervisor", "everything")

_TIMEOUT = 300.0  # seconds until a run counts as stuck
_SPREAD = 1.5  # maximum seconds of training before the next kill
_STARTING = 0.2  # fraction of kills that do not wait until training has resumed


@dataclass
class Killer:
    """Kills processes of a run, and counts the kills.

    Attributes:
        rng: chooses times and victims.
        wanted: number of kills in total.
        fresh: start new interpreters, which are killed during their imports too, not forked ones.
        kills: kills so far, by victim.
    """

    rng: random.Random
    wanted: int
    fresh: bool = False
    kills: Counter[str] = field(default_factory=Counter)

    @property
    def left(self) -> int:
        """Number of kills that remain."""
        return self.wanted - self.kills.total()

    def drive(self, arguments: list[str]) -> None:
        """Run the command until it has finished, killing its processes while kills remain.

        Raises:
            AssertionError: the command neither finished nor was killed.
        """
        while True:
            code, output = self._once(arguments)
            if code == 0:
                return
            assert code == -signal.SIGKILL, output

    def _once(self, arguments: list[str]) -> tuple[int, str]:
        """Run the command once; return its exit code and output."""
        with tempfile.TemporaryFile("w+") as output:
            process = self._start(arguments, output)
            try:
                while process.poll() is None and self.left:
                    self._kill(process, _run_dir(arguments))
                process.wait(_TIMEOUT)
            finally:
                _end(process)
            output.seek(0)
            return process.returncode, output.read()

    def _start(self, arguments: list[str], output: IO[str]) -> "StartedCommand | subprocess.Popen[bytes]":
        if not self.fresh:
            return StartedCommand(*arguments, output=output)
        return subprocess.Popen([sys.executable, "-m", "hlat", *arguments], stdout=output, stderr=subprocess.STDOUT)

    def _kill(self, process: "StartedCommand | subprocess.Popen[bytes]", run: Path) -> None:
        if self.rng.random() > _STARTING:
            before = _starts(run)
            while process.poll() is None and _starts(run) == before:
                time.sleep(0.02)
        time.sleep(self.rng.uniform(0, _SPREAD))
        victim = self.rng.choice(VICTIMS)
        chosen = list(self._victims(victim, process.pid))
        if process.poll() is not None or not chosen:
            return
        for victim_process in chosen:
            with suppress(psutil.NoSuchProcess):
                victim_process.kill()
        self.kills[victim] += 1

    def _victims(self, victim: str, supervisor: int) -> Iterator[psutil.Process]:
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


def _end(process: "StartedCommand | subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()


def _starts(run: Path) -> int:
    """Count how often training has begun in a run folder."""
    try:
        return sum(line.count('"event": "start"') + line.count('"event": "resume"') for line in _lines(run))
    except FileNotFoundError:
        return 0


def _lines(run: Path) -> list[str]:
    return (run / "events.jsonl").read_text().splitlines()


def _run_dir(arguments: list[str]) -> Path:
    return Path(next(a for a in arguments if a.startswith("run.dir=")).removeprefix("run.dir="))


def final_state(run: Path) -> dict[str, torch.Tensor]:
    """Weights, optimizer state, generator states and data cursors of the newest checkpoint."""
    return open_checkpoint(resolve(run)).load("")


def consumed(run: Path) -> list[dict[str, object]]:
    """Metrics of every step, without those that depend on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def assert_same_run(run: Path, undisturbed: Path) -> None:
    """Assert that two runs ended with the same bits, and read the same samples at every step."""
    state, expected = final_state(run), final_state(undisturbed)
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name
    assert consumed(run) == consumed(undisturbed)
