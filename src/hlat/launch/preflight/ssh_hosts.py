"""The examination of hosts by name: the same command is started on each of them through ssh, and reports are merged.

    host names --ssh NAME hlat doctor --nodes N --node I--> report of host 0, which met the others
                                                            partial reports of hosts that could not meet --> one report

A host that host 0 has not seen may be alive: then it says on its own why it could not come to the meeting.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hlat.launch.preflight.judgement import CHECKS, ExaminedHost, Finding, PreflightReport
from hlat.launch.preflight.request import PreflightOptions
from hlat.runtime.errors import LaunchError

_SLACK = 30.0  # seconds to start and end a command, apart from its own waits
_WAITS = 5  # waits of an examination, each as long as the user's patience
_WORDS = 300  # characters of a host's last words


@dataclass(frozen=True)
class HostOutput:
    """Output of the command on one host."""

    report: PreflightReport | None  # None if it printed none
    words: str  # last line that it printed otherwise


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
    patience = options.patience
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hlat-") as name:
        processes = [
            _start(shlex.split(ssh), host, _command(arguments, host, len(hosts), node), Path(name) / str(node))
            for node, host in enumerate(hosts)
        ]
        deadline = began + _WAITS * patience + _SLACK
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            process.kill()
            process.wait()
        outputs = [_output(Path(name) / str(node)) for node in range(len(hosts))]
    return replace(merge(hosts, outputs), seconds=time.monotonic() - began)


def _command(arguments: Sequence[str], host: str, nodes: int, node: int) -> list[str]:
    """Words of the command on a host: in this folder, with this Python; quoted for the shell that ssh starts."""
    own = ["--nodes", str(nodes), "--node", str(node), "--name", host, "--json"]
    words = ["env", f"--chdir={Path.cwd()}", sys.executable, "-P", "-m", "hlat", "doctor", *arguments, *own]
    return [shlex.quote(word) for word in words]


def _start(ssh: list[str], host: str, command: list[str], file: Path) -> "subprocess.Popen[bytes]":
    with file.with_suffix(".out").open("wb") as out, file.with_suffix(".err").open("wb") as err:
        try:
            return subprocess.Popen(
                [*ssh, host, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            raise LaunchError(f"--ssh {shlex.join(ssh)}: cannot be started: {error.strerror}.") from error


def _output(file: Path) -> HostOutput:
    out, err = (file.with_suffix(end).read_text(encoding="utf-8", errors="replace") for end in (".out", ".err"))
    words = ""
    report = None
    for line in [*err.splitlines(), *out.splitlines()]:
        if (found := _report(line)) is not None:
            report = found
        elif line.strip():
            words = line.strip()[:_WORDS]
    return HostOutput(report, words)


def _report(line: str) -> PreflightReport | None:
    if not line.startswith("{"):
        return None
    try:
        return PreflightReport.from_dict(json.loads(line))
    except (ValueError, KeyError, TypeError):
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
        if host is None or _is_silent(host):
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


def _is_silent(host: ExaminedHost) -> bool:
    return any(finding.name == "sign-of-life" for finding in host.findings)


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
