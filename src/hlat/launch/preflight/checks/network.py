"""The network between hosts: own address, names of the others, connections to them, and the rate of links."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from hlat.launch.preflight.checks.base import Evidence, Facts, HealthCheck, Symptom, culprits, megabytes
from hlat.launch.preflight.links import connect, measure_rate
from hlat.launch.preflight.place import HostView, Peer
from hlat.runtime.terminal_text import plural

_THREADS = 16
_SLOWEST = 40e6
"""Bytes per second below which a link is slow: a third of gigabit Ethernet, the slowest network in use. The usual cause
is a link that was negotiated down to 100 Mbit/s, 12 MB/s."""


def _measure_listening(place: HostView) -> Facts:
    return {"wrong": place.listen_error}


def _judge_listening(evidence: Evidence) -> Iterator[Symptom]:
    yield from (Symptom(case.node, case.facts["wrong"]) for case in evidence.cases if case.facts["wrong"])


def _measure_names(place: HostView) -> Facts:
    """Resolve the name of every other host."""
    wrong, unknown = [], []
    for peer in place.others().values():
        if peer.hostname == socket.gethostname():
            continue  # simulated hosts of one machine
        try:
            found = place.tools.resolve(peer.hostname)
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
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            text = f"the names of other hosts cannot be resolved: {', '.join(unknown[:3])}{more}"
            yield Symptom(case.node, text, is_warning=True)


def _measure_connections(place: HostView) -> Facts:
    """Connect to the link server of every other host."""
    others = {node: peer for node, peer in place.others().items() if peer.port}

    def attempt(peer: Peer) -> str:
        try:
            connect(peer).close()
        except OSError as error:
            return str(error.strerror or error) or type(error).__name__
        return ""

    with ThreadPoolExecutor(_THREADS) as pool:
        outcomes = list(pool.map(attempt, others.values()))
    return {"failed": [[node, why] for node, why in zip(others, outcomes, strict=True) if why]}


def _judge_connections(evidence: Evidence) -> Iterator[Symptom]:
    failed = {(case.node, node): why for case in evidence.cases for node, why in case.facts["failed"]}
    blamed = culprits(dict.fromkeys(failed, True))
    for node in blamed:
        sources = [source for source, target in failed if target == node]
        targets = [target for source, target in failed if source == node]
        why = next(why for pair, why in failed.items() if node in pair)
        parts = [f"{_names(evidence, sources)} cannot connect to it"] if sources else []
        parts += [f"it cannot connect to {_names(evidence, targets)}"] if targets else []
        yield Symptom(node, f"{', and '.join(parts)} ({why})")


def _names(evidence: Evidence, nodes: list[int]) -> str:
    names = [evidence.hosts.get(node, f"host {node}") for node in nodes]
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {plural(len(names) - 3, 'other host')}"


def _measure_links(place: HostView) -> Facts:
    """Send data to the next two hosts: every host sends twice and receives twice, however many there are."""
    request, rates = place.request, []
    nodes = sorted(place.peers)
    here = nodes.index(request.node) if request.node in nodes else 0
    targets = {nodes[(here + step) % len(nodes)] for step in (1, 2)} - {request.node} if nodes else set()
    for node in sorted(targets):
        if place.peers[node].port:
            try:
                rates.append([node, measure_rate(place.peers[node])])
            except OSError:
                continue  # HD23 reports that
    return {"rates": rates}


def _judge_links(evidence: Evidence) -> Iterator[Symptom]:
    rates = {(case.node, node): rate for case in evidence.cases for node, rate in case.facts["rates"]}
    slow = {pair: rate < _SLOWEST for pair, rate in rates.items()}
    for node in culprits(slow):
        names = evidence.hosts
        links = [
            f"{names.get(source, source)} to {names.get(target, target)} {megabytes(rates[source, target])}"
            for (source, target), bad in slow.items()
            if bad and node in (source, target)
        ]
        doubt = "; with two hosts either may be the cause" if len(evidence.hosts) == 2 else ""
        yield Symptom(node, f"its links are slow: {', '.join(links)}, expected {megabytes(_SLOWEST)} or more{doubt}")


def _summary_of_links(evidence: Evidence) -> str:
    rates = [rate for case in evidence.cases for _, rate in case.facts["rates"]]
    return f"links {megabytes(min(rates))} or more" if rates else ""


CHECKS = (
    HealthCheck(
        "HD22",
        "listen",
        "host",
        "Give an address of this host (--address; `ip address` lists them), or set GLOO_SOCKET_IFNAME to its "
        "interface; choose a port that no other program uses (--port).",
        measure=_measure_listening,
        judge=_judge_listening,
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
        "peers",
        "Check cables and the negotiated speed (ethtool), and that the address is in the fast network.",
        measure=_measure_links,
        judge=_judge_links,
        summary=_summary_of_links,
        after=("connections",),
    ),
)
