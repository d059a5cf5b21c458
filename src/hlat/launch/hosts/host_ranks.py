"""The processes of an attempt on this host: started as the leader orders, described in the status of the host."""

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from hlat.launch.hosts.records import AttemptOrder, HostMember, Instruction, RankStatus
from hlat.launch.local_ranks import LocalRanks
from hlat.launch.process_set import ProcessSet, RankPlaces
from hlat.resilience import HEARTBEAT_FOLDER
from hlat.runtime.distributed.run_secret import RUN_SECRET_ENV
from hlat.runtime.process.clock import machine_clock
from hlat.runtime.process.exit_codes import DEADLINE_ENV
from hlat.runtime.storage.run_folder import ATTEMPT_ENV

Launch = Callable[[RankPlaces, Mapping[str, str], Path], AbstractContextManager[ProcessSet]]
"""Launches processes with additional environment variables; their error reports go into the folder."""


class HostRanks:
    """Processes of one attempt on this host.

    Args:
        attempt: the attempt.
        member: this host's place in it.
        launch: launches the processes.
        beats: folder for heartbeats, to which a folder of the attempt is added.
    """

    def __init__(self, attempt: AttemptOrder, member: HostMember, launch: Launch, beats: Path) -> None:
        self.number = attempt.number
        self._member, self._done = member, 0
        self._ended: dict[int, float] = {}  # times on the monotonic clock
        self._stacks: dict[int, str] = {}
        self._cleaning: threading.Thread | None = None
        self._stack = ExitStack()
        places = RankPlaces(member.first_rank, member.nproc, attempt.world, member.index, attempt.address, attempt.port)
        folder = beats / f"attempt-{attempt.number}"
        folder.mkdir(exist_ok=True)
        environment = {
            **attempt.environment,
            RUN_SECRET_ENV: attempt.secret,
            HEARTBEAT_FOLDER: str(folder),
            ATTEMPT_ENV: f"{attempt.launch}/{attempt.number}",
        }
        if attempt.deadline is not None:
            environment[DEADLINE_ENV] = repr(machine_clock() + attempt.deadline)
        reports = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hlat-launch-"))
        workers = self._stack.enter_context(launch(places, environment, Path(reports)))
        self._ranks = LocalRanks(workers, folder)

    @property
    def done(self) -> int:
        """Number of the last instruction that was carried out."""
        is_cleaning = self._cleaning is not None and self._cleaning.is_alive()
        return self._done - 1 if is_cleaning else self._done

    def follow(self, instructions: tuple[Instruction, ...]) -> None:
        """Carry out the instructions that are new."""
        for instruction in instructions:
            if instruction.number > self._done:
                self._carry_out(instruction)
                self._done = instruction.number

    def statuses(self) -> tuple[RankStatus, ...]:
        """States of the processes."""
        now, beats = time.monotonic(), {beat.rank: beat for beat in self._ranks.readings()}
        found = []
        for rank in self._ranks.ranks:
            code = self._ranks.poll(rank)
            if code is not None:
                self._ended.setdefault(rank, now)
            report = None if code is None else self._ranks.report(rank)
            if report is not None:
                report = replace(report, time=report.time - time.time())
            beat = beats[rank].aged(now) if rank in beats else None
            stopped = code is None and self._ranks.is_stopped(rank)
            found.append(RankStatus(rank, code, report, beat, stopped, self._stacks.get(rank, "")))
        return tuple(found)

    def run_id(self) -> str | None:
        """Id of the run in its folder, once a rank has reported it; else None."""
        return self._ranks.run_id()

    def close(self) -> None:
        """Kill what is left."""
        self._ranks.kill([rank for rank in self._ranks.ranks if self._ranks.poll(rank) is None])
        if self._cleaning is None or not self._cleaning.is_alive():
            self._ranks.end_leftovers(0.0, lambda: True)
        self._stack.close()

    def _carry_out(self, instruction: Instruction) -> None:
        running = [rank for rank in self._ranks.ranks if self._ranks.poll(rank) is None]
        addressed = [rank for rank in running if rank in instruction.ranks]
        if instruction.kind == "signal":
            self._ranks.send(addressed, int(instruction.value))
        elif instruction.kind == "kill":
            self._ranks.kill(addressed)
        elif instruction.kind == "stacks":
            self._stacks = self._ranks.stacks()
        elif instruction.kind == "leftovers":
            end = self._ranks.end_leftovers
            self._cleaning = threading.Thread(target=end, args=(instruction.value, lambda: False), daemon=True)
            self._cleaning.start()
