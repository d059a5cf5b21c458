"""Suggestions when nothing fits: more of the same instances, instances with more memory, fewer bytes per parameter.

PlanRequest without a fitting layout -> similar requests that have one, each with the layout that a plan would choose
"""

from collections.abc import Iterator
from dataclasses import replace

from hlat.hardware import Catalog, Cluster, load_catalog
from hlat.planner.problem.request import PlanRequest
from hlat.planner.search.search import LayoutPrediction, search
from hlat.planner.search.tie_break import break_tie

_MAX_INSTANCES = 1 << 12
_COUNTS_PER_DOUBLING = 8  # counts to try between one that does not fit and twice as many, which fit
_LARGER_INSTANCES = 3  # kinds of instances with more memory to try


def suggestions(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    """Yield requests that differ only in cluster or precision and fit, each with its best layout."""
    yield from _more_instances(request)
    yield from _larger_instances(request)
    if request.mode in ("mixed", "fp32"):
        yield from _if_it_fits(replace(request, mode="bf16-sr"))


def _if_it_fits(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    """Yield the request with its best layout, or nothing."""
    ranked = search(request).ranked
    if ranked:
        yield request, break_tie(ranked, request.cluster.domain)


def _more_instances(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    """Yield the smallest number of instances that fits, to an eighth of the last doubling."""
    count = request.cluster.count
    while (count := 2 * count) <= _MAX_INSTANCES:
        if found := list(_if_it_fits(_with_count(request, count))):
            step = max(1, count // 2 // _COUNTS_PER_DOUBLING)
            fewer = (_if_it_fits(_with_count(request, less)) for less in range(count // 2 + step, count, step))
            yield next((answer for answers in fewer for answer in answers), found[0])
            return


def _with_count(request: PlanRequest, count: int) -> PlanRequest:
    return replace(request, cluster=replace(request.cluster, count=count))


def _larger_instances(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    """Yield the same number of the next larger instances, by memory, that have the request's price and fit."""
    catalog: Catalog = load_catalog()
    clusters = []
    for instance in catalog.instances:
        chip = catalog.chip(instance.chip)
        # The same command with this cluster has to be accepted, and it names the kind of price.
        priced = request.price in instance.prices if request.price else bool(instance.prices)
        if chip is not None and priced and chip.family == request.cluster.chip.family:
            clusters.append(Cluster(instance, chip, request.cluster.count))
    larger = [cluster for cluster in clusters if cluster.memory_bytes > request.cluster.memory_bytes]
    for cluster in sorted(larger, key=lambda cluster: cluster.memory_bytes)[:_LARGER_INSTANCES]:
        if found := list(_if_it_fits(replace(request, cluster=cluster))):
            yield found[0]
            return
