"""What would do where nothing fits: more of the same instances, instances with more memory, fewer bytes.

Question without an answer -> the nearest questions that have one, each with the layout that a plan would take
"""

from collections.abc import Iterator
from dataclasses import replace

from hlat.hardware import Catalog, Cluster, load_catalog
from hlat.planner.problem import Question
from hlat.planner.search.search import Planned, search
from hlat.planner.search.tie_break import choose

_MOST = 1 << 12  # instances
_BETWEEN = 8  # numbers that are tried between one that does not do and twice as many, which do
_OTHERS = 3  # instances with more memory


def nearest(question: Question) -> Iterator[tuple[Question, Planned]]:
    """Questions that differ in the cluster or the precision alone, and have an answer."""
    yield from _more(question)
    yield from _larger(question)
    if question.mode in ("mixed", "fp32"):
        yield from _answered(replace(question, mode="bf16-sr"))


def _answered(question: Question) -> Iterator[tuple[Question, Planned]]:
    ranked = search(question).ranked
    if ranked:
        yield question, choose(ranked, question.cluster.domain)


def _more(question: Question) -> Iterator[tuple[Question, Planned]]:
    """The fewest instances, to an eighth of the step between two powers."""
    count = question.cluster.count
    while (count := 2 * count) <= _MOST:
        if found := list(_answered(_counted(question, count))):
            step = max(1, count // 2 // _BETWEEN)
            fewer = (_answered(_counted(question, less)) for less in range(count // 2 + step, count, step))
            yield next((one for some in fewer for one in some), found[0])
            return


def _counted(question: Question, count: int) -> Question:
    return replace(question, cluster=replace(question.cluster, count=count))


def _larger(question: Question) -> Iterator[tuple[Question, Planned]]:
    """As many instances of the next kinds, by memory, that have a price."""
    catalog: Catalog = load_catalog()
    others = []
    for instance in catalog.instances:
        chip = catalog.chip(instance.chip)
        if chip is not None and instance.prices and chip.family == question.cluster.chip.family:
            others.append(Cluster(instance, chip, question.cluster.count))
    roomier = [one for one in others if one.memory_bytes > question.cluster.memory_bytes]
    for cluster in sorted(roomier, key=lambda one: one.memory_bytes)[:_OTHERS]:
        price = question.price if question.price in cluster.instance.prices else None
        if found := list(_answered(replace(question, cluster=cluster, price=price))):
            yield found[0]
            return
