"""Blame for a hang of processes on several hosts, from the reports of those that could write one.

reports --judge--> Hang: ranks without a report; else as the watchdog of a supervisor does; else the network
"""

from collections import defaultdict
from collections.abc import Sequence

from hlat.launch.unsupervised.hang_reports import HangReport
from hlat.resilience import Hang, find_hanging_ranks

_LISTED = 8  # ranks or hosts in a message, at most


def judge(reports: Sequence[HangReport], own: HangReport, world: int, local_world: int | None) -> Hang:
    """Return the hang, with the ranks that cause it.

    Args:
        reports: reports of all ranks that have one.
        own: that of a rank that is late; it says in which phase and step the run hangs.
        world: number of ranks.
        local_world: number of ranks of each host; None if it is unknown, or hosts differ.
    """
    seconds = -own.beat.since
    silent = sorted(set(range(world)) - {report.beat.rank for report in reports})
    if silent:
        why = f"no sign of life from {_places(silent, reports, world, local_world)}"
        return Hang(silent, own.beat.phase, own.beat.current_step, seconds, why)
    ranks, why = find_hanging_ranks([report.beat for report in reports], 0.0, lambda rank: False)
    hosts = list(dict.fromkeys(report.host for report in reports))
    if len(ranks) == world and len(hosts) > 1:
        why = f"all ranks wait for one another, on {_join(hosts)}: look for a broken network between them"
    first = next(report.beat for report in reports if report.beat.rank == ranks[0])
    return Hang(ranks, first.phase, first.current_step, -first.since, why)


def _places(silent: Sequence[int], reports: Sequence[HangReport], world: int, local_world: int | None) -> str:
    """Describe where silent ranks run: complete hosts, or processes of hosts that have others."""
    if local_world is None:
        return _join([f"rank {rank}" for rank in silent])
    known = {report.beat.rank // local_world: report.host for report in reports}
    by_node: dict[int, list[int]] = defaultdict(list)
    for rank in silent:
        by_node[rank // local_world].append(rank)
    hosts, processes = [], []
    for node, ranks in by_node.items():
        if node in known:
            processes += [f"rank {rank} on {known[node]}" for rank in ranks]
        else:
            first, last = node * local_world, min(world, (node + 1) * local_world) - 1
            hosts.append(f"host {node} (rank {first})" if first == last else f"host {node} (ranks {first} to {last})")
    return " and ".join(_join(each) for each in (hosts, processes) if each)


def _join(words: Sequence[str]) -> str:
    more = [f"{len(words) - _LISTED} more"] if len(words) > _LISTED else []
    return ", ".join([*words[:_LISTED], *more])
