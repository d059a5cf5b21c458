"""``hlat launch local``: the command of each host of a run, started from here.

--nodes 2           two supervisors on this machine, as if it were two hosts: a rehearsal
--hosts gpu1,gpu2   one over ssh on each, in the same folder, which they share
a signal here --> every supervisor on this machine; Ctrl-C on the terminals of the others
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hlat.launch.local_processes import copy_lines
from hlat.launch.supervision.running_ranks import SignalForwarder
from hlat.runtime.errors import LaunchError
from hlat.runtime.process import stop_exit_code
from hlat.runtime.terminal import escape_controls

_POLL = 0.1  # seconds
_CTRL_C = b"\x03"  # the terminal on the other host makes SIGINT of it


@dataclass(frozen=True)
class HostCommand:
    """Command that runs the supervisor of one host."""

    host: str
    words: tuple[str, ...]
    is_remote: bool  # True if it runs elsewhere, behind a terminal that takes Ctrl-C from standard input

    def __str__(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True)
class LocalRequest:
    """Hosts of a run that are started from here."""

    recipe: str  # recipe file, or the name of a shipped recipe
    overrides: tuple[str, ...] = ()  # changes of the recipe, a.b=c each
    nodes: int | None = None  # number of hosts; None for that of hosts
    least: int | None = None  # smallest number of hosts to go on with; None for all
    nproc: int = 1  # processes per host
    hosts: tuple[str, ...] = ()  # names of hosts, or NAME=ADDRESS; empty for supervisors on this machine
    ssh: str = "ssh -tt -o BatchMode=yes"  # words of the command that runs another on a host
    program: str | None = None  # words of the command that runs hlat there; None for this Python's -m hlat

    def commands(self, folder: Path) -> list[HostCommand]:
        """Return the command of each host, run from ``folder``; LaunchError lists every wrong option."""
        names = [host.partition("=")[0] for host in self.hosts]
        count = self.nodes if self.nodes is not None else len(names)
        problems = self._problems(names, count)
        if problems:
            raise LaunchError("\n".join(problems))
        program = shlex.split(self.program) if self.program else [sys.executable, "-P", "-m", "hlat"]
        nodes = str(count) if self.least is None else f"{self.least}:{count}"
        common = [*program, "train", self.recipe, *self.overrides, "--nproc", str(self.nproc), "--nodes", nodes]
        if not self.hosts:
            # A rehearsal stays on this machine: nothing listens on the network.
            words = [[*common, "--node", str(node), "--address", "127.0.0.1"] for node in range(count)]
            return [HostCommand(f"host {node}", tuple(each), is_remote=False) for node, each in enumerate(words)]
        found = []
        for node, host in enumerate(self.hosts):
            name, _, address = host.partition("=")
            own = [*common, "--node", str(node), *(["--address", address] if address else [])]
            # exec: no shell stays between the terminal and the supervisor
            script = f"cd {shlex.quote(str(folder))} && exec {shlex.join(own)}"
            found.append(HostCommand(name, (*shlex.split(self.ssh), name, script), is_remote=True))
        return found

    def _problems(self, names: Sequence[str], count: int) -> list[str]:
        found = []
        if count < 1:
            found.append("give the hosts with --hosts A,B,C, or with --nodes how many to rehearse on this machine.")
        if names and self.nodes is not None and self.nodes != len(names):
            found.append(f"--nodes {self.nodes}: --hosts names {len(names)}.")
        if self.least is not None and not 1 <= self.least <= max(1, count):
            found.append(f"--least {self.least}: expected a number between 1 and {max(1, count)}.")
        if self.nproc < 1:
            found.append(f"--nproc {self.nproc}: expected 1 or more.")
        twice = sorted({name for name in names if names.count(name) > 1})
        found += [f"--hosts: {escape_controls(name)} is there more than once." for name in twice]
        found += [
            f"--hosts {escape_controls(name)!r}: expected the name of a host."
            for name in names
            if not name or name.startswith("-") or not name.isprintable() or " " in name
        ]
        return found


def run_local(commands: Sequence[HostCommand], show: Callable[[str], None]) -> int:
    """Run the supervisors of all hosts, and wait for their end.

    ``show`` receives each line that they print, with the name of the host in front.

    Returns:
        The highest of their exit codes; they agree, unless a host was lost.

    Raises:
        LaunchError: a command cannot be started; those that were started are ended.
    """
    processes: list[subprocess.Popen[bytes]] = []
    threads: list[threading.Thread] = []
    with SignalForwarder() as stops:
        try:
            for command in commands:
                processes.append(_start(command))
                threads.append(_follow(command, processes[-1], show))
            forwarded = 0
            while any(process.poll() is None for process in processes):
                for number in stops.received[forwarded:]:
                    forwarded += 1
                    for command, process in zip(commands, processes, strict=True):
                        _forward(command, process, number)
                time.sleep(_POLL)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()  # only after an error here: otherwise all have ended
        # they still show what was printed last
        for thread in threads:
            thread.join()
    codes = [process.returncode for process in processes]
    return max(stop_exit_code(-code) if code < 0 else code for code in codes)


def _start(command: HostCommand) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            command.words,
            stdin=subprocess.PIPE if command.is_remote else subprocess.DEVNULL,  # Ctrl-C for the terminal over there
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches this process only, which forwards it once
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # lines are shown when they are printed, though into a pipe
        )
    except OSError as error:
        raise LaunchError(f"{command.host}: {command.words[0]} cannot be started: {error.strerror}.") from error


def _follow(command: HostCommand, process: "subprocess.Popen[bytes]", show: Callable[[str], None]) -> threading.Thread:
    assert process.stdout is not None, "it is a pipe"
    thread = threading.Thread(target=copy_lines, args=(process.stdout, f"{command.host}: ", show), daemon=True)
    thread.start()
    return thread


def _forward(command: HostCommand, process: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(OSError):
        if command.is_remote:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.write(_CTRL_C)
            process.stdin.flush()
        else:
            process.send_signal(signal.Signals(number))
