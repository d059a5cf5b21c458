"""Checks of a host and of the network between hosts.

one host:        memory, open files, faults that its devices have reported since it was started
between hosts:   own address, names of the others, connections to them
joined ranks:    rate of links, clocks against that of rank 0
"""

import resource
import socket
from collections.abc import Iterator

from hlat.launch.hosts.network import connect_all
from hlat.launch.preflight.health_check import (
    Case,
    Evidence,
    Facts,
    HealthCheck,
    Symptom,
    culprits,
    gibibytes,
    judge_each,
    judge_wrong,
    megabytes,
)
from hlat.launch.preflight.request import HostView
from hlat.runtime.backend.faults import device_reports
from hlat.runtime.distributed.network import resolve_addresses
from hlat.runtime.terminal import listed, plural

# Memory of a process apart from its model: Python and torch take 0.3 GiB, buffers of data and saving the rest
_PROCESS_BYTES = 512 << 20
# Open files of a process apart from connections: libraries, shards of data, parts of a checkpoint, logs
_OPEN_FILES = 256
# Connections to each other process: the default group, its control group, and one per axis of the layout
_OPEN_FILES_PER_RANK = 8


def _judge_memory(evidence: Evidence) -> Iterator[Symptom]:
    needed = evidence.nproc * (_PROCESS_BYTES + evidence.plan.get("host_bytes", 0.0))
    need = f"{plural(evidence.nproc, 'process')} {'needs' if evidence.nproc == 1 else 'need'}"
    for case in evidence.cases:
        if case.facts["free"] < needed:
            text = f"{gibibytes(case.facts['free'])} of memory are free, and {need} "
            yield Symptom(case.node, text + gibibytes(needed))


def _summary_of_memory(evidence: Evidence) -> str:
    return f"{gibibytes(min(case.facts['free'] for case in evidence.cases))} of memory free" if evidence.cases else ""


def _measure_files(place: HostView) -> Facts:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OPEN_FILES + _OPEN_FILES_PER_RANK * place.request.world
    return {"limit": soft, "needed": needed, "unlimited": soft == resource.RLIM_INFINITY}


def _few_files(facts: Facts) -> str:
    if facts["unlimited"] or facts["limit"] >= facts["needed"]:
        return ""
    return f"a process may open {facts['limit']} files, and a run of this size needs {facts['needed']}"


_SHOWN_FAULTS = 3  # the newest ones of a host


def _judge_device_faults(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        for message in case.facts["found"][-_SHOWN_FAULTS:]:
            yield Symptom(case.node, message)


# Bytes per second below which a link is slow: a third of gigabit Ethernet, the slowest network in use. The usual cause
# is a link that was negotiated down to 100 Mbit/s, 12 MB/s
_SLOWEST_LINK = 40e6


def _measure_names(place: HostView) -> Facts:
    """Resolve the name of every other host."""
    wrong, unknown = [], []
    for peer in place.others().values():
        if peer.hostname == socket.gethostname():
            continue  # simulated hosts of one machine
        try:
            found = resolve_addresses(peer.hostname)
        except OSError:
            unknown.append(peer.hostname)
            continue
        if not set(found) & {*peer.addresses, peer.address}:
            wrong.append(f"{peer.hostname} resolves to {', '.join(found)}, and its address is {peer.address}")
    return {"wrong": wrong, "unknown": unknown}


def _judge_names(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        for text in case.facts["wrong"]:
            yield Symptom(case.node, text)
        if unknown := case.facts["unknown"]:
            text = f"the names of other hosts cannot be resolved: {listed(unknown)}"
            yield Symptom(case.node, text, is_warning=True)


def _measure_connections(place: HostView) -> Facts:
    """Connect to every other host that listens."""
    others = {node: (peer.address, peer.port) for node, peer in place.others().items() if peer.port}
    problems = connect_all(set(others.values()))
    return {"failed": [[node, problems[target]] for node, target in others.items() if problems[target]]}


def _judge_connections(evidence: Evidence) -> Iterator[Symptom]:
    failed = {(case.node, node): why for case in evidence.cases for node, why in case.facts["failed"]}
    for node in culprits(failed):
        sources = [source for source, target in failed if target == node]
        targets = [target for source, target in failed if source == node]
        why = next(why for pair, why in failed.items() if node in pair)
        parts = [f"{_host_names(evidence, sources)} cannot connect to it"] if sources else []
        parts += [f"it cannot connect to {_host_names(evidence, targets)}"] if targets else []
        yield Symptom(node, f"{', and '.join(parts)} ({why})")


def _host_names(evidence: Evidence, nodes: list[int]) -> str:
    return listed(evidence.hosts.get(node, f"host {node}") for node in nodes)


def _judge_links(evidence: Evidence) -> Iterator[Symptom]:
    nodes = {case.rank: case.node for case in evidence.cases}
    rates = {(nodes[source], case.node): rate for case in evidence.cases for source, rate in case.facts["rates"]}
    slow = [pair for pair, rate in rates.items() if rate < _SLOWEST_LINK]
    names = evidence.hosts
    for node in culprits(slow):
        links = [
            f"{names.get(source, source)} to {names.get(target, target)} {megabytes(rates[source, target])}"
            for source, target in slow
            if node in (source, target)
        ]
        doubt = "; with two hosts either may be the cause" if len(evidence.hosts) == 2 else ""
        yield Symptom(
            node, f"its links are slow: {', '.join(links)}, expected {megabytes(_SLOWEST_LINK)} or more{doubt}"
        )


def _summary_of_links(evidence: Evidence) -> str:
    rates = [rate for case in evidence.cases for _, rate in case.facts["rates"]]
    return f"links {megabytes(min(rates))} or more" if rates else ""


# Seconds by which clocks may differ. With NTP they agree within milliseconds, so that a second means that it does not
# run. Runs do not depend on clocks; times in logs of several hosts, job deadlines and signatures of object stores do
_LARGEST_OFFSET = 1.0


def _judge_clocks(evidence: Evidence) -> Iterator[Symptom]:
    cases = _first_ranks(evidence)
    offsets = {case.node: case.facts["offset"] for case in cases}
    if not offsets:
        return
    near = {
        node: sum(abs(offset - other) <= _LARGEST_OFFSET for other in offsets.values())
        for node, offset in offsets.items()
    }
    # The time that most hosts agree on, not that of host 0, whose own clock may be wrong.
    usual = offsets[max(near, key=lambda node: (near[node], -node))]
    for case in cases:
        difference = case.facts["offset"] - usual
        if abs(difference) - case.facts["error_bound"] > _LARGEST_OFFSET:
            direction = "ahead of" if difference > 0 else "behind"
            yield Symptom(case.node, f"its clock is {abs(difference):.1f} s {direction} those of the other hosts")


def _first_ranks(evidence: Evidence) -> list[Case]:
    """Facts of the first process of each host: the others have the same clock."""
    return list({case.node: case for case in reversed(evidence.cases)}.values())[::-1]


def _summary_of_clocks(evidence: Evidence) -> str:
    cases = _first_ranks(evidence)
    if len(cases) < 2:
        return ""
    offsets = [case.facts["offset"] for case in cases]
    bound = max(case.facts["error_bound"] for case in cases)
    return f"clocks within {max(offsets) - min(offsets) + bound:.2g} s"


HOST_CHECKS = (
    HealthCheck(
        "HD07",
        "host-memory",
        "host",
        "End other programs, raise the limit of the job (control group, ulimit -v), or use fewer processes.",
        measure=lambda place: {"free": place.tools.available_memory()},
        judge=_judge_memory,
        summary=_summary_of_memory,
        is_quick=True,
    ),
    HealthCheck(
        "HD21",
        "open-files",
        "host",
        "Raise the limit: ulimit -n in the job script, LimitNOFILE= of the service that starts jobs.",
        measure=_measure_files,
        judge=judge_each(_few_files),
    ),
    HealthCheck(
        "HD30",
        "device-faults",
        "host",
        "Replace the host or reboot it, as the finding says; messages of the kernel from before its last start are "
        "gone.",
        lambda place: {"found": device_reports()},
        judge=_judge_device_faults,
    ),
    HealthCheck(
        "HD22",
        "listen",
        "host",
        "Give an address of this host (--address; `ip address` lists them), or set GLOO_SOCKET_IFNAME to its "
        "interface; choose a port that no other program uses (--port).",
        measure=lambda place: {"wrong": place.listen_error},
        judge=judge_wrong,
    ),
    HealthCheck(
        "HD23",
        "connections",
        "peers",
        "Open the ports between the hosts in firewalls and security groups, and check that the network is up.",
        measure=_measure_connections,
        judge=_judge_connections,
        after=("listen", "sign-of-life"),
    ),
    HealthCheck(
        "HD20",
        "host-names",
        "peers",
        "Correct the names in DNS or /etc/hosts.",
        measure=_measure_names,
        judge=_judge_names,
    ),
    HealthCheck(
        "HD24",
        "link-rate",
        "together",
        "Check cables and the negotiated speed (ethtool), and that the address is in the fast network.",
        module="links",
        judge=_judge_links,
        summary=_summary_of_links,
        after=("connections", "matmul-rate"),  # a process that is slow receives slowly
    ),
    HealthCheck(
        "HD19",
        "clock-skew",
        "together",
        "Start the time service of that host (chronyd, systemd-timesyncd, ntpd).",
        module="clock",
        judge=_judge_clocks,
        summary=_summary_of_clocks,
        after=("connections",),
    ),
)
