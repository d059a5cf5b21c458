"""Tracker: receives the metrics, events and messages of a run, and forwards them to files and the console.

open_tracker(run_dir) -> Tracker -> metrics.jsonl, events.jsonl, console with the time left (Eta)
-> outputs: TensorBoard, hosted trackers
other ranks: OtherRankTracker -> messages in the rank's log; only rank 0 writes metrics and events
in a Python program: console --write--> LogStream --lines--> logging, logger "hlat", level INFO
"""

import io
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, TextIO

from hlat.config import BatchSchedule, TrackingConfig
from hlat.runtime.errors import StorageError
from hlat.runtime.process import lost_output
from hlat.runtime.progress import observe_phases
from hlat.runtime.terminal import escape_controls, plural
from hlat.runtime.urls import redact, redact_json
from hlat.tracking.console import Console, make_console
from hlat.tracking.hosted import HostedRun, HostedTracker, check_installed, own_trackers, wanted
from hlat.tracking.records import EventLog, Metrics, MetricsFile, MetricsOutput, moved_note
from hlat.tracking.tensorboard import TensorBoard

_WINDOW = 200  # marks, one a step; only recent ones count, because a run may slow down or speed up
EQUAL_STEPS = BatchSchedule(1)
"""Steps of one sample each, if the sizes of batches do not matter."""


_BREAKS = {"evaluation": "validation", "checkpoint": "saving", "saving": "saving"}
"""Phases between steps, and what a person is told of them."""
LAST_SAVE = "last save"  # nothing hides its time, as steps hide that of earlier ones

Breaks = Mapping[str, Callable[[int], int]]
"""How many breaks of each kind (a value of ``_BREAKS``, or ``LAST_SAVE``) come after a step."""

_RECENT = 10  # steps whose speed is shown


class Eta:
    """Estimator of the time left: steps to come at their recent pace, and breaks to come, each as long as the last."""

    def __init__(
        self,
        total_steps: int,
        clock: Callable[[], float],
        batches: BatchSchedule = EQUAL_STEPS,
        breaks: Breaks | None = None,
    ) -> None:
        self.total_steps, self._batches, self._clock = total_steps, batches, clock
        self._to_come = breaks or {}
        self._phase, self._since = "", clock()
        self._paused = 0.0  # seconds of all breaks so far
        self._open = defaultdict[str, float](float)  # seconds of the present break, by kind
        self.lasted: dict[str, float] = {}  # seconds of the last break, by kind
        self.restart()

    def restart(self) -> None:
        """Forget the pace, of steps that are undone or of another process."""
        # The first mark comes after the first step, which compiles, allocates and warms caches.
        self._marks: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._recent: deque[tuple[int, float]] = deque([(0, self._stepping())], maxlen=_RECENT + 1)

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before: the time of breaks is no time of steps."""
        now, kind = self._clock(), _BREAKS.get(self._phase)
        if kind is not None:
            self._paused += now - self._since
            self._open[kind] += now - self._since
        self._phase, self._since = phase, now

    def _stepping(self) -> float:
        return self._clock() - self._paused

    def speed(self, tokens: int) -> float:
        """Record that a step of so many tokens is done now; return the tokens per second of recent steps."""
        if len(self._recent) == 2 and not self._recent[0][0]:
            self._recent.popleft()  # the first step is slow, and counts only while there is no other
        self._recent.append((tokens, self._stepping()))
        (_, begin), *rest = self._recent
        return sum(count for count, _ in rest) / max(self._recent[-1][1] - begin, 1e-9)

    def mark(self, step: int) -> float | None:
        """Record that ``step`` is done now; return the seconds left, or None while there is only one mark."""
        if not self._marks or step > self._marks[-1][0]:
            self._marks.append((step, self._stepping()))
            self.lasted |= self._open
            self._open.clear()
        (first_step, first_time), (_, now) = self._marks[0], self._marks[-1]
        if step >= self.total_steps:
            return 0.0
        if step <= first_step:
            return None
        # A step is assumed to take time in proportion to its samples.
        first, last, end = map(self._batches.first_of, (first_step, step, self.total_steps))
        breaks = sum(count(step) * self.lasted.get(kind, 0.0) for kind, count in self._to_come.items())
        return (end - last) * (now - first_time) / (last - first) + breaks


class LogStream(io.TextIOBase):
    """Stream that logs each line that is written to it."""

    encoding = "utf-8"

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.info("%s", line)
        return len(text)

    def close(self) -> None:
        if not self.closed and self._rest:
            self.write("\n")
        super().close()

    def writable(self) -> bool:
        return True


class OtherRankTracker:
    """Stand-in for ``Tracker`` on other ranks: it prints messages to standard output, and ignores all else."""

    def log(self, metrics: Metrics) -> None:
        """Ignored: rank 0 records the metrics."""

    def step_done(self, step: int, loss: float, tokens: int) -> None:
        """Ignored: rank 0 shows the step."""

    def progress(self, work: str, done: int, total: int) -> None:
        """Ignored: rank 0 shows the progress."""

    def event(self, kind: str, /, **fields: Any) -> None:
        """Ignored: rank 0 records the event."""

    def rewind(self, step: int) -> None:
        """Ignored: rank 0 rewinds the metrics."""

    def message(self, text: str, **values: Any) -> None:
        print(escape_controls(redact(text)), flush=True)  # noqa: T201  (this rank's standard output is its log)

    def warn(self, text: str) -> None:
        self.message(f"warning: {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no file is open."""


class Tracker:
    """Recorder of a run's metrics, events and messages. A context manager; leaving it closes everything.

    If metrics.jsonl or events.jsonl cannot be written, StorageError is raised: a run without a record is worth little.
    A console that is gone, TensorBoard and hosted trackers must not end the run: they are dropped, with one message.
    """

    def __init__(
        self,
        metrics: MetricsFile,
        events: EventLog,
        outputs: Sequence[MetricsOutput],
        console: Console,
        eta: Eta,
    ) -> None:
        self._metrics, self._events, self._outputs, self._console = metrics, events, list(outputs), console
        self._eta = eta
        self._lost = 0  # lines of output that are known to be lost
        self._break = ""  # the break that is shown
        self._observing = ExitStack()
        self._observing.enter_context(observe_phases(self._enter_phase))

    def log(self, metrics: Metrics) -> None:
        """Record the metrics of a step; see ``Metrics`` for the keys."""
        self._metrics.append(metrics)
        self._report_moved_files()
        self._feed(lambda output: output.log(metrics))
        eta = self._eta.mark(metrics["step"])
        self._show(lambda console: console.log(metrics, self._eta.total_steps, eta))

    def step_done(self, step: int, loss: float, tokens: int) -> None:
        """Show that a step of so many tokens is done, logged or not, and the time left."""
        eta = self._eta.mark(step)
        shown = {"step": step, "loss": loss, "tokens_per_second": self._eta.speed(tokens)}
        self._show(lambda console: console.step(shown, self._eta.total_steps, eta))

    def progress(self, work: str, done: int, total: int) -> None:
        """Show how far work between steps is, such as a validation."""
        self._show(lambda console: console.pause(work, share=done / total))

    def _enter_phase(self, phase: str) -> None:
        self._eta.enter(phase)
        found = _BREAKS.get(phase, "")
        if found != self._break:
            self._break = found
            seconds = self._eta.lasted.get(LAST_SAVE if found == "saving" else found)
            self._show(lambda console: console.pause(found, seconds=seconds))

    def ends_before(self, step: int) -> bool:
        """Return True if the last line of metrics is of an earlier step."""
        return self._metrics.last < step

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record an event; it and all metrics before it survive a power failure when this returns."""
        # An event says that something has happened to the steps before it: their lines have to be there.
        self._metrics.sync()
        self._events.append(kind, **fields)
        if kind == "checkpoint":
            self._eta.lasted[LAST_SAVE] = fields.get("seconds", 0.0)
        self._show(lambda console: console.event(kind, fields))
        self._report_moved_files()

    def _report_moved_files(self) -> None:
        for name, file in (("metrics.jsonl", self._metrics), ("events.jsonl", self._events)):
            if move := file.last_move():
                note = moved_note(name, move)
                self.event(note.kind, **note.fields)
                self.message(note.text)

    def rewind(self, step: int) -> None:
        """Drop the metrics of all steps after ``step``, which will be repeated. Events stay: they happened."""
        self._metrics.rewind(step)
        self._feed(lambda output: output.rewind(step))
        self._eta.restart()

    def message(self, text: str, **values: Any) -> None:
        """Show a message on the console, without credentials in URLs; ``values`` are what it says, for programs."""
        self._show(lambda console: console.message(redact(text), values))

    def warn(self, text: str) -> None:
        """Show a warning on the console, as ``message`` does; consoles that show warnings only show it too."""
        self._show(lambda console: console.warning(redact(text)))

    def close(self, failed: bool = False) -> None:
        """Close all outputs, even if closing one of them fails; ``failed`` waits for no hosted tracker."""
        with ExitStack() as stack:
            stack.callback(self._observing.close)
            stack.callback(self._metrics.close)
            stack.callback(self._events.close)
            stack.callback(self._record_lost_output)
            stack.callback(self._show, lambda console: console.close())
            for output in self._outputs:
                stack.callback(self._close_output, output, failed)

    def _close_output(self, output: MetricsOutput, failed: bool) -> None:
        output.close(failed)
        self._report(output)

    def _feed(self, action: Callable[[MetricsOutput], None]) -> None:
        for output in list(self._outputs):
            try:
                action(output)
            except StorageError as error:
                output.close()
                self._outputs.remove(output)
                self.drop_tensorboard(str(error))
            self._report(output)

    def _report(self, output: MetricsOutput) -> None:
        for note in output.notes():
            with suppress(StorageError):  # a failing disk is reported by ``log``
                self.event(note.kind, **note.fields)
            self.message(note.text)

    def drop_tensorboard(self, why: str) -> None:
        """Report that TensorBoard files are no longer written, and why; a failing disk is reported by ``log``."""
        with suppress(StorageError):
            self.event("tensorboard_dropped", message=why)
        self.message(f"continuing without TensorBoard, metrics.jsonl has all values: {why}")

    def _show(self, show: Callable[[Console], None]) -> None:
        try:
            show(self._console)
        except OSError:
            self._console = Console()
        if self._lost == 0:
            self._record_lost_output()

    def _record_lost_output(self) -> None:
        lines, why = lost_output()
        if lines != self._lost:
            self._lost = lines
            with suppress(StorageError):  # a failing disk is reported by ``log``
                self._events.append("output_lost", lines=lines, why=why)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)


def open_tracker(
    run_dir: Path,
    config: TrackingConfig,
    *,
    total_steps: int,
    start_step: int,
    batches: BatchSchedule = EQUAL_STEPS,
    breaks: Breaks | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    stream: TextIO | None = None,
    name: str = "run",
    recipe: Mapping[str, Any] | None = None,
) -> Tracker:
    """Open the outputs of a run, in its existing folder, to continue after ``start_step``.

    ``clock`` and ``breaks`` are for the time left, ``wall_clock`` (seconds since 1970) for the time of events; ``name``
    and ``recipe`` (JSON values) are for hosted trackers.

    Raises:
        LaunchError: the package of a hosted tracker is not installed.
        StorageError: a file cannot be opened or written; no file stays open.
    """
    check_installed(config)
    with ExitStack() as opened:
        metrics = MetricsFile(run_dir / "metrics.jsonl", start_step=start_step)
        opened.callback(metrics.close)
        events = EventLog(run_dir / "events.jsonl", wall_clock)
        opened.callback(events.close)
        outputs: list[MetricsOutput] = []
        tensorboard_error = ""
        if config.tensorboard:
            try:
                tensorboard = TensorBoard(run_dir / "tensorboard", start_step=start_step)
                opened.callback(tensorboard.close)
                outputs.append(tensorboard)
            except StorageError as error:
                tensorboard_error = str(error)
        if metrics.unreadable:
            events.append("metrics_damaged", lines=metrics.unreadable)
        console = make_console(config, stream, total_steps=total_steps, start_step=start_step)
        for field, settings in (wanted(config) | own_trackers(config)).items():
            run = HostedRun(name, run_dir, redact_json(recipe or {}), settings)
            outputs.append(HostedTracker(field, run, config.flush_seconds))
        # Nothing is left that can fail: from here on the tracker closes what was opened.
        opened.pop_all()
    eta = Eta(total_steps, clock, batches, breaks)
    tracker = Tracker(metrics, events, outputs, console, eta)
    if metrics.unreadable:
        tracker.message(f"{run_dir / 'metrics.jsonl'}: dropped {plural(metrics.unreadable, 'damaged line')}")
    if tensorboard_error:
        tracker.drop_tensorboard(tensorboard_error)
    return tracker
