"""What would do where nothing fits: more of the same instances, instances with more memory, fewer bytes.

PlanRequest without an answer -> the nearest questions that have one, each with the layout that a plan would take
"""

from collections.abc import Iterator
from dataclasses import replace

from hlat.hardware import Catalog, Cluster, load_catalog
from hlat.planner.problem import PlanRequest
from hlat.planner.search.search import LayoutPrediction, search
from hlat.planner.search.tie_break import break_tie

_MOST = 1 << 12  # instances
_BETWEEN = 8  # numbers that are tried between one that does not do and twice as many, which do
_OTHERS = 3  # instances with more memory


def suggestions(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    """Questions that differ in the cluster or the precision alone, and have an answer."""
    yield from _more(request)
    yield from _larger(request)
    if request.mode in ("mixed", "fp32"):
        yield from _answered(replace(request, mode="bf16-sr"))


def _answered(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    ranked = search(request).ranked
    if ranked:
        yield request, break_tie(ranked, request.cluster.domain)


def _more(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    """The fewest instances, to an eighth of the step between two powers."""
    count = request.cluster.count
    while (count := 2 * count) <= _MOST:
        if found := list(_answered(_counted(request, count))):
            step = max(1, count // 2 // _BETWEEN)
            fewer = (_answered(_counted(request, less)) for less in range(count // 2 + step, count, step))
            yield next((one for some in fewer for one in some), found[0])
            return


def _counted(request: PlanRequest, count: int) -> PlanRequest:
    return replace(request, cluster=replace(request.cluster, count=count))


def _larger(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    """As many instances of the next kinds, by memory, that have a price."""
    catalog: Catalog = load_catalog()
    others = []
    for instance in catalog.instances:
        chip = catalog.chip(instance.chip)
        if chip is not None and instance.prices and chip.family == request.cluster.chip.family:
            others.append(Cluster(instance, chip, request.cluster.count))
    roomier = [one for one in others if one.memory_bytes > request.cluster.memory_bytes]
    for cluster in sorted(roomier, key=lambda one: one.memory_bytes)[:_OTHERS]:
        price = request.price if request.price in cluster.instance.prices else None
        if found := list(_answered(replace(request, cluster=cluster, price=price))):
            yield found[0]
            return
