"""Judgement: facts of all hosts and processes become findings by host.

    facts by check and place --in the order of the table--> HealthCheck.judge --Symptoms, by host--> PreflightReport

A check that others make meaningless (``HealthCheck.after``) is not judged: a host without a network gets one finding
about its network, not six about everything that needs one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hlat.launch.preflight.checks.base import Case, Evidence, Facts, HealthCheck, Stage, Symptom
from hlat.launch.preflight.checks.table import CHECKS
from hlat.launch.preflight.report import ExaminedHost, Finding, PreflightReport

_MAX_RANKS = 8  # ranks in a message


@dataclass
class Gathered:
    """Facts of an examination, as they come in.

    Attributes:
        hosts: name of each host, by index.
        nproc: processes per host.
        plan: needs of the recipe.
        links: published rates between devices.
        cases: facts by check.
    """

    hosts: dict[int, str]
    nproc: int
    plan: Facts = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)
    cases: dict[str, list[Case]] = field(default_factory=dict)

    def add(self, check: HealthCheck, node: int, rank: int | None, facts: Facts) -> None:
        """Add facts of a check from one place."""
        self.cases.setdefault(check.name, []).append(Case(node, rank, facts))

    def add_host(self, node: int, facts: Mapping[str, Facts]) -> None:
        """Add facts of a host, by check."""
        for check in CHECKS:
            if check.name in facts:
                self.add(check, node, None, facts[check.name])

    def add_rank(self, node: int, rank: int, found: Facts, stage: Stage) -> None:
        """Add facts of a rank process of a stage, as ``facts_by_module`` returns them."""
        if found["died"]:
            self.add_trouble("rank-processes", node, rank, f"its process {found['died']}")
        elif found["trouble"] and stage == "rank":
            self.add_trouble("rank-processes", node, rank, found["trouble"])
        self.plan.update(found["plan"])
        for check in CHECKS:  # those of a device are measured in another stage where processes join first
            if check.module in found["modules"]:
                self.add(check, node, rank, found["modules"][check.module])

    def add_trouble(self, name: str, node: int, rank: int | None, text: str) -> None:
        """Add trouble of the examination itself, for the checks of the stage meeting."""
        self.cases.setdefault(name, []).append(Case(node, rank, {"trouble": text}))


def judge(gathered: Gathered, ranks: int, seconds: float, checks: Sequence[HealthCheck] = CHECKS) -> PreflightReport:
    """Judge all facts.

    Args:
        gathered: the facts.
        ranks: number of processes that were examined.
        seconds: duration of the examination.
        checks: checks that were part of it, in the order of the table.
    """
    found: dict[str, list[Symptom]] = {}
    judged: list[HealthCheck] = []
    skipped, measured = [], []
    for check in checks:
        reasons = [name for name in check.after if any(not symptom.is_warning for symptom in found.get(name, ()))]
        evidence = _evidence(gathered, check)
        if reasons:
            skipped.append((check.id, f"not judged, because of {', '.join(reasons)}"))
        elif check.stage == "meeting" or evidence.cases or gathered.cases.get(check.name):
            judged.append(check)
            found[check.name] = [*_errors(gathered, check), *check.judge(evidence)]
            if summary := check.summary(evidence):
                measured.append(summary)
        else:
            skipped.append((check.id, "not measured"))
    silent = {symptom.node for symptom in found.get("sign-of-life", ())}
    names = sorted((check.id, check.name) for check in judged)  # the first is the sign of life
    hosts = tuple(
        ExaminedHost(
            name,
            tuple(names[:1] if node in silent else names),
            tuple(_findings(judged, found, node, name)),
        )
        for node, name in sorted(gathered.hosts.items())
    )
    return PreflightReport(hosts, tuple(measured), tuple(skipped), ranks, seconds)


def _evidence(gathered: Gathered, check: HealthCheck) -> Evidence:
    """Facts of the places where a check could measure."""
    cases = tuple(case for case in gathered.cases.get(check.name, ()) if "error" not in case.facts)
    return Evidence(cases, gathered.hosts, gathered.nproc, gathered.plan, gathered.links)


def _errors(gathered: Gathered, check: HealthCheck) -> Iterable[Symptom]:
    """Symptoms of the places where a check could not measure."""
    for case in gathered.cases.get(check.name, ()):
        if "error" in case.facts:
            yield Symptom(case.node, case.facts["error"], case.rank)


def _findings(
    judged: Sequence[HealthCheck], found: Mapping[str, list[Symptom]], node: int, name: str
) -> Iterable[Finding]:
    """Findings of a host, with equal symptoms of its ranks as one."""
    for check in judged:
        ranks: dict[tuple[str, bool], list[int]] = {}
        for symptom in found[check.name]:
            if symptom.node == node:
                own = ranks.setdefault((symptom.message, symptom.is_warning), [])
                own.extend([] if symptom.rank is None else [symptom.rank])
        for (message, is_warning), own in ranks.items():
            yield Finding(check.id, check.name, name, _with_ranks(own, message), check.remedy, is_warning)


def _with_ranks(ranks: Sequence[int], message: str) -> str:
    if not ranks:
        return message
    listed = ", ".join(map(str, ranks[:_MAX_RANKS])) + (", ..." if len(ranks) > _MAX_RANKS else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}: {message}"
