"""Collectives over each axis of the layout: their results, and their rate against the catalog or equal groups."""

from collections.abc import Iterator
from statistics import median_high

from hlat.launch.preflight.checks.base import Evidence, Facts, HealthCheck, Symptom, megabytes

_OF_OTHERS = 1 / 3
"""Share of the usual rate of equal groups below which a group is slow. Groups run at the same time and share the same
switches; a failed link or a wrong interface costs a factor of 4 and more."""
_OF_CATALOG = 0.3
"""Share of the published rate below which a group is slow: messages of 64 MiB reach 0.5 to 0.9 of it."""


def _judge_results(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        for group in case.facts["groups"]:
            for name in group["wrong"]:
                yield Symptom(case.node, f"{name} over {group['axis']} gave a wrong result", case.rank)


def _judge_rates(evidence: Evidence) -> Iterator[Symptom]:
    """Blame the hosts of slow groups, except those that also are in a good group with another host."""
    groups: dict[tuple[str, tuple[int, ...]], float] = {}
    for case in evidence.cases:
        for group in case.facts["groups"]:
            key = group["axis"], tuple(group["ranks"])
            groups[key] = min(groups.get(key, float("inf")), group["rate"])
    floors = {
        key: _floor(evidence, key[1], [rate for other, rate in groups.items() if other[0] == key[0]]) for key in groups
    }
    nodes = {key: sorted({_host(evidence, rank) for rank in key[1]}) for key in groups}
    good = {node for key in groups if groups[key] >= floors[key] and len(nodes[key]) > 1 for node in nodes[key]}
    for key, rate in groups.items():
        if rate < floors[key]:
            text = f"all-reduce over {key[0]} reaches {megabytes(rate)}, expected {megabytes(floors[key])} or more"
            for node in [node for node in nodes[key] if node not in good] or nodes[key]:
                yield Symptom(node, text)


def _floor(evidence: Evidence, ranks: tuple[int, ...], rates: list[float]) -> float:
    """Rate below which a group is slow, from those of all groups of its axis and from the catalog."""
    return max(_OF_OTHERS * median_high(rates), _OF_CATALOG * _published(evidence, ranks))


def _host(evidence: Evidence, rank: int) -> int:
    return next(case.node for case in evidence.cases if case.rank == rank)


def _published(evidence: Evidence, ranks: tuple[int, ...]) -> float:
    """Published rate of a group, in bytes per second that each member sends; 0 if unknown."""
    nodes = [_host(evidence, rank) for rank in ranks]
    if len(set(nodes)) == 1:
        return evidence.links.get("device", 0.0)
    per_host = max(nodes.count(node) for node in nodes)  # they share a ring, which leaves a host once
    return evidence.links.get("host", 0.0) * per_host / evidence.nproc


def _summary_of_rates(evidence: Evidence) -> str:
    rates: dict[str, list[float]] = {}
    for case in evidence.cases:
        for group in case.facts["groups"]:
            rates.setdefault(group["axis"], []).append(group["rate"])
    return ", ".join(f"all-reduce over {axis} {megabytes(min(found))}" for axis, found in rates.items())


def axis_groups(plan: Facts, world: int) -> dict[str, list[list[int]]]:
    """Return the groups of ranks of each axis: those of the layout, or one of all ranks if there is none."""
    groups: dict[str, list[list[int]]] = plan.get("groups") or {}
    fits = all(rank < world for found in groups.values() for ranks in found for rank in ranks)
    complete = {rank for found in groups.values() for ranks in found for rank in ranks} == set(range(world))
    return groups if groups and fits and complete else {"all ranks": [list(range(world))]}


CHECKS = (
    HealthCheck(
        "HD11",
        "collective-results",
        "together",
        "A device or a link changes data: take the hosts out of service and have them tested.",
        module="collectives",
        judge=_judge_results,
        after=("device-visible", "matmul-result", "rank-processes", "collectives-finish"),
    ),
    HealthCheck(
        "HD12",
        "collective-rate",
        "together",
        "Check cables and link speeds (ethtool, ibstat, nvidia-smi nvlink --status), and that the collectives use the "
        "fast network (NCCL_DEBUG=INFO, hlat launch --instance sets the variables).",
        module="collectives",
        judge=_judge_rates,
        summary=_summary_of_rates,
        after=("collective-results", "matmul-rate", "link-rate"),
    ),
)
