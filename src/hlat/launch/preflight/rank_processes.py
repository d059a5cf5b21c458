"""Rank processes of this host: helpers that are started early, given orders, and ended when their time is over.

rank_processes(count, work) --start_program--> ``rank_program``, which imports torch
RankProcesses --ask--> an order each
              <--answers of each process until it says that it is done, or it ends--
"""

import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.launch.local_processes import RankPlaces, rank_environment
from hlat.runtime.errors import HlatError
from hlat.runtime.helper_process import HelperProcess, PeerEnded, start_program

Facts = dict[str, Any]

RANK_WORK = "hlat.launch.preflight.rank_program:follow_orders"

_MESSAGE = 400  # characters of a dead process's last words


@contextmanager
def rank_processes(count: int, work: str = RANK_WORK) -> Iterator["RankProcesses"]:
    """Start rank processes; those still running at the end of the block are killed."""
    # It is unknown yet where and as which rank they join the others: an order says that. The first of them serves the
    # store, for which this process would need torch.
    places = RankPlaces(0, count, count, 0, "0.0.0.0", 0)
    with tempfile.TemporaryDirectory(prefix="hlat-") as name, ExitStack() as stack:
        folder = Path(name)
        processes = []
        for local in range(count):
            environment = rank_environment(local, places) | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
            log = folder / f"rank-{local}"
            with log.open("wb") as file:
                process = start_program(work, environment=environment, output=file.fileno())
            stack.callback(process.kill)
            processes.append(_RankProcess(process, log))
        yield RankProcesses(processes, folder)


@dataclass(frozen=True)
class _RankProcess:
    process: HelperProcess
    log: Path  # what it has printed

    def order(self, order: Mapping[str, Any]) -> None:
        with suppress(PeerEnded, HlatError, RuntimeError):
            while self.process.receive(0.0) is not None:
                pass  # answers to an earlier order, which came too late
        self.process.send(order)

    def facts(self, deadline: float, seconds: float) -> Facts:
        """Return what it answers until it is done, has ended, or time is over."""
        answers, died, is_done = list[Facts](), "", False
        try:
            while not is_done and (answer := self.process.receive(max(0.0, deadline - time.monotonic()))) is not None:
                answers.append(answer)
                is_done = "done" in answer
        except PeerEnded as end:
            died = self._describe_end(end.code)
        except (HlatError, RuntimeError) as error:
            died = f"failed: {str(error).strip().splitlines()[-1][:_MESSAGE]}"
        modules = {one["module"]: one.get("facts", {"error": one.get("error")}) for one in answers if "module" in one}
        last = next((each["begin"] for each in reversed(answers) if "begin" in each), "starting")
        return {
            "modules": modules,
            "plan": next((each["plan"] for each in answers if "plan" in each), {}),
            "died": died,
            "trouble": "" if is_done else died or f"its process did not finish within {seconds:g} s",
            "broken": next((each["broken"] for each in answers if "broken" in each), ""),
            "progress": len(answers),
            "last": last.replace("_", " "),
        }

    def _describe_end(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{how}: {lines[-1][:_MESSAGE]}" if lines else how


class RankProcesses:
    """Rank processes of this host, by their index on it; ``folder`` is theirs, and goes with them."""

    def __init__(self, processes: Sequence[_RankProcess], folder: Path) -> None:
        self._processes, self.folder = processes, folder
        self.count = len(processes)

    def ask(self, orders: Sequence[Mapping[str, Any]], seconds: float) -> list[Facts]:
        """Give each process its order, and wait until all have done it or ended, or time is over; return their facts.

        ``orders`` are those of the first processes; the others get none. Facts are those of each module, the plan, how
        far the process came, and what was wrong: empty texts if nothing was.
        """
        asked = self._processes[: len(orders)]
        for process, order in zip(asked, orders, strict=True):
            process.order(order)
        deadline = time.monotonic() + seconds
        return [process.facts(deadline, seconds) for process in asked]
