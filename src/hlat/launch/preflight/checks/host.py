"""Memory and limits of a host."""

import resource
from collections.abc import Iterator

from hlat.launch.preflight.checks.base import Evidence, Facts, HealthCheck, Symptom, gibibytes
from hlat.launch.preflight.place import HostView
from hlat.runtime.terminal_text import plural

_PROCESS_BYTES = 512 << 20
"""Memory of a process apart from its model: Python and torch take 0.3 GiB, buffers of data and saving the rest."""
_FILES = 256
"""Open files of a process apart from connections: libraries, shards of data, parts of a checkpoint, logs."""
_FILES_PER_RANK = 8
"""Connections to each other process: the default group, its control group, and one per axis of the layout."""


def _measure_memory(place: HostView) -> Facts:
    return {"free": place.tools.available_memory()}


def _judge_memory(evidence: Evidence) -> Iterator[Symptom]:
    needed = evidence.nproc * (_PROCESS_BYTES + evidence.plan.get("host_bytes", 0.0))
    need = f"{plural(evidence.nproc, 'process')} {'needs' if evidence.nproc == 1 else 'need'}"
    for case in evidence.cases:
        if case.facts["free"] < needed:
            text = f"{gibibytes(case.facts['free'])} of memory are free, and {need} "
            yield Symptom(case.node, text + gibibytes(needed))


def _summary_of_memory(evidence: Evidence) -> str:
    return f"{gibibytes(min(case.facts['free'] for case in evidence.cases))} of memory free" if evidence.cases else ""


def _measure_files(place: HostView) -> Facts:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_PER_RANK * place.request.world
    return {"limit": soft, "most": hard, "needed": needed, "unlimited": soft == resource.RLIM_INFINITY}


def _judge_files(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        facts = case.facts
        if not facts["unlimited"] and facts["limit"] < facts["needed"]:
            text = f"a process may open {facts['limit']} files, and a run of this size needs {facts['needed']}"
            yield Symptom(case.node, text)


CHECKS = (
    HealthCheck(
        "HD07",
        "host-memory",
        "host",
        "End other programs, raise the limit of the job (control group, ulimit -v), or use fewer processes.",
        measure=_measure_memory,
        judge=_judge_memory,
        summary=_summary_of_memory,
        is_quick=True,
    ),
    HealthCheck(
        "HD21",
        "open-files",
        "host",
        "Raise the limit: ulimit -n in the job script, LimitNOFILE= of the service that starts jobs.",
        measure=_measure_files,
        judge=_judge_files,
    ),
)
