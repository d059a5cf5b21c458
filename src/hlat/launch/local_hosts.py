"""The command of each host, started from here: ``hlat launch local``, and ``hlat doctor --hosts``.

--nodes 2           two supervisors on this machine, as if it were two hosts: a rehearsal
--hosts gpu1,gpu2   one over ssh on each, in the same folder, which they share
a signal here --> every supervisor on this machine; Ctrl-C on the terminals of the others

doctor: host names --ssh NAME hlat doctor --nodes N --node I--> report of host 0, which met the others
                                                                partial reports of hosts that could not --> one report

A host that host 0 has not seen may be alive: then it says on its own why it could not come to the meeting.
"""

import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hlat.launch.local_processes import copy_lines, hlat_command
from hlat.launch.preflight.judgement import CHECKS, ExaminedHost, Finding, PreflightReport
from hlat.launch.preflight.request import PreflightOptions
from hlat.launch.supervision.running_ranks import SignalForwarder
from hlat.runtime.errors import LaunchError
from hlat.runtime.process import stop_exit_code
from hlat.runtime.terminal import escape_controls

_POLL = 0.1  # seconds
_CTRL_C = b"\x03"  # the terminal on the other host makes SIGINT of it


@dataclass(frozen=True)
class HostCommand:
    """Command of one host."""

    host: str
    words: tuple[str, ...]
    is_remote: bool  # True if it runs elsewhere, behind a terminal that takes Ctrl-C from standard input
    option: str = ""  # option that a message names if the command cannot be started; empty for its host and program

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
        program = shlex.split(self.program) if self.program else hlat_command([])
        nodes = str(count) if self.least is None else f"{self.least}:{count}"
        common = [*program, "train", self.recipe, *self.overrides, "--nproc", str(self.nproc), "--nodes", nodes]
        # A rehearsal stays on this machine: nothing listens on the network.
        here = [(f"host {node}", "127.0.0.1") for node in range(count)]
        found = []
        for node, (name, address) in enumerate([host.partition("=")[::2] for host in self.hosts] or here):
            own = [*common, "--node", str(node), *(["--address", address] if address else [])]
            # exec: no shell stays between the terminal and the supervisor
            script = f"cd {shlex.quote(str(folder))} && exec {shlex.join(own)}"
            words = [*shlex.split(self.ssh), name, script] if self.hosts else own
            found.append(HostCommand(name, tuple(words), is_remote=bool(self.hosts)))
        return found

    def _problems(self, names: Sequence[str], count: int) -> list[str]:
        found = []
        if count < 1:
            found.append("give the hosts with --hosts A,B,C, or with --nodes how many to rehearse on this machine.")
        if names and self.nodes is not None and self.nodes != len(names):
            found.append(f"--nodes {self.nodes}: --hosts names {len(names)}.")
        if self.least is not None and not 1 <= self.least <= max(1, count):
            found.append(f"least {self.least}: expected a number between 1 and {max(1, count)}.")
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
    shows = [lambda line, host=command.host: show(f"{host}: {line}") for command in commands]
    with SignalForwarder() as stops, _started(commands, shows) as processes:
        forwarded = 0
        while any(process.poll() is None for process in processes):
            for number in stops.received[forwarded:]:
                forwarded += 1
                for command, process in zip(commands, processes, strict=True):
                    _forward(command, process, number)
            time.sleep(_POLL)
    codes = [process.returncode for process in processes]
    return max(stop_exit_code(-code) if code < 0 else code for code in codes)


@contextmanager
def _started(
    commands: Sequence[HostCommand], shows: Sequence[Callable[[str], None]], closing: float | None = None
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Run commands, and kill those still running at the end of the block; each has a function that gets its lines.

    ``closing``: seconds to wait for the last lines of each, and both of its streams are read, so that a warning is
    never in the middle of a report; None: no limit, and lines in the order in which they were printed.
    """
    processes: list[subprocess.Popen[bytes]] = []
    threads: list[threading.Thread] = []
    try:
        for command, show in zip(commands, shows, strict=True):
            processes.append(_start(command, subprocess.STDOUT if closing is None else subprocess.PIPE))
            for stream in filter(None, (processes[-1].stdout, processes[-1].stderr)):
                threads.append(threading.Thread(target=copy_lines, args=(stream, show), daemon=True))
                threads[-1].start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for thread in threads:  # they still show what was printed last
        thread.join(closing)


def _start(command: HostCommand, errors: int) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            command.words,
            stdin=subprocess.PIPE if command.is_remote else subprocess.DEVNULL,  # Ctrl-C for the terminal over there
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # a terminal's Ctrl-C reaches this process only, which forwards it once
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # lines are shown when they are printed, though into a pipe
        )
    except OSError as error:
        what = f"{command.option}:" if command.option else f"{command.host}: {command.words[0]}"
        raise LaunchError(f"{what} cannot be started: {error.strerror}.") from error


def _forward(command: HostCommand, process: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(OSError):
        if command.is_remote:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.write(_CTRL_C)
            process.stdin.flush()
        else:
            process.send_signal(signal.Signals(number))


_SLACK = 30.0  # seconds to start and end a command, apart from its own waits
_WAITS = 5  # waits of an examination, each as long as the user's patience
_WORDS = 300  # characters of a host's last words
_CLOSING = 5.0  # seconds for the last lines of a command: ssh may leave a process that holds its output open


@dataclass
class HostOutput:
    """Output of the doctor on one host."""

    report: PreflightReport | None = None  # None if it printed none
    words: str = ""  # last line that it printed otherwise

    def add(self, line: str) -> None:
        """Take a line that the command has printed."""
        if (found := _report(line)) is not None:
            self.report = found
        elif line.strip():
            self.words = line.strip()[:_WORDS]


def examine_by_ssh(
    hosts: Sequence[str],
    recipe: str | None,
    overrides: Sequence[str],
    options: PreflightOptions,
    ssh: str = "ssh -o BatchMode=yes",
) -> PreflightReport:
    """Start ``hlat doctor`` on each host, and merge the reports.

    Args:
        hosts: names of the hosts, as the transport takes them.
        recipe: recipe file, or the name of a shipped recipe; None examines the machines alone.
        overrides: changes of the recipe.
        options: options about the hosts, without those that say which host it is.
        ssh: words of the transport: it gets the name of a host and the words of the command, as ssh does.

    Raises:
        LaunchError: a name occurs twice, an option contradicts the list of hosts, or the transport cannot be started.
    """
    if len(set(hosts)) != len(hosts) or not all(host and not host.startswith("-") for host in hosts):
        raise LaunchError(f"--hosts {','.join(hosts)}: expected names of hosts, each once.")
    if any(value is not None for value in (options.nodes, options.node, options.name, options.address)):
        raise LaunchError("--nodes, --node, --name and --address follow from --hosts: leave them out.")
    arguments = [*([] if recipe is None else [recipe]), *overrides, *options.words()]
    words = shlex.split(ssh)
    began, option = time.monotonic(), f"--ssh {shlex.join(words)}"
    commands = [
        HostCommand(host, (*words, host, *_doctor_command(arguments, host, len(hosts), node)), False, option)
        for node, host in enumerate(hosts)
    ]
    outputs = [HostOutput() for _ in hosts]
    deadline = began + _WAITS * options.patience + _SLACK
    with _started(commands, [output.add for output in outputs], _CLOSING) as processes:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
    return replace(merge(hosts, outputs), seconds=time.monotonic() - began)


def _doctor_command(arguments: Sequence[str], host: str, nodes: int, node: int) -> list[str]:
    """Words of the command on a host: in this folder, with this Python; quoted for the shell that ssh starts."""
    own = ["--nodes", str(nodes), "--node", str(node), "--name", host, "--json"]
    words = ["env", f"--chdir={Path.cwd()}", *hlat_command(["doctor", *arguments, *own])]
    return [shlex.quote(word) for word in words]


def _report(line: str) -> PreflightReport | None:
    with suppress(ValueError, KeyError, TypeError):
        return PreflightReport.from_dict(json.loads(line)) if line.startswith("{") else None
    return None


def merge(hosts: Sequence[str], outputs: Sequence[HostOutput]) -> PreflightReport:
    """Merge the outputs of the command on all hosts into one report."""
    first = outputs[0].report
    seen = {} if first is None else {host.name: host for host in first.hosts}
    own = {name: _own_findings(name, output) for name, output in zip(hosts, outputs, strict=True)}
    explained = any(own.values())
    merged = []
    for name, output in zip(hosts, outputs, strict=True):
        host = seen.get(name)
        if host is None or any(finding.name == "sign-of-life" for finding in host.findings):
            merged.append(_silent_host(name, output, own[name], host, explained))
        else:
            merged.append(host)
    base = first if first is not None else PreflightReport(())
    return replace(base, hosts=tuple(merged), is_partial=False)


def _own_findings(name: str, output: HostOutput) -> tuple[Finding, ...]:
    """Findings of a partial report about the host that wrote it."""
    if output.report is None or not output.report.is_partial:
        return ()
    return tuple(finding for finding in output.report.findings if finding.host == name)


def _silent_host(
    name: str, output: HostOutput, own: tuple[Finding, ...], host: ExaminedHost | None, explained: bool
) -> ExaminedHost:
    """Describe a host that did not meet the others."""
    if output.report is not None and output.report.is_partial:
        examined = next((each for each in output.report.hosts if each.name == name), ExaminedHost(name, ()))
        if own or explained:  # it is healthy, and another host could not meet
            return examined
        text = "it does not see the files of host 0 in the run's folder"
        return replace(examined, findings=(_finding("run-folder-shared", name, text),))
    words = f": {output.words}" if output.words else ""
    text = host.findings[0].message if host is not None else "no sign of life"
    return ExaminedHost(name, (), (_finding("sign-of-life", name, text + words),))


def _finding(check_name: str, host: str, message: str) -> Finding:
    check = next(check for check in CHECKS if check.name == check_name)
    return Finding(check.id, check.name, host, message, check.remedy)
