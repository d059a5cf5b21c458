"""Page of exit codes: those of errors, from their classes, and those of runs that were asked to stop."""

import inspect
import signal
from collections import defaultdict
from collections.abc import Iterator

import hlat.config
import hlat.training  # noqa: F401  (defines further errors)
from hlat.runtime.errors import HlatError
from hlat.runtime.process import REQUEUE_CODE, STOP_SIGNALS, stop_exit_code


def exit_codes() -> dict[int, list[str]]:
    """Return the meanings of every exit code."""
    found = defaultdict(list)
    found[0].append("done: the command finished, or the run reached `training.stop_after`")
    found[1].append(
        "a process was killed, hung or failed and restarts are used up; a host is bad (`hlat doctor`); or a bug"
    )
    for error in [HlatError, *sorted(_subclasses(HlatError), key=lambda one: one.__name__)]:
        first = (inspect.getdoc(error) or "").partition("\n\n")[0]
        again = ", the supervisor restarts the run" if error.retryable else ""
        found[error.exit_code].append(f"`{error.__name__}`{again}: {' '.join(first.split())}")
    for number in STOP_SIGNALS:
        name = signal.Signals(number).name
        found[stop_exit_code(number)].append(f"saved and stopped on {name}; the same command resumes")
    found[REQUEUE_CODE].append("saved at the deadline, `recovery.deadline_seconds` or a scheduler's; queue it again")
    return dict(sorted(found.items()))


def exit_codes_page() -> str:
    """Return the page."""
    lines = [
        "# Exit codes",
        "",
        "Generated from the classes of errors. Errors of your own making are one message on standard error without a",
        "traceback; a traceback is a bug of hlat. Schedulers: 75 means queue again, 2 and 4 do not try again.",
        "",
        "| exit code | meaning |",
        "|---|---|",
    ]
    lines += [f"| {code} | {'<br>'.join(meanings)} |" for code, meanings in exit_codes().items()]
    return "\n".join([*lines, ""])


def _subclasses(base: type[HlatError]) -> Iterator[type[HlatError]]:
    for one in base.__subclasses__():
        if one.__module__.startswith("hlat."):
            yield one
            yield from _subclasses(one)
