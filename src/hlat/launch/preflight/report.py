"""The report of a preflight: findings by host, JSON, lines for people."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from hlat.runtime.terminal_text import plural


@dataclass(frozen=True)
class Finding:
    """Something that a check found wrong.

    Attributes:
        id: stable number of the check, such as HD03.
        name: stable name of the check, such as ``device-visible``.
        host: name of the host.
        message: one sentence, without a full stop.
        remedy: advice.
        is_warning: True if the host can take part in a run all the same.
    """

    id: str
    name: str
    host: str
    message: str
    remedy: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"{self.id} {self.name}: {self.host}: {self.message}. {self.remedy}"


@dataclass(frozen=True)
class ExaminedHost:
    """A host and the checks that were judged for it.

    Attributes:
        name: name of the host.
        checks: (number, name) of each check that was judged.
        findings: what they found.
    """

    name: str
    checks: tuple[tuple[str, str], ...]
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
        """Read what ``to_dict`` returned on another host.

        Raises:
            KeyError, TypeError: it is no report.
        """
        return cls(
            tuple(_host(host) for host in content["hosts"]),
            tuple(content["measured"]),
            tuple((entry["id"], entry["why"]) for entry in content["skipped"]),
            content["ranks"],
            content["seconds"],
            content["partial"],
        )

    def lines(self) -> Iterator[str]:
        """Yield lines for people: one per finding, or one that says what is healthy."""
        yield from (f"{'warning' if finding.is_warning else 'problem'} {finding}" for finding in self.findings)
        checks = len({check for host in self.hosts for check in host.checks})
        hosts = plural(len(self.hosts), "host")
        scope = f"{hosts}, {plural(self.ranks, 'process')}, {plural(checks, 'check')} in {self.seconds:.1f} s"
        if self.ok:
            yield f"healthy: {scope}" + (f"; {', '.join(self.measured)}" if self.measured else "")
        else:
            yield f"bad hosts: {', '.join(self.bad_hosts)} ({scope})"


def _host_json(host: ExaminedHost) -> dict[str, Any]:
    found: dict[str, list[Finding]] = {}
    for finding in host.findings:
        found.setdefault(finding.id, []).append(finding)
    names = {**dict(host.checks), **{finding.id: finding.name for finding in host.findings}}
    checks = [
        {
            "id": number,
            "name": name,
            "ok": all(finding.is_warning for finding in found.get(number, ())),
            "message": "; ".join(finding.message for finding in found.get(number, ())),
            "remedy": next((finding.remedy for finding in found.get(number, ())), ""),
        }
        for number, name in sorted(names.items())
    ]
    return {"host": host.name, "ok": host.ok, "checks": checks}


def _host(content: Mapping[str, Any]) -> ExaminedHost:
    checks = content["checks"]
    findings = tuple(
        Finding(one["id"], one["name"], content["host"], one["message"], one["remedy"], bool(one["ok"]))
        for one in checks
        if one["message"]
    )
    return ExaminedHost(content["host"], tuple((one["id"], one["name"]) for one in checks), findings)
