"""Run the command ``hlat`` in this process, thousands of times, and check what must hold for any input.

    arguments --command--> exit code and printed text --broken_law--> None, or a description of the violation

The law: a documented exit code, no traceback, an end within 30 seconds, no control characters, no secret.
"""

import io
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hlat.command import main
from tests.support.fuzz.odd_values import SECRET

EXIT_CODES = (0, 2, 3, 4, 5)
SECONDS = 600  # only a hang takes so long, on any machine
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a command; ``code`` is a description if the command did not exit by itself."""

    code: int | str
    printed: str


class _Hang(BaseException):
    pass


def command(arguments: Sequence[str | Path]) -> Outcome:
    """Run ``hlat`` with these arguments."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    code: int | str = 0
    with _process(["hlat", *map(str, arguments)], streams):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else str(end.code)
        except _Hang:
            code = f"no end after {SECONDS} s"
        except BaseException as error:  # a process would print a traceback
            code = f"a traceback: {type(error).__name__}: {str(error)[:300]}"
    printed = "".join(stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    return Outcome(code, printed)


def broken_law(outcome: Outcome) -> str | None:
    """Describe the violation of the law by a command; None if there is none."""
    if outcome.code not in EXIT_CODES:
        return str(outcome.code)
    if "Traceback (most recent call last)" in outcome.printed:
        return "a traceback"
    if (control := _CONTROL.search(outcome.printed)) is not None:
        return f"the control character {control[0]!r}"
    if SECRET in outcome.printed:
        return "a secret"
    return None


@contextmanager
def _process(argv: list[str], streams: list[io.TextIOWrapper]) -> Iterator[None]:
    """Give the command its own arguments, streams and signal handlers, as a process would."""
    before = sys.argv, sys.stdout, sys.stderr
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    sys.argv, (sys.stdout, sys.stderr) = argv, streams
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        sys.argv, sys.stdout, sys.stderr = before
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _hang(number: int, frame: FrameType | None) -> None:
    raise _Hang
