"""Display of what comes before the steps, and of other work: stages of the start, and progress of data preparation.

    enter_stage("building the model") --> terminal:  ⠹ building the model  3 s     (gone when the run's console begins)
                                      --> otherwise: building the model ...
                                                     building the model: 12 s      (at its end, if it took over 2 s)
    progress(stage, done, total) --> terminal:  ⠹ tokenize  ━━━─────  38.2%  3.8 of 9.9 MB of files  2.1 MB/s  eta ...
                                 --> otherwise: a line every few seconds

Bytes are those of the files, of which a compressed one has fewer than its text: the share of the work is right either
way. The speed is the mean since the stage began.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import TextIO

from hlat.config import TrackingConfig
from hlat.runtime.progress import observe_stages
from hlat.runtime.terminal import BottomLine, StageLine, draws_lines, open_line, spinner
from hlat.tracking.console import (
    LEAST_SHARE,
    Field,
    bar,
    console_kind,
    duration,
    fit,
    has_colour,
    shows_progress,
)
from hlat.tracking.console import progress as progress_text
from hlat.tracking.tracker import Eta

_WORTH_SAYING = 2.0  # seconds


class StageLines:
    """The stages as lines of text: each once, and its time if it took long."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._name, self._begin = "", 0.0

    def __call__(self, name: str) -> None:
        seconds = self._clock() - self._begin
        if self._name and seconds > _WORTH_SAYING:
            self._say(f"{self._name}: {seconds:.0f} s")
        self._name, self._begin = name, self._clock()
        if name:
            self._say(f"{name} ...")


@contextmanager
def show_stages(config: TrackingConfig, say: Callable[[str], None]) -> Iterator[None]:
    """Show the stages of the start within the block, as the recipe's console does."""
    if not shows_progress(config):
        yield
    elif console_kind(config, sys.stdout) != "rich":
        with observe_stages(StageLines(say)):
            yield
    else:
        with (
            # The line that is opened here becomes that of the run's console, and is closed with the block.
            closing(BottomLine(sys.stdout, StageLine("starting"))) as line,
            observe_stages(lambda name: _show_stage(line, name)),
        ):
            yield


def _show_stage(line: BottomLine, name: str) -> None:
    if name and isinstance(line.shown, StageLine):  # the console of a run shows its stages itself
        line.show(StageLine(name))


class StepLine:
    """A line of a run in a Python program, written again after its steps: on a terminal, or in a notebook."""

    def __init__(self, stream: TextIO, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._total, self._clock = stream, total, clock
        self._eta, self._shown_at, self._columns = Eta(total, clock), -math.inf, 0

    @staticmethod
    def can_be_seen(stream: TextIO) -> bool:
        """Return True if somebody looks at a stream while it is written."""
        return type(stream).__module__.startswith("ipykernel") or draws_lines(stream)

    def show(self, step: int, loss: Callable[[], float], is_last: bool) -> None:
        eta, now = self._eta.mark(step), self._clock()
        if now - self._shown_at < _SECONDS_BETWEEN_STEPS and not is_last:
            return
        self._shown_at = now
        text = f"{progress_text(step, self._total, eta)}  loss {loss():.4f}"
        # Overwrites what the line had before, which may have been longer.
        self._stream.write(f"\r{text:<{self._columns}}" + ("\n" if is_last else ""))
        self._stream.flush()
        self._columns = len(text)


COUNTED = {"count words": "characters", "train tokenizer": "merges"}
"""Stages that do not report bytes, and what they count."""
_EARLY_MERGES = 150
"""Merge after which merges take half the time of the first ones, about. The most frequent pairs come first, and a merge
takes time in proportion to the places of its pair: of corpora of 1 to 10 MB and vocabularies of 2,000 to 16,000, 5 % of
the merges took 23 to 46 % of the time. So work is counted as the logarithm of the merges.
"""
_BATCHES = "micro-batches"

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_STEPS = 0.25
_BAR_COLUMNS = 20
_MB = 1e6

Progress = Callable[[str, int, int], None]
"""A ``ProgressCallback``: called with the stage, what is done of it, and the total; 0 for unknown."""


class DataProgress:
    """Present state of a preparation, or of other work; ``counts`` says what is counted, None for bytes of files."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, counts: str | None = None) -> None:
        self._clock, self._counts = clock, counts
        self._stage, self._done, self._total = "preparing data", 0, 0
        self._first, self._begin = 0, clock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage or (total and not self._total):
            # What was done before, by an interrupted preparation, does not count for the speed; nor does the time in
            # which the amount was unknown.
            self._stage, self._first, self._begin = stage, done, self._clock()
        self._done, self._total = done, total

    def render(self, width: int) -> str:
        share = self._done / self._total if self._total else 0.0
        seconds = self._clock() - self._begin
        if not self._total:
            return fit([Field(f"{spinner()} {self._stage}", 0), Field(f"{seconds:.0f} s", 1)], width)
        fields = [
            Field(f"{spinner()} {self._stage}", 0),
            Field(bar(share, _BAR_COLUMNS), 5, "32"),
            Field(f"{share:.1%}", 1),
            Field(self._amount(), 3),
            Field(self._speed(seconds), 4),
            Field(f"eta {self._left(seconds)}", 2),
        ]
        return fit(fields, width, colour=has_colour())

    def text(self) -> str:
        prefix = "" if self._counts else "prepare: "
        seconds = self._clock() - self._begin
        if not self._total:
            return f"{prefix}{self._stage}, {seconds:.0f} s so far"
        share = self._done / self._total
        return f"{prefix}{self._stage} {share:.0%}, {self._amount()}, eta {self._left(seconds)}"

    def _amount(self) -> str:
        if counted := self._counts or COUNTED.get(self._stage):
            return f"{self._done:,} of {self._total:,} {counted}"
        return f"{self._done / _MB:,.1f} of {self._total / _MB:,.1f} MB of files"

    def _speed(self, seconds: float) -> str:
        if self._counts or self._stage in COUNTED or self._done <= self._first or seconds <= 0:
            return ""
        return f"{(self._done - self._first) / seconds / _MB:,.1f} MB/s"

    def _left(self, seconds: float) -> str:
        if self._done - self._first < max(1, LEAST_SHARE * (self._total - self._first)):
            return "-"
        first, done, total = map(self._work, (self._first, self._done, self._total))
        return duration(seconds * (total - done) / (done - first))

    def _work(self, count: int) -> float:
        return math.log1p(count / _EARLY_MERGES) if COUNTED.get(self._stage) == "merges" else count


@contextmanager
def show_data_progress(stream: TextIO, say: Callable[[str], None]) -> Iterator[Progress]:
    """Show the progress of data preparation within the block: a line on a terminal, else lines through ``say``."""
    progress, line = DataProgress(), open_line()
    if line is not None:
        line.show(progress.render)
        yield progress
        line.show(StageLine("checking data"))
    else:
        with _shown(progress, stream, say) as report:
            yield report


def show_progress(stream: TextIO, say: Callable[[str], None]) -> AbstractContextManager[Progress]:
    """Show the progress of an evaluation within the block, whose reports count micro-batches."""
    progress = DataProgress(counts=_BATCHES)
    progress("starting", 0, 0)
    return _shown(progress, stream, say)


@contextmanager
def _shown(progress: DataProgress, stream: TextIO, say: Callable[[str], None]) -> Iterator[Progress]:
    if draws_lines(stream):
        with closing(BottomLine(stream, progress.render)):
            yield progress
    else:
        yield _printing(progress, say)


def _printing(progress: DataProgress, say: Callable[[str], None]) -> Progress:
    said_at = time.monotonic()

    def report(stage: str, done: int, total: int) -> None:
        nonlocal said_at
        progress(stage, done, total)
        if time.monotonic() - said_at >= _SECONDS_BETWEEN_LINES:
            said_at = time.monotonic()
            say(progress.text())

    return report
