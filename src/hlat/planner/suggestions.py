"""Suggestions where no layout fits, and the error that has them.

    PlanRequest -> more instances, instances with more memory, fewer bytes per parameter, the micro-batch and
        recomputation of a recipe searched -> each asked again, as its command asks it -> those that fit -> PlanError

A suggestion is printed only after the question with its options has been answered here, by the same code.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from hlat.hardware import Cluster, parse_cluster
from hlat.planner.expected import likely, outlook
from hlat.planner.problem.request import PlanRequest, resolve_request
from hlat.planner.search import USABLE_MEMORY_SHARE, LayoutPrediction, SearchResult, break_tie, search
from hlat.runtime.errors import HardwareError, PlanError
from hlat.runtime.terminal import plural

_GIB = 1 << 30
_MAX_INSTANCES = 1 << 12  # where the search for a suggestion ends
_COUNTS_PER_DOUBLING = 8  # counts to try between one that does not fit and twice as many, which fit
_LARGER_INSTANCES = 3  # kinds of instances with more memory to try


def suggestions(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    """Yield requests that differ in cluster, precision or what is searched, and fit, each with its best layout."""
    for other, _ in _ideas(request):
        again = _asked_again(request, other)
        if again is not None:
            yield from _if_it_fits(again)


def _ideas(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    """Yield requests that fit, but that no command may be able to ask for."""
    yield from _searched(request)
    yield from _more_instances(request)
    yield from _larger_instances(request)
    if request.mode in ("mixed", "fp32"):
        yield from _if_it_fits(replace(request, mode="bf16-sr"))


def _searched(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    if request.micro_batch is not None:
        yield from _if_it_fits(replace(request, asked=replace(request.asked, search=True)))


def _asked_again(request: PlanRequest, other: PlanRequest) -> PlanRequest | None:
    """Resolve ``other`` from the question of ``request`` with the options that differ; None if it is refused."""
    question = request.asked
    if question.model is None:  # a request that no question led to
        return other
    precision = question.precision if other.mode == request.mode else other.mode
    changed = replace(question, precision=precision, search=other.asked.search)
    try:
        cluster = parse_cluster(cluster_words(other), question.catalog, question.unit)
        return resolve_request(changed, cluster, question.price_kind([cluster]))
    except (HardwareError, PlanError):
        return None


def cluster_words(request: PlanRequest) -> str:
    """Write a cluster as ``--cluster`` takes it, in the unit of the question."""
    cluster = request.cluster
    if request.asked.unit == "instance":
        return cluster.name
    # Chips are counted of the whole instance, and of cards one by one.
    whole = re.sub(r"^\d+x|\[.*", "", cluster.instance.name)
    return f"{whole}:{cluster.chips}"


def _if_it_fits(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    ranked = search(request).ranked
    if ranked:
        yield request, likely(break_tie(request, ranked))


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
    """Yield the next larger instances, by memory, that have the request's price and fit."""
    catalog, clusters = request.asked.catalog, []
    for instance in catalog.instances:
        chip = catalog.chip(instance.chip)
        # The suggested command keeps the kind of price, so the other cluster has to have it.
        priced = request.price in instance.prices if request.price else bool(instance.prices)
        if chip is not None and priced and chip.family == request.cluster.chip.family:
            clusters.append(Cluster(instance, chip, request.cluster.count))
    larger = [cluster for cluster in clusters if cluster.memory_bytes > request.cluster.memory_bytes]
    for cluster in sorted(larger, key=lambda cluster: cluster.memory_bytes)[:_LARGER_INSTANCES]:
        if found := list(_if_it_fits(replace(request, cluster=cluster))):
            yield found[0]
            return


def nothing_fits(request: PlanRequest, found: SearchResult) -> str:
    """Say why no layout fits, and what would."""
    cluster = request.cluster
    if found.least_memory is None:
        micro = "" if request.micro_batch is None else f" times the recipe's micro-batch, {request.micro_batch},"
        lines = [
            f"no layout of {request.name} on the {plural(cluster.devices, 'device')} of {cluster.name} is possible: "
            f"degrees must divide the devices, tensor must divide the {request.model.heads} heads, and data{micro} "
            f"must divide --global-batch {request.global_batch}. `--layout tp=...,pp=...` shows which check a "
            "layout fails."
        ]
        others = _searched(request)  # more devices divide no better
    else:
        layout, need = found.least_memory
        lines = [
            f"{request.name} does not fit on {cluster.name}: a device has {cluster.memory_bytes / _GIB:.0f} GiB, of "
            f"which {USABLE_MEMORY_SHARE:.0%} can be used, and of the {found.tried:,} layouts tried the smallest, "
            f"{layout}, needs {need / _GIB:.1f} GiB."
        ]
        others = suggestions(request)
    for other, best in others:
        options = [] if other.mode == request.mode else [f"--precision {other.mode}"]
        options += ["--search"] * (other.asked.search and not request.asked.search)
        words = f" with {' '.join(options)}" if options else ""
        lines.append(
            f"It would fit on {cluster_words(other)}{words}: {best.candidate}; {best.peak_memory / _GIB:.1f} GiB; "
            f"{outlook(best)}."
        )
    return "\n".join(lines)
