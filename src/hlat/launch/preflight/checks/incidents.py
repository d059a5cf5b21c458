"""Incidents of this run that its supervisors blamed a host for, since that host was started.

events.jsonl --incidents of the last day that name this host, after its boot--> a host that failed again and again

A host that has failed once may have had bad luck. One that was blamed repeatedly, while others took part without
trouble, is to be left out before it costs another attempt; a repaired host has been started again, and begins anew.
"""

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hlat.launch.preflight.checks.base import Evidence, Facts, HealthCheck, Symptom
from hlat.launch.preflight.place import HostView
from hlat.runtime.terminal_text import plural
from hlat.tracking import read_events

_KINDS = ("host", "hang", "signal")  # not errors that a process has reported: the program's, or of a peer
_DAY = 86400.0
_OFTEN = 2  # incidents
_BOOT = Path("/proc/stat")


def _measure(place: HostView) -> Facts:
    """Find the incidents of this host."""
    path = place.request.run_dir / "events.jsonl"
    events = read_events(path) if path.exists() else []
    since = max(place.tools.clock() - _DAY, _boot_time())
    own = [event for event in events if _blames(event, place.request.name) and _seconds(event) > since]
    return {"incidents": [[event["kind"], str(event.get("cause", ""))[:200]] for event in own]}


def _blames(event: dict[str, Any], host: str) -> bool:
    return event.get("event") == "incident" and event.get("host") == host and event.get("kind") in _KINDS


def _seconds(event: dict[str, Any]) -> float:
    """Time of an event, in seconds since 1970; 0 if it has none."""
    with suppress(ValueError):
        return datetime.fromisoformat(str(event.get("time"))).timestamp()
    return 0.0


def _boot_time() -> float:
    """Return the time when this machine was started, in seconds since 1970; 0 if the system does not report it."""
    with suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _BOOT.read_text().splitlines() if line.startswith("btime "))
        return float(line.split()[1])
    return 0.0


def _judge(evidence: Evidence) -> Iterator[Symptom]:
    """Find hosts that were blamed often, and more often than the median host."""
    counts = sorted(len(case.facts["incidents"]) for case in evidence.cases)
    usual = counts[(len(counts) - 1) // 2] if len(counts) > 1 else 0
    for case in evidence.cases:
        found = case.facts["incidents"]
        if len(found) >= _OFTEN and len(found) > usual:
            last = f"the last: {found[-1][1]}" if found[-1][1] else f"the last: {found[-1][0]}"
            message = f"blamed for {plural(len(found), 'incident')} of this run within a day; {last}"
            yield Symptom(case.node, message, is_warning=len(counts) == 1)


CHECKS = (
    HealthCheck(
        "HD29",
        "earlier-incidents",
        "host",
        "Replace the host, or repair and restart it: incidents before its last start do not count. The causes are in "
        "events.jsonl of the run (event incident).",
        _measure,
        judge=_judge,
    ),
)
