"""Checks of the examination itself: hosts that do not report, processes that die, collectives that hang.

Their facts come from the examination (``hlat.launch.preflight.examination``), so they measure nothing themselves.
"""

from collections.abc import Iterator

from hlat.launch.preflight.checks.base import Evidence, HealthCheck, Symptom


def _told(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        yield Symptom(case.node, case.facts["trouble"], case.rank)


CHECKS = (
    HealthCheck(
        "HD01",
        "sign-of-life",
        "meeting",
        "Start the same command on that host, with its own --node; look there for its error message; check that "
        "run.dir is on a file system that all hosts share. --wait gives hosts more time.",
        judge=_told,
    ),
    HealthCheck(
        "HD02",
        "rank-processes",
        "meeting",
        "Run the command on that host alone (--nodes 1) and read the process's message; a process that was killed may "
        "have been out of memory.",
        judge=_told,
        after=("sign-of-life", "host-memory"),
    ),
    HealthCheck(
        "HD13",
        "collectives-finish",
        "meeting",
        "Check the network between the hosts: the interface named by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and "
        "firewalls, which have to leave all ports between the hosts open.",
        judge=_told,
        after=("sign-of-life", "rank-processes", "connections", "device-visible", "host-memory"),
    ),
)
