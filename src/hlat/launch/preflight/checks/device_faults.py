"""Faults that the devices of a host have reported since it was started."""

from collections.abc import Iterator

from hlat.launch.preflight.checks.base import Evidence, Facts, HealthCheck, Symptom
from hlat.launch.preflight.place import HostView

_SHOWN = 3


def _measure(place: HostView) -> Facts:
    return {"found": place.tools.device_reports()}


def _judge(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        for message in case.facts["found"][-_SHOWN:]:
            yield Symptom(case.node, message)


CHECKS = (
    HealthCheck(
        "HD30",
        "device-faults",
        "host",
        "Replace the host or reboot it, as the finding says; messages of the kernel from before its last start are "
        "gone.",
        _measure,
        judge=_judge,
    ),
)
