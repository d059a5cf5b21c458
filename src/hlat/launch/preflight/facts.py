"""Facts as they are measured: checks of a host, and answers of its rank processes."""

from collections.abc import Sequence

from hlat.launch.preflight.checks.base import Facts, HealthCheck
from hlat.launch.preflight.place import HostView
from hlat.runtime.errors import HlatError


def measure(checks: Sequence[HealthCheck], place: HostView) -> dict[str, Facts]:
    """Measure checks of a host; return facts by check. One that fails has its error as fact."""
    found: dict[str, Facts] = {}
    for check in checks:
        try:
            found[check.name] = check.measure(place)
        except (OSError, HlatError) as error:
            found[check.name] = {
                "error": str(error.strerror if isinstance(error, OSError) and error.strerror else error)
            }
    return found


def facts_by_module(answers: list[Facts], died: str, seconds: float) -> Facts:
    """Return facts of a process by module, its plan, and how far it came.

    Args:
        answers: its answers to an order.
        died: description of its end; empty if it lives.
        seconds: time that it had.
    """
    modules = {each["module"]: each.get("facts", {"error": each.get("error")}) for each in answers if "module" in each}
    done = bool(answers) and bool(answers[-1].get("done"))
    last = next((each["begin"] for each in reversed(answers) if "begin" in each), "starting")
    return {
        "modules": modules,
        "plan": next((each["plan"] for each in answers if "plan" in each), {}),
        "died": died,
        "trouble": "" if done else died or f"its process did not finish within {seconds:g} s",
        "broken": next((each["broken"] for each in answers if "broken" in each), ""),
        "progress": len(answers),
        "last": last.replace("_", " "),
    }
