"""The checks that take few seconds, on one host, after an incident and before a restart.

recipe, nproc, run_dir --device, products, memory, run folder, leftovers--> findings about this host

No process joins another, nothing is exchanged with other hosts, and this process does not import torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hlat.config import Recipe
from hlat.launch.preflight.checks import CHECKS, checks_of
from hlat.launch.preflight.facts import facts_by_module, measure
from hlat.launch.preflight.judgement import Gathered, judge
from hlat.launch.preflight.place import HostPlace, HostTools
from hlat.launch.preflight.ranks import RankProcesses, rank_command
from hlat.launch.preflight.report import Finding
from hlat.launch.preflight.request import PreflightOptions, make_request


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
    place = HostPlace(replace(request, run_dir=run_dir.absolute()), tools or HostTools())
    gathered = Gathered({0: request.name}, nproc)
    ranks = RankProcesses(nproc, command)
    try:
        gathered.add_host(0, measure(checks_of("host", quick=True), place))
        modules = list(dict.fromkeys(check.module for check in checks_of("rank", quick=True)))
        orders = [
            {"order": "alone", "local_rank": local, "rank": local, "nproc": nproc, "world": nproc}
            | {"device": request.device, "modules": modules}
            for local in range(nproc)
        ]
        for local, answers in enumerate(ranks.ask(orders, seconds)):
            gathered.add_rank(0, local, facts_by_module(answers, ranks.end_of(local), seconds), "rank")
    finally:
        ranks.close()
    quick = [check for check in CHECKS if check.is_quick or check.stage == "meeting"]
    return list(judge(gathered, nproc, 0.0, quick).findings)
