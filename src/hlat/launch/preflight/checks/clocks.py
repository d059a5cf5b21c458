"""Clocks of the hosts: the difference to host 0, measured as NTP does."""

from collections.abc import Iterator

from hlat.launch.preflight.checks.base import Evidence, Facts, HealthCheck, Symptom
from hlat.launch.preflight.links import ask_time
from hlat.launch.preflight.place import HostView

_LARGEST = 1.0
"""Seconds by which clocks may differ. With NTP they agree within milliseconds, so that a second means that it does not
run. Runs do not depend on clocks; times in logs of several hosts, job deadlines and signatures of object stores do."""


def _measure(place: HostView) -> Facts:
    first = place.peers.get(0)
    if first is None or not first.port or place.request.node == 0:
        return {"offset": 0.0, "error_bound": 0.0}
    try:
        offset, bound = ask_time(first, place.tools.clock)
    except OSError:  # HD23 reports that
        return {"offset": 0.0, "error_bound": 0.0}
    return {"offset": offset, "error_bound": bound}


def _judge(evidence: Evidence) -> Iterator[Symptom]:
    offsets = {case.node: case.facts["offset"] for case in evidence.cases}
    if not offsets:
        return
    near = {
        node: sum(abs(offset - other) <= _LARGEST for other in offsets.values()) for node, offset in offsets.items()
    }
    usual = offsets[max(near, key=lambda node: (near[node], -node))]
    for case in evidence.cases:
        difference = case.facts["offset"] - usual
        if abs(difference) - case.facts["error_bound"] > _LARGEST:
            direction = "ahead of" if difference > 0 else "behind"
            yield Symptom(case.node, f"its clock is {abs(difference):.1f} s {direction} those of the other hosts")


def _summary(evidence: Evidence) -> str:
    if len(evidence.cases) < 2:
        return ""
    offsets = [case.facts["offset"] for case in evidence.cases]
    bound = max(case.facts["error_bound"] for case in evidence.cases)
    return f"clocks within {max(offsets) - min(offsets) + bound:.2g} s"


CHECKS = (
    HealthCheck(
        "HD19",
        "clock-skew",
        "peers",
        "Start the time service of that host (chronyd, systemd-timesyncd, ntpd).",
        measure=_measure,
        judge=_judge,
        summary=_summary,
        after=("connections",),
    ),
)
