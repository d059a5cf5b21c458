"""From checks to the report of a preflight.

    groups of checks --in an order in which none depends on a later one--> CHECKS, checks_of a stage
    checks of a host, answers of its rank processes --measure, RankProcesses.ask--> facts by check and place
    Gathered: facts of all places --judge, in the order of CHECKS--> Symptoms, by host
        --> PreflightReport: findings by host --> JSON, lines for people

A check that others make meaningless (``HealthCheck.after``) is not judged: a host without a network gets one finding
about its network, not six about everything that needs one. To add a check, add it to the table of its module.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any, Self

from hlat.launch.preflight.health_check import PRESENCE_CHECKS, Case, Evidence, Facts, HealthCheck, Stage, Symptom
from hlat.launch.preflight.host_checks import HOST_CHECKS
from hlat.launch.preflight.rank_checks import RANK_CHECKS
from hlat.launch.preflight.request import HostView
from hlat.launch.preflight.run_folder_checks import RUN_FOLDER_CHECKS
from hlat.runtime.errors import HlatError
from hlat.runtime.terminal import TABLE_ROWS, first_of, listed, plural

_CHECKS = {check.name: check for check in (*PRESENCE_CHECKS, *HOST_CHECKS, *RUN_FOLDER_CHECKS, *RANK_CHECKS)}
CHECKS = tuple(
    _CHECKS[name] for name in TopologicalSorter({name: one.after for name, one in _CHECKS.items()}).static_order()
)
"""All checks; each comes after those that must have found nothing (``HealthCheck.after``)."""


def checks_of(stage: Stage, quick: bool = False) -> list[HealthCheck]:
    """Return the checks of a stage; if ``quick``, only those of the examination before a restart."""
    return [check for check in CHECKS if check.stage == stage and (check.is_quick or not quick)]


def modules_of(stage: Stage, quick: bool = False) -> list[str]:
    """Return what each process measures for a stage (``HealthCheck.module``); arguments as for ``checks_of``."""
    return list(dict.fromkeys(check.module for check in checks_of(stage, quick)))


def measure(checks: Sequence[HealthCheck], place: HostView) -> dict[str, Facts]:
    """Measure checks of a host; return facts by check. One that fails has its error as fact."""
    found: dict[str, Facts] = {}
    for check in checks:
        try:
            found[check.name] = check.measure(place)
        except (OSError, HlatError) as error:
            found[check.name] = {"error": str(getattr(error, "strerror", None) or error)}
    return found


@dataclass(frozen=True)
class Finding:
    """Something that a check found wrong."""

    id: str  # stable number of the check, such as HD03
    name: str  # stable name of the check, such as device-visible
    host: str
    message: str  # one sentence, without a full stop
    remedy: str
    is_warning: bool = False  # True if the host can take part in a run all the same

    def __str__(self) -> str:
        return f"{self.id} {self.name}: {self.host}: {self.message}. {self.remedy}"


@dataclass(frozen=True)
class ExaminedHost:
    """A host and the checks that were judged for it."""

    name: str
    checks: tuple[tuple[str, str], ...]  # (number, name) of each check that was judged
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing was found but warnings."""
        return all(finding.is_warning for finding in self.findings)


@dataclass(frozen=True)
class PreflightReport:
    """Report of a preflight.

    Attributes:
        hosts: hosts by index.
        measured: rates and sizes, a few words each.
        skipped: (number, reason) of checks that were not judged.
        ranks: number of processes that were examined.
        seconds: duration.
        is_partial: True if this host could not meet the others and reports about itself alone.
        node: index of the host that has this report.
    """

    hosts: tuple[ExaminedHost, ...]
    measured: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    ranks: int = 1
    seconds: float = 0.0
    is_partial: bool = False
    node: int = 0

    @property
    def ok(self) -> bool:
        """True if every host is healthy."""
        return all(host.ok for host in self.hosts)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, warnings included."""
        return tuple(finding for host in self.hosts for finding in host.findings)

    @property
    def bad_hosts(self) -> list[str]:
        """Names of the hosts that a run should not use."""
        return [host.name for host in self.hosts if not host.ok]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values, under the documented keys (docs/doctor.md)."""
        return {
            "ok": self.ok,
            "hosts": [_host_json(host) for host in self.hosts],
            "bad_hosts": self.bad_hosts,
            "measured": list(self.measured),
            "skipped": [{"id": number, "why": why} for number, why in self.skipped],
            "ranks": self.ranks,
            "seconds": round(self.seconds, 2),
            "partial": self.is_partial,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` returned on another host; KeyError or TypeError if it is no report."""
        return cls(
            tuple(_host_from_json(host) for host in content["hosts"]),
            tuple(content["measured"]),
            tuple((entry["id"], entry["why"]) for entry in content["skipped"]),
            content["ranks"],
            content["seconds"],
            content["partial"],
        )

    def lines(self) -> Iterator[str]:
        """Yield lines for people: one per finding, or one that says what is healthy."""
        by_check: dict[tuple[str, bool], list[Finding]] = {}
        for finding in self.findings:
            by_check.setdefault((finding.id, finding.is_warning), []).append(finding)
        for (number, is_warning), alike in by_check.items():
            kind = "warning" if is_warning else "problem"
            shown, more = first_of(alike)
            yield from (f"{kind} {finding}" for finding in shown)
            if more:
                yield f"{kind} {number}: {more}, on {plural(len({each.host for each in alike}), 'host')} in all (-v)"
        checks = len({check for host in self.hosts for check in host.checks})
        hosts = plural(len(self.hosts), "host")
        scope = f"{hosts}, {plural(self.ranks, 'process')}, {plural(checks, 'check')} in {self.seconds:.1f} s"
        if self.ok:
            yield f"healthy: {scope}" + (f"; {', '.join(self.measured)}" if self.measured else "")
        else:
            yield f"bad hosts: {listed(self.bad_hosts, TABLE_ROWS)} ({scope})"


def _host_json(host: ExaminedHost) -> dict[str, Any]:
    names = {**dict(host.checks), **{finding.id: finding.name for finding in host.findings}}
    checks = []
    for number, name in sorted(names.items()):
        found = [finding for finding in host.findings if finding.id == number]
        ok, message = all(finding.is_warning for finding in found), "; ".join(finding.message for finding in found)
        remedy = found[0].remedy if found else ""
        checks.append({"id": number, "name": name, "ok": ok, "message": message, "remedy": remedy})
    return {"host": host.name, "ok": host.ok, "checks": checks}


def _host_from_json(content: Mapping[str, Any]) -> ExaminedHost:
    checks = content["checks"]
    findings = tuple(
        Finding(one["id"], one["name"], content["host"], one["message"], one["remedy"], bool(one["ok"]))
        for one in checks
        if one["message"]
    )
    return ExaminedHost(content["host"], tuple((one["id"], one["name"]) for one in checks), findings)


@dataclass
class Gathered:
    """Facts of an examination, as they come in."""

    hosts: dict[int, str]  # name of each host, by index
    nproc: int
    plan: Facts = field(default_factory=dict)  # needs of the recipe
    links: Mapping[str, float] = field(default_factory=dict)  # published rates between devices
    cases: dict[str, list[Case]] = field(default_factory=dict)  # facts by check

    def add(self, name: str, node: int, rank: int | None, facts: Facts) -> None:
        self.cases.setdefault(name, []).append(Case(node, rank, facts))

    def add_host(self, node: int, facts: Mapping[str, Facts]) -> None:
        for name, found in facts.items():
            self.add(name, node, None, found)

    def add_rank(self, node: int, rank: int, found: Facts, stage: Stage) -> None:
        """Add facts of a rank process of a stage, as ``RankProcesses.ask`` returns them."""
        if found["died"]:
            self.add_trouble("rank-processes", node, rank, f"its process {found['died']}")
        elif found["trouble"] and stage == "rank":
            self.add_trouble("rank-processes", node, rank, found["trouble"])
        self.plan.update(found["plan"])
        for check in CHECKS:  # checks of a device run in another stage where processes join first
            if check.module in found["modules"]:
                self.add(check.name, node, rank, found["modules"][check.module])

    def add_trouble(self, name: str, node: int, rank: int | None, text: str) -> None:
        """Add trouble of the examination itself, for the checks of the stage meeting."""
        self.add(name, node, rank, {"wrong": text})


def judge(gathered: Gathered, ranks: int, seconds: float, checks: Sequence[HealthCheck] = CHECKS) -> PreflightReport:
    """Judge all facts; ``checks`` are those that were part of the examination, in the order of the table."""
    found: dict[str, list[Symptom]] = {}
    judged: list[HealthCheck] = []
    skipped, measured = [], []
    for check in checks:
        reasons = [name for name in check.after if any(not symptom.is_warning for symptom in found.get(name, ()))]
        cases = gathered.cases.get(check.name, [])
        measured_cases = tuple(case for case in cases if "error" not in case.facts)
        evidence = Evidence(measured_cases, gathered.hosts, gathered.nproc, gathered.plan, gathered.links)
        if reasons:
            skipped.append((check.id, f"not judged, because of {', '.join(reasons)}"))
        elif check.stage == "meeting" or cases:
            judged.append(check)
            errors = [Symptom(case.node, case.facts["error"], case.rank) for case in cases if "error" in case.facts]
            found[check.name] = [*errors, *check.judge(evidence)]
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
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}: {message}"
