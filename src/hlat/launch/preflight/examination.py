"""The examination of all hosts before a run, told in order; and of one host before a restart.

    each host: start rank processes --> checks of the host --> meet the others --> checks of ranks, between hosts
    host 0:    who is there, can they join? --> all processes join and measure together --> judgement --> report

    after an incident: recipe, nproc --check_before_restart: device, products, memory, run folder, leftovers-->
        findings about this host, in a few seconds; no process joins another, nothing is exchanged with other hosts

Every wait ends: a host that gives no sign of life is left behind and named, and processes that hang are ended. This
process does not import torch.
"""

import fcntl
import os
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hlat.config import Recipe
from hlat.launch.hosts.network import accept_connections
from hlat.launch.preflight.health_check import Facts, Stage
from hlat.launch.preflight.judgement import (
    CHECKS,
    Finding,
    Gathered,
    PreflightReport,
    checks_of,
    judge,
    measure,
    modules_of,
)
from hlat.launch.preflight.meeting import Meeting, existing_part, remove_if_empty
from hlat.launch.preflight.rank_checks import axis_groups
from hlat.launch.preflight.rank_processes import RANK_WORK, RankProcesses, rank_processes
from hlat.launch.preflight.request import HostTools, HostView, Peer, PreflightOptions, PreflightRequest, make_request
from hlat.runtime.distributed.network import own_addresses

# Checks that must have found nothing before processes join each other
_OBSTACLES = {"device-visible", "listen", "connections"}


def run_preflight(request: PreflightRequest, tools: HostTools | None = None, work: str = RANK_WORK) -> PreflightReport:
    """Examine this host with the others; all return one report, or a partial one if they could not meet."""
    return replace(_Examination(request, tools or HostTools(), work).run(), node=request.node)


class _Examination:
    def __init__(self, request: PreflightRequest, tools: HostTools, work: str) -> None:
        self._request, self._tools, self._work = request, tools, work
        self._began = time.monotonic()
        cluster = request.cluster
        links = {} if cluster is None else {"device": cluster.link_rate, "host": cluster.network_rate}
        self._gathered = Gathered({request.node: request.name}, request.nproc, links=links)
        self._limit = request.options.patience
        self._kept = existing_part(request.run_dir)  # the rest of the path is removed at the end

    def run(self) -> PreflightReport:
        request = self._request
        with ExitStack() as stack:
            stack.callback(lambda: remove_if_empty(request.run_dir, self._kept))
            # First of all: they import torch while this process examines the host.
            ranks = stack.enter_context(rank_processes(request.nproc, self._work))
            place, peer = self._listen(stack)
            facts = measure(checks_of("host"), place)
            shared = request.run_dir if request.nodes > 1 else ranks.folder  # one host leaves the run's folder alone
            try:
                meeting = Meeting(shared / "doctor", request)
                stack.callback(meeting.leave)
                return self._together(meeting, ranks, place, peer, facts)
            except OSError as error:
                return self._partial(facts, error)

    # --- one host

    def _listen(self, stack: ExitStack) -> tuple[HostView, Peer]:
        """Listen on the address of this host; return its place, and how others reach it."""
        request, options = self._request, self._request.options
        address, error, port = "", "", 0
        try:
            address = request.listen_address()
            port = stack.enter_context(accept_connections(address, options.port))
        except OSError as failure:
            error = f"cannot listen on {options.address or address or socket.gethostname()}"
            error += f", port {options.port}" if options.port else ""
            error += f": {failure.strerror or failure}"
        addresses = tuple(found for each in own_addresses().values() for found in each)
        peer = Peer(request.name, socket.gethostname(), address, addresses, port)
        return HostView(request, self._tools, error), peer

    def _ask_alone(self, ranks: RankProcesses) -> list[Facts]:
        """Facts of each rank process by module; its needs, and trouble if it died or did not answer."""
        request = self._request
        orders = [_order_alone(request, local, modules_of("rank")) for local in range(request.nproc)]
        if request.recipe is not None and request.node == 0:
            orders[0]["recipe"] = request.recipe.model_dump(mode="json")
        return ranks.ask(orders, self._limit)

    def _partial(self, facts: dict[str, Facts], error: OSError) -> PreflightReport:
        """Report about this host alone: it could not meet the others."""
        request = self._request
        self._gathered.add_host(request.node, facts)
        report = judge(self._gathered, request.nproc, time.monotonic() - self._began)
        if report.ok:
            lost = 0 if isinstance(error, TimeoutError) else request.node
            self._gathered.hosts.setdefault(lost, request.name_of(lost))
            self._gathered.add_trouble("sign-of-life", lost, None, str(error))
            report = judge(self._gathered, request.nproc, time.monotonic() - self._began)
        return replace(report, is_partial=True)

    # --- all hosts

    def _together(
        self, meeting: Meeting, ranks: RankProcesses, place: HostView, peer: Peer, facts: dict[str, Facts]
    ) -> PreflightReport:
        is_first = self._request.node == 0
        with ExitStack() as stack:
            if is_first:
                # The other hosts try to lock it too (``_measure_sharing``), which must fail.
                lock = stack.enter_context((meeting.folder / "lock").open("w"))
                with suppress(OSError):  # HD16 reports that
                    self._tools.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            meeting.post("host", {"peer": asdict(peer), "facts": facts, "kept": str(self._kept)})
            if is_first:
                meeting.post("peers", self._roll_call(meeting))
            peers = {int(node): Peer(**found) for node, found in meeting.read_first("peers").items()}
            alone = self._ask_alone(ranks)
            place = replace(place, peers=peers, lock_file=None if is_first else meeting.folder / "lock")
            meeting.post("measured", {"ranks": alone, "facts": measure(checks_of("peers"), place)})
            if is_first:
                meeting.post("join", self._admission(meeting, peers))
            meeting.post("together", self._join(meeting.read_first("join"), ranks, place, meeting))
            if is_first:
                meeting.post("verdict", self._verdict(meeting, meeting.read_first("join")["members"]).to_dict())
            return PreflightReport.from_dict(meeting.read_first("verdict"))

    def _roll_call(self, meeting: Meeting) -> dict[str, Any]:
        why = "it did not come to the meeting in the run's folder"
        reports = self._gather(meeting, "host", range(self._request.nodes), why)
        for node, report in reports.items():
            self._gathered.hosts[node] = report["peer"]["name"]
            self._gathered.add_host(node, report["facts"])
            self._kept = min(self._kept, Path(report["kept"]), key=lambda path: len(path.parts))
        return {str(node): report["peer"] for node, report in reports.items()}

    def _admission(self, meeting: Meeting, peers: dict[int, Peer]) -> dict[str, Any]:
        """Gather the facts of all hosts that came; say how their processes join each other, if they can."""
        reports = self._gather(meeting, "measured", peers, "it did not report in time")
        for node, report in reports.items():
            self._add(node, report, node * self._request.nproc, "rank")
        members = list(reports)
        so_far = judge(self._gathered, 0, 0.0)
        found = {finding.name for finding in so_far.findings if not finding.is_warning}
        if found & _OBSTACLES or "rank-processes" in self._gathered.cases:  # such a process may have a known cause
            members = []
        address = peers[0].address
        plan = self._gathered.plan if len(members) == self._request.nodes else {}
        groups = axis_groups(plan, len(members) * self._request.nproc)
        return {"members": members, "address": address, "port": _free_port(address), "groups": groups}

    def _join(self, admission: Facts, ranks: RankProcesses, place: HostView, meeting: Meeting) -> Facts:
        """Let the processes of this host join the others and measure together; return their facts."""
        request, members = self._request, admission["members"]
        if request.node not in members:
            return {"ranks": []}
        first = members.index(request.node) * request.nproc
        world = len(members) * request.nproc
        # Not all that a launcher sets: the interface for a loopback address is known to modules that import torch.
        variables = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": request.nproc, "GROUP_RANK": request.node}
        variables |= {"MASTER_ADDR": admission["address"], "MASTER_PORT": admission["port"]}
        orders = [
            {
                "order": "together",
                "environment": {name: str(value) for name, value in variables.items()}
                | {"RANK": str(first + local), "LOCAL_RANK": str(local)},
                "device": request.device,
                "nproc": request.nproc,
                "folder": str(meeting.folder),
                "groups": admission["groups"],
                "modules": modules_of("together"),
                "rank_modules": modules_of("rank"),
                "world": request.world,
            }
            for local in range(request.nproc)
        ]
        found = ranks.ask(orders, self._limit)
        again = any(each["trouble"] or each["broken"] for each in found)
        # A network that broke meanwhile explains why processes failed or hung.
        connections = [check for check in checks_of("peers") if check.name == "connections"] if again else []
        return {"ranks": found, "facts": measure(connections, place), "first": first}

    def _verdict(self, meeting: Meeting, members: list[int]) -> PreflightReport:
        why = "it stopped reporting while processes communicated"
        reports = self._gather(meeting, "together", members, why)
        for node, report in reports.items():
            self._add(node, report, report["first"], "together")
        self._blame_hang(reports)
        ranks = len(self._gathered.hosts) * self._request.nproc
        return judge(self._gathered, ranks, time.monotonic() - self._began)

    # --- facts of hosts

    def _gather(self, meeting: Meeting, stage: str, nodes: Collection[int], why: str) -> dict[int, Facts]:
        """Gather the reports of a stage in the order of the hosts; ``why`` is what to say of a host without one."""
        reports = meeting.gather(stage, nodes)
        for node in sorted(set(nodes) - reports.keys()):
            self._gathered.hosts.setdefault(node, self._request.name_of(node))
            self._gathered.add_trouble("sign-of-life", node, None, f"no sign of life: {why}")
        return {node: reports[node] for node in sorted(reports)}

    def _add(self, node: int, report: Facts, first: int, stage: Stage) -> None:
        self._gathered.add_host(node, report["facts"])
        for rank, found in enumerate(report["ranks"], first):
            self._gathered.add_rank(node, rank, found, stage)

    def _blame_hang(self, reports: dict[int, Facts]) -> None:
        """Blame processes that came least far, if processes did not finish: the others wait for them."""
        states = [
            (node, report["first"] + local, found)
            for node, report in reports.items()
            for local, found in enumerate(report["ranks"])
        ]
        if not any(found["trouble"] or found["broken"] for _, _, found in states):
            return
        least = min(found["progress"] for _, _, found in states)
        for node, rank, found in states:
            if found["progress"] == least:
                why = found["broken"] or found["trouble"] or "it was the first to stop"
                self._gathered.add_trouble("collectives-finish", node, rank, f"{found['last']}: {why}")


def _order_alone(request: PreflightRequest, local: int, modules: Sequence[str]) -> dict[str, Any]:
    """Order for a process of this host to measure without the others."""
    rank = request.node * request.nproc + local
    order = {"order": "alone", "local_rank": local, "rank": rank, "nproc": request.nproc, "world": request.world}
    return order | {"device": request.device, "modules": modules}


def _free_port(address: str) -> int:
    with suppress(OSError), socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])
    return 0


_CORES_PER_PROCESS = 2  # cores of this machine per process: importing torch takes most of the time, and a core


def check_before_restart(recipe: Recipe, nproc: int, seconds: float = 30.0, work: str = RANK_WORK) -> list[Finding]:
    """Examine this host alone, without collectives; about as long as importing torch takes.

    Call it when the processes of the run have ended: those that still run are findings, except this process and those
    that started it. A rank process that hangs is ended after ``seconds``, and is a finding. Findings include warnings;
    a healthy host has none.
    """
    request = make_request(recipe, (), PreflightOptions(nproc=nproc, nodes=1, node=0))
    place = HostView(request)
    gathered = Gathered({0: request.name}, nproc)
    with rank_processes(min(nproc, max(1, (os.cpu_count() or 1) // _CORES_PER_PROCESS)), work) as ranks:
        gathered.add_host(0, measure(checks_of("host", quick=True), place))
        for first in range(0, nproc, ranks.count):
            some = range(first, min(first + ranks.count, nproc))
            orders = [_order_alone(request, rank, modules_of("rank", quick=True)) for rank in some]
            for rank, found in zip(some, ranks.ask(orders, seconds), strict=True):
                gathered.add_rank(0, rank, found, "rank")
    quick = [check for check in CHECKS if check.is_quick or check.stage == "meeting"]
    return list(judge(gathered, nproc, 0.0, quick).findings)
