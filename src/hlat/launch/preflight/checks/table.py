"""The table of checks: the one place that lists the groups. To add a group, write its file and add its line."""

from hlat.launch.preflight.checks import (
    clocks,
    collectives,
    device,
    device_faults,
    host,
    incidents,
    leftovers,
    matmul,
    network,
    presence,
    run_folder,
    software,
)
from hlat.launch.preflight.checks.base import HealthCheck, Stage

_GROUPS = (
    presence,
    host,
    run_folder,
    leftovers,
    incidents,
    device_faults,
    network,
    clocks,
    software,
    device,
    matmul,
    collectives,
)


def _in_order(checks: list[HealthCheck]) -> tuple[HealthCheck, ...]:
    """Order checks so that each comes after those that must have found nothing (``HealthCheck.after``)."""
    ordered: dict[str, HealthCheck] = {}
    waiting = checks
    while waiting:
        ready = [check for check in waiting if set(check.after) <= set(ordered)]
        assert ready, f"checks wait for each other, or for an unknown one: {[check.name for check in waiting]}"
        ordered.update({check.name: check for check in ready})
        waiting = [check for check in waiting if check.name not in ordered]
    return tuple(ordered.values())


CHECKS = _in_order([check for group in _GROUPS for check in group.CHECKS])
"""All checks, in the order in which they are judged."""


def checks_of(stage: Stage, quick: bool = False) -> list[HealthCheck]:
    """Return the checks of a stage.

    Args:
        stage: the stage.
        quick: True for those of the examination before a restart only.
    """
    return [check for check in CHECKS if check.stage == stage and (check.is_quick or not quick)]


def modules_of(stage: Stage, quick: bool = False) -> list[str]:
    """Return the modules that measure the checks of a stage in each process; arguments as for ``checks_of``."""
    return list(dict.fromkeys(check.module for check in checks_of(stage, quick)))
