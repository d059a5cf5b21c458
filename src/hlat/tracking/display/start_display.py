"""Display of the stages before the first step: a line with a spinner on a terminal, elsewhere a line for each stage.

enter_stage("building the model") --> terminal:  ⠹ building the model  3 s     (gone when the run's console begins)
--> otherwise: building the model ...
building the model: 12 s      (at its end, if it took over 2 s)
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hlat.config import TrackingConfig
from hlat.runtime.bottom_line import BottomLine
from hlat.runtime.process.startup_stage import observe_stages
from hlat.runtime.stage_line import StageLine
from hlat.tracking.display.console import console_kind, shows_progress

_WORTH_SAYING = 2.0  # seconds


class StageLines:
    """The stages as lines of text: each once, and its time if it took long.

    Args:
        say: prints a line.
        clock: seconds, monotonic.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._name, self._begin = "", 0.0

    def __call__(self, name: str) -> None:
        """Begin a stage; the empty name ends the last one."""
        seconds = self._clock() - self._begin
        if self._name and seconds > _WORTH_SAYING:
            self._say(f"{self._name}: {seconds:.0f} s")
        self._name, self._begin = name, self._clock()
        if name:
            self._say(f"{name} ...")


@contextmanager
def show_stages(config: TrackingConfig, say: Callable[[str], None]) -> Iterator[None]:
    """Show the stages of the start within the block, as the recipe's console does.

    On a terminal the line that is opened here becomes that of the run's console, and is closed with the block.

    Args:
        config: the section ``tracking``.
        say: prints a line where there is no terminal.
    """
    if not shows_progress(config):
        yield
    elif console_kind(config, sys.stdout) != "rich":
        with observe_stages(StageLines(say)):
            yield
    else:
        with BottomLine(sys.stdout, StageLine("starting")) as line, observe_stages(lambda name: _show(line, name)):
            yield


def _show(line: BottomLine, name: str) -> None:
    if name and isinstance(line.shown, StageLine):  # the console of a run shows its stages itself
        line.show(StageLine(name))
