"""Rank processes of this host: started early, given orders in files, and ended when their time is over.

rank_processes(count, command) --launch_ranks--> ``rank_program``, which imports torch
RankProcesses --ask--> orders-LOCAL: a line of JSON each
              <--answers-LOCAL: lines of each process until it says that it is done, or it ends--
"""

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hlat.launch.local_processes import RankPlaces, SpawnedRanks, launch_ranks
from hlat.resilience import HEARTBEAT_FOLDER, heartbeat_root

Facts = dict[str, Any]

RANK_COMMAND = (sys.executable, "-P", "-m", "hlat.launch.preflight.rank_program")
"""Words that start a rank process; -P: the current folder must not hide installed packages."""

_POLL = 0.05  # seconds
_MESSAGE = 400  # characters of a dead process's last words


@contextmanager
def rank_processes(count: int, command: Sequence[str] = RANK_COMMAND) -> Iterator["RankProcesses"]:
    """Start rank processes; those still running at the end of the block are killed."""
    # It is unknown yet where and as which rank they join the others: an order says that. The first of them serves the
    # store, for which this process would need torch.
    places = RankPlaces(0, count, count, 0, "0.0.0.0", 0)
    with tempfile.TemporaryDirectory(prefix="hlat-", dir=heartbeat_root()) as name:
        folder = Path(name) / "exchange"
        folder.mkdir()
        environment = {HEARTBEAT_FOLDER: str(folder), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        with launch_ranks(command, places, environment, Path(name), show=lambda line: None) as workers:
            yield RankProcesses(workers, folder)


class RankProcesses:
    """Rank processes of this host, by their index on it."""

    def __init__(self, workers: SpawnedRanks, folder: Path) -> None:
        self._workers, self.folder = workers, folder
        self.count = len(workers.pids)

    def ask(self, orders: Sequence[Mapping[str, Any]], seconds: float) -> list[Facts]:
        """Give each process its order, and wait until all have done it or ended, or time is over; return their facts.

        ``orders`` are those of the first processes; the others get none. Facts are those of each module, the plan, how
        far the process came, and what was wrong: empty texts if nothing was.
        """
        before = [len(self._answers(index)) for index in range(len(orders))]
        for index, order in enumerate(orders):
            with (self.folder / f"orders-{index}").open("a", encoding="utf-8") as file:
                file.write(json.dumps(order) + "\n")
        deadline = time.monotonic() + seconds
        while True:
            is_late = time.monotonic() > deadline
            ends = [self._end_of(index) for index in range(len(orders))]
            found = [self._answers(index)[begin:] for index, begin in enumerate(before)]
            if is_late or all(end or _is_done(answers) for end, answers in zip(ends, found, strict=True)):
                return [_facts(answers, end, seconds) for end, answers in zip(ends, found, strict=True)]
            time.sleep(_POLL)

    def _end_of(self, index: int) -> str:
        """Describe the end of a process that has died; empty if it lives."""
        code = self._workers.poll(index)
        if code is None:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        errors = self._workers.output_files(index)[1]
        lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{how}: {lines[-1][:_MESSAGE]}" if lines else how

    def _answers(self, index: int) -> list[Facts]:
        """All that a process has answered so far."""
        file = self.folder / f"answers-{index}"
        *lines, _ = file.read_bytes().split(b"\n") if file.exists() else [b""]  # the last line may grow
        return [json.loads(line) for line in lines]


def _is_done(answers: Sequence[Facts]) -> bool:
    return bool(answers) and bool(answers[-1].get("done"))


def _facts(answers: Sequence[Facts], died: str, seconds: float) -> Facts:
    modules = {each["module"]: each.get("facts", {"error": each.get("error")}) for each in answers if "module" in each}
    last = next((each["begin"] for each in reversed(answers) if "begin" in each), "starting")
    return {
        "modules": modules,
        "plan": next((each["plan"] for each in answers if "plan" in each), {}),
        "died": died,
        "trouble": "" if _is_done(answers) else died or f"its process did not finish within {seconds:g} s",
        "broken": next((each["broken"] for each in answers if "broken" in each), ""),
        "progress": len(answers),
        "last": last.replace("_", " "),
    }
