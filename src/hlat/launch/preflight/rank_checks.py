"""Checks of the processes of a run, from facts that ``rank_measurements`` measures in them.

software      versions, code and recipe are equal on all hosts: processes that differ deadlock, or train otherwise
device        it exists, has the memory that the recipe needs, and nobody else uses it
products      a known result, the same bits on equal devices, and their rate
collectives   over each axis of the layout: results, and rate against the catalog or equal groups
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from statistics import median_high
from typing import Any

from hlat.launch.preflight.health_check import (
    Case,
    Evidence,
    Facts,
    HealthCheck,
    Symptom,
    gibibytes,
    judge_each,
    megabytes,
)
from hlat.launch.preflight.request import HostView
from hlat.runtime.terminal import listed
from hlat.tracking import flat_fields

_MAX_SHOWN = 5  # differing fields of a recipe in a message


def _differences(
    evidence: Evidence, values: Callable[[Facts], Mapping[str, Any]]
) -> Iterator[tuple[int, str, Any, Any]]:
    """Compare values across places: (host, item, its value, value of most places); of a tie, that of the first."""
    by_case = [(case.node, values(case.facts)) for case in evidence.cases]
    for item in dict.fromkeys(item for _, found in by_case for item in found):
        # repr: values may be lists, which cannot be counted
        counts = Counter(repr(found.get(item)) for _, found in by_case)
        usual = max(counts, key=lambda text: counts[text])  # the first of equal counts
        expected = next(found.get(item) for _, found in by_case if repr(found.get(item)) == usual)
        odd = {node: found.get(item) for node, found in by_case if repr(found.get(item)) != usual}
        yield from ((node, item, value, expected) for node, value in odd.items())


def _judge_versions(evidence: Evidence) -> Iterator[Symptom]:
    for node, item, value, expected in _differences(evidence, lambda facts: facts["versions"]):
        yield Symptom(node, f"{item} is {value or 'missing'}, and {expected or 'missing'} on the other hosts")


def _summary_of_versions(evidence: Evidence) -> str:
    found = evidence.cases[0].facts["versions"] if evidence.cases else {}
    return ", ".join(f"{name} {found[name]}" for name in ("torch", "driver") if found.get(name))


def _judge_code(evidence: Evidence) -> Iterator[Symptom]:
    for node, _, value, expected in _differences(evidence, lambda facts: {"source": facts["source"]}):
        yield Symptom(node, f"hlat's source files differ: hash {value}, and {expected} on the other hosts")


def _measure_recipe(place: HostView) -> Facts:
    recipe, error = place.request.recipe, place.request.recipe_error
    fields = {} if recipe is None else flat_fields(recipe.model_dump(mode="json"))
    return {"fields": fields, "wrong": error}


def _judge_recipe(evidence: Evidence) -> Iterator[Symptom]:
    wrong = {case.node for case in evidence.cases if case.facts["wrong"]}
    yield from (Symptom(case.node, f"{case.facts['wrong']}") for case in evidence.cases if case.node in wrong)
    differing: dict[int, list[str]] = {}
    given = Evidence(tuple(case for case in evidence.cases if case.node not in wrong), evidence.hosts)
    for node, item, value, expected in _differences(given, lambda facts: facts["fields"]):
        differing.setdefault(node, []).append(f"{item} is {value}, and {expected} on the other hosts")
    for node, lines in differing.items():
        yield Symptom(node, listed(lines, _MAX_SHOWN, "; "))


# Share of a device's memory that other processes may use before this one has allocated anything. A driver keeps up to
# about 1 GiB for itself and contexts of monitoring tools; a rank of a run takes most of it
_USED_SHARE = 0.1


def _summary_of_devices(evidence: Evidence) -> str:
    return ", ".join(dict.fromkeys(case.facts["device"] for case in evidence.cases))


def _judge_device_memory(evidence: Evidence) -> Iterator[Symptom]:
    needed = evidence.plan.get("rank_bytes", 0.0)
    for case in evidence.cases:
        free = case.facts.get("free")
        if free is not None and free < needed:
            text = f"{gibibytes(free)} of the device's memory are free, and the recipe needs {gibibytes(needed)}"
            yield Symptom(case.node, text, case.rank)


def _used_by_others(facts: Facts) -> str:
    if "free" not in facts or facts.get("joined"):
        return ""  # what the runtime of a process that has joined holds counts as used
    used, total = float(facts["total"]) - float(facts["free"]), float(facts["total"])
    text = f"{gibibytes(used)} of the device's {gibibytes(total)} are used by other processes"
    return text if used > _USED_SHARE * total else ""


# Share of the usual rate below which a device is slow: equal ones differ by a few percent (power, temperature)
_PRODUCTS_OF_OTHERS = 0.4
# The same for processors: programs that share their cores take up to two thirds of a process's time for a moment
_PRODUCTS_OF_OTHER_PROCESSES = 0.2
# Share of the published peak below which a known device is slow: large products reach 0.6 to 0.9 of it
_PRODUCTS_OF_CATALOG = 0.5


def _judge_products(evidence: Evidence) -> Iterator[Symptom]:
    wrong = set()
    for case in evidence.cases:
        if (found := case.facts["wrong"]) is not None:
            wrong.add(case.rank)
            text = "element {row}, {column} of a product of integers is {value}, not {expected}".format(**found)
            yield Symptom(case.node, text, case.rank)
        elif len(set(case.facts["hashes"])) > 1:
            wrong.add(case.rank)
            yield Symptom(case.node, "the same product gave different bits when it was repeated", case.rank)
    for cases in _by_kind(case for case in evidence.cases if case.rank not in wrong):
        yield from _unusual_products(cases)


def _by_kind(cases: Iterable[Case]) -> Collection[list[Case]]:
    """Group the facts of processes whose devices should be equal."""
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(case.facts["kind"], []).append(case)
    return kinds.values()


def _unusual_products(cases: list[Case]) -> Iterator[Symptom]:
    """Find the processes whose product has other bits than that of most equal devices."""
    counts = Counter(case.facts["hashes"][0] for case in cases)
    usual = max(counts, key=lambda text: counts[text])
    for case in cases:
        if case.facts["hashes"][0] != usual:
            text = f"a product has other bits than on {counts[usual]} of {len(cases)} equal devices"
            yield Symptom(case.node, text, case.rank)


def _judge_product_rates(evidence: Evidence) -> Iterator[Symptom]:
    for cases in _by_kind(evidence.cases):
        # The higher one of two: the lower may be the slow one.
        usual = median_high(case.facts["flops"] for case in cases)
        for case in cases:
            flops, peak = case.facts["flops"], case.facts["peak"]
            least = _PRODUCTS_OF_OTHER_PROCESSES if case.facts["shared"] else _PRODUCTS_OF_OTHERS
            if flops < least * usual:
                yield Symptom(case.node, f"{_tera(flops)}, and {_tera(usual)} on equal devices", case.rank)
            elif peak is not None and flops < _PRODUCTS_OF_CATALOG * peak:
                text = f"{_tera(flops)}, {flops / peak:.0%} of the {_tera(peak)} in the catalog"
                yield Symptom(case.node, text, case.rank)


def _summary_of_product_rates(evidence: Evidence) -> str:
    rates = sorted(case.facts["flops"] for case in evidence.cases)
    if not rates:
        return ""
    names = ", ".join(dict.fromkeys(case.facts["dtype"] for case in evidence.cases))
    return f"products in {names} {_tera(rates[0])} to {_tera(rates[-1])} per process"


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


# Share of the usual rate of equal groups below which a group is slow. Groups run at the same time and share the same
# switches; a failed link or a wrong interface costs a factor of 4 and more
_COLLECTIVES_OF_OTHERS = 1 / 3
# Share of the published rate below which a group is slow: messages of 64 MiB reach 0.5 to 0.9 of it
_COLLECTIVES_OF_CATALOG = 0.3


def _judge_collectives(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        for group in case.facts["groups"]:
            for name in group["wrong"]:
                yield Symptom(case.node, f"{name} over {group['axis']} gave a wrong result", case.rank)


def _judge_collective_rates(evidence: Evidence) -> Iterator[Symptom]:
    """Blame the hosts of slow groups, except those that also are in a good group with another host."""
    groups: dict[tuple[str, tuple[int, ...]], float] = {}
    for case in evidence.cases:
        for group in case.facts["groups"]:
            key = group["axis"], tuple(group["ranks"])
            groups[key] = min(groups.get(key, float("inf")), group["rate"])
    floors = {
        key: _least_rate(evidence, key[1], [rate for other, rate in groups.items() if other[0] == key[0]])
        for key in groups
    }
    nodes = {key: sorted({_host_of_rank(evidence, rank) for rank in key[1]}) for key in groups}
    good = {node for key in groups if groups[key] >= floors[key] and len(nodes[key]) > 1 for node in nodes[key]}
    for key, rate in groups.items():
        if rate < floors[key]:
            text = f"all-reduce over {key[0]} reaches {megabytes(rate)}, expected {megabytes(floors[key])} or more"
            for node in [node for node in nodes[key] if node not in good] or nodes[key]:
                yield Symptom(node, text)


def _least_rate(evidence: Evidence, ranks: tuple[int, ...], rates: list[float]) -> float:
    """Rate below which a group is slow, from those of all groups of its axis and from the catalog."""
    return max(_COLLECTIVES_OF_OTHERS * median_high(rates), _COLLECTIVES_OF_CATALOG * _published_rate(evidence, ranks))


def _host_of_rank(evidence: Evidence, rank: int) -> int:
    return next(case.node for case in evidence.cases if case.rank == rank)


def _published_rate(evidence: Evidence, ranks: tuple[int, ...]) -> float:
    """Published rate of a group, in bytes per second that each member sends; 0 if unknown."""
    nodes = [_host_of_rank(evidence, rank) for rank in ranks]
    if len(set(nodes)) == 1:
        return evidence.links.get("device", 0.0)
    per_host = max(nodes.count(node) for node in nodes)  # they share a ring, which leaves a host once
    return evidence.links.get("host", 0.0) * per_host / evidence.nproc


def _summary_of_collective_rates(evidence: Evidence) -> str:
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


RANK_CHECKS = (
    HealthCheck(
        "HD04",
        "software-equal",
        "rank",
        "Install the same versions on all hosts (one image, one environment on a shared disk), and the same driver.",
        module="software",
        judge=_judge_versions,
        summary=_summary_of_versions,
    ),
    HealthCheck(
        "HD05",
        "code-equal",
        "rank",
        "Use the same installation of hlat on all hosts; PYTHONPATH may name another one there.",
        module="software",
        judge=_judge_code,
        after=("software-equal",),
    ),
    HealthCheck(
        "HD06",
        "recipe-equal",
        "host",
        "Give every host the same recipe file and overrides, from a disk that all share.",
        measure=_measure_recipe,
        judge=_judge_recipe,
    ),
    HealthCheck(
        "HD03",
        "device-visible",
        "rank",
        "Look at the driver and its tool (nvidia-smi, neuron-ls), the devices that the scheduler gave to the job, and "
        "the build of torch.",
        module="device",
        summary=_summary_of_devices,
        is_quick=True,
    ),
    HealthCheck(
        "HD28",
        "device-in-use",
        "rank",
        "End the processes that use the device (nvidia-smi and neuron-top list them), or use another host.",
        module="memory",
        judge=judge_each(_used_by_others),
        after=("device-visible",),
        is_quick=True,
    ),
    HealthCheck(
        "HD08",
        "device-memory",
        "rank",
        "Use more devices or more parallelism, activation checkpointing, or a smaller micro-batch: hlat rehearse shows "
        "the bytes.",
        module="memory",
        judge=_judge_device_memory,
        after=("device-visible", "device-in-use"),
        is_quick=True,
    ),
    HealthCheck(
        "HD09",
        "matmul-result",
        "rank",
        "The device computes wrong results: take the host out of service and have it tested.",
        module="matmul",
        judge=_judge_products,
        after=("device-visible",),
        is_quick=True,
    ),
    HealthCheck(
        "HD10",
        "matmul-rate",
        "together",
        "Look for other programs on the host, for throttling (power cap, temperature, clock), and for a device in a "
        "lower power state.",
        module="matmul_rate",
        judge=_judge_product_rates,
        summary=_summary_of_product_rates,
        after=("device-visible", "matmul-result"),
    ),
    HealthCheck(
        "HD11",
        "collective-results",
        "together",
        "A device or a link changes data: take the hosts out of service and have them tested.",
        module="collectives",
        judge=_judge_collectives,
        after=("device-visible", "matmul-result", "rank-processes", "collectives-finish"),
    ),
    HealthCheck(
        "HD12",
        "collective-rate",
        "together",
        "Check cables and link speeds (ethtool, ibstat, nvidia-smi nvlink --status), and that the collectives use the "
        "fast network (NCCL_DEBUG=INFO, hlat launch --instance sets the variables).",
        module="collectives",
        judge=_judge_collective_rates,
        summary=_summary_of_collective_rates,
        after=("collective-results", "matmul-rate", "link-rate"),
    ),
)
