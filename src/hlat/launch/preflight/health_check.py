"""A check: its number, its measurement, its judgement and its remedy; and the evidence that it judges.

    measure(place) on a host or a rank --Facts (JSON)--> Evidence of all places --judge--> Symptoms, by host

Measuring and judging are separate: facts travel from every host to host 0, which compares them. A check that needs
torch names its measurement in ``rank_measurements``, because this process does not import torch.

    host_checks          this host and its network
    run_folder_checks    the folder of the run, and what earlier runs left in it
    rank_checks          devices, software, matrix products and collectives of the processes
    here                 the examination itself: hosts that do not report, processes that die, collectives that hang

The checks of the examination itself measure nothing: their facts come from ``examination``.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hlat.launch.preflight.request import HostView

Facts = dict[str, Any]
"""JSON values that a check measured in one place."""

Stage = Literal["meeting", "host", "peers", "rank", "together"]
"""Part of the examination in which a check measures: before hosts meet, between hosts, per process, in collectives."""


@dataclass(frozen=True)
class Symptom:
    """A sign that something is wrong on a host."""

    node: int  # index of the host
    message: str  # one sentence, without a full stop
    rank: int | None = None  # rank that shows it; None for the host
    is_warning: bool = False  # True if the host can take part in a run all the same


@dataclass(frozen=True)
class Case:
    """Facts from one place."""

    node: int
    rank: int | None  # None for facts about a host
    facts: Facts


@dataclass(frozen=True)
class Evidence:
    """All that a check judges."""

    cases: tuple[Case, ...]  # its facts, from every place that measured
    hosts: Mapping[int, str]  # name of each host, by index
    nproc: int = 1  # processes per host
    # needs of the recipe, as recipe_needs counts them; empty without a recipe
    plan: Mapping[str, Any] = field(default_factory=dict)
    # published rates between devices, in bytes per second: device and host; empty if unknown
    links: Mapping[str, float] = field(default_factory=dict)


Judge = Callable[[Evidence], Iterator[Symptom]]


@dataclass(frozen=True)
class HealthCheck:
    """One numbered check of the preflight: measurement, judgement and remedy."""

    id: str  # stable number, such as HD03; never given to another check
    name: str  # stable name in a few words with dashes
    stage: Stage  # part of the examination in which it measures
    remedy: str  # advice for the user if it finds something
    measure: Callable[[HostView], Facts] = lambda place: {}  # measures on a host (stages host and peers)
    module: str = ""  # key in rank_measurements.MEASUREMENTS of what each process measures (stages rank and together)
    # finds symptoms in the facts of all places that could measure; an error while measuring is one in any case
    judge: Judge = lambda evidence: iter(())
    # describes what was measured in a few words, for a healthy report; may be empty
    summary: Callable[[Evidence], str] = lambda evidence: ""
    after: tuple[str, ...] = ()  # names of checks that must have found nothing, else this one is not judged
    is_quick: bool = False  # True if it is part of the examination before a restart


def megabytes(rate: float) -> str:
    """Format bytes per second."""
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def gibibytes(count: float) -> str:
    """Format a number of bytes."""
    return f"{count / (1 << 30):.3g} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.3g} MiB"


def culprits(pairs: Collection[tuple[int, int]]) -> list[int]:
    """Return the fewest hosts that explain all failed pairs (from, to), by taking those with most failures."""
    failed, found = set(pairs), []
    while failed:
        weights: dict[int, float] = {}
        for source, target in failed:
            weights[source] = weights.get(source, 0.0) + 1.0
            # Where both are as likely, the receiving host is taken, which has the firewall, and then the one with the
            # higher index: host 0 is needed to report.
            weights[target] = weights.get(target, 0.0) + 1.01
        worst = max(weights, key=lambda node: (round(weights[node], 6), node))  # equal sums may differ in the last bits
        found.append(worst)
        failed = {pair for pair in failed if worst not in pair}
    return sorted(found)


def judge_each(message: Callable[[Facts], str], *, is_warning: bool = False) -> Judge:
    """Judge the facts of each place alone: a symptom wherever the message about them is not empty."""

    def judge(evidence: Evidence) -> Iterator[Symptom]:
        for case in evidence.cases:
            if found := message(case.facts):
                yield Symptom(case.node, found, case.rank, is_warning)

    return judge


judge_wrong = judge_each(lambda facts: str(facts["wrong"]))


PRESENCE_CHECKS = (
    HealthCheck(
        "HD01",
        "sign-of-life",
        "meeting",
        "Start the same command on that host, with its own --node; look there for its error message; check that "
        "run.dir is on a file system that all hosts share. --wait gives hosts more time.",
        judge=judge_wrong,
    ),
    HealthCheck(
        "HD02",
        "rank-processes",
        "meeting",
        "Run the command on that host alone (--nodes 1) and read the process's message; a process that was killed may "
        "have been out of memory.",
        judge=judge_wrong,
        after=("sign-of-life", "host-memory"),
    ),
    HealthCheck(
        "HD13",
        "collectives-finish",
        "meeting",
        "Check the network between the hosts: the interface named by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and "
        "firewalls, which have to leave all ports between the hosts open.",
        judge=judge_wrong,
        after=("sign-of-life", "rank-processes", "connections", "device-visible", "host-memory"),
    ),
)
