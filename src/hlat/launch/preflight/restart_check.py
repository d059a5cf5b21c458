"""The checks that take few seconds, on one host, after an incident and before a restart.

recipe, nproc, run_dir --device, products, memory, run folder, leftovers--> findings about this host

No process joins another, nothing is exchanged with other hosts, and this process does not import torch.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hlat.config import Recipe
from hlat.launch.preflight.checks.table import CHECKS, checks_of, modules_of
from hlat.launch.preflight.facts import facts_by_module, measure
from hlat.launch.preflight.judgement import Gathered, judge
from hlat.launch.preflight.place import HostTools, HostView
from hlat.launch.preflight.ranks.processes import RankProcesses, rank_command
from hlat.launch.preflight.report import Finding
from hlat.launch.preflight.request import PreflightOptions, PreflightRequest, make_request

_CORES = 2  # cores of this machine per process: importing torch takes most of the time, and a core


def check_before_restart(
    recipe: Recipe,
    nproc: int,
    run_dir: Path,
    seconds: float = 30.0,
    tools: HostTools | None = None,
    command: Callable[[int], Sequence[str]] = rank_command,
) -> list[Finding]:
    """Examine this host alone, without collectives; about as long as importing torch takes.

    Call it when the processes of the run have ended: those that still run are findings, except this process and those
    that started it.

    Args:
        recipe: recipe of the run.
        nproc: processes of this host.
        run_dir: folder of the run.
        seconds: time for the processes; one that hangs is ended then, and is a finding.
        tools: functions of the system to measure with; None for the real ones.
        command: returns the command line of a rank process, by its index.

    Returns:
        What was found, warnings included (``Finding.is_warning``); empty on a healthy host.
    """
    request = make_request(recipe, (), PreflightOptions(nproc=nproc, nodes=1, node=0))
    place = HostView(replace(request, run_dir=run_dir.absolute()), tools or HostTools())
    gathered = Gathered({0: request.name}, nproc)
    ranks = RankProcesses(min(nproc, max(1, (os.cpu_count() or 1) // _CORES)), command)
    try:
        gathered.add_host(0, measure(checks_of("host", quick=True), place))
        for first in range(0, nproc, ranks.count):
            _examine_ranks(gathered, ranks, range(first, min(first + ranks.count, nproc)), request, seconds)
    finally:
        ranks.close()
    quick = [check for check in CHECKS if check.is_quick or check.stage == "meeting"]
    return list(judge(gathered, nproc, 0.0, quick).findings)


def _examine_ranks(
    gathered: Gathered, processes: RankProcesses, ranks: range, request: PreflightRequest, seconds: float
) -> None:
    """Examine the devices of some ranks, each in one of the processes."""
    modules = modules_of("rank", quick=True)
    orders = [
        {"order": "alone", "local_rank": rank, "rank": rank, "nproc": request.nproc, "world": request.nproc}
        | {"device": request.device, "modules": modules}
        for rank in ranks
    ]
    for index, answers in enumerate(processes.ask(orders, seconds)):
        found = facts_by_module(answers, processes.end_of(index), seconds)
        gathered.add_rank(0, ranks[index], found, "rank")
