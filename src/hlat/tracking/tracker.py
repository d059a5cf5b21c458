"""Tracker: receives the metrics, events and messages of a run, and forwards them to files and the console.

open_tracker(run_dir) -> Tracker -> metrics.jsonl, events.jsonl, tensorboard/, console
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from hlat.config import BatchSchedule
from hlat.config.sections import TrackingConfig
from hlat.runtime import StorageError, redact
from hlat.tracking.console import Console, SilentConsole, make_console
from hlat.tracking.eta import EQUAL_STEPS, Eta
from hlat.tracking.events import EventLog
from hlat.tracking.metrics import Metrics, MetricsFile
from hlat.tracking.tensorboard import TensorBoard


class Tracker:
    """Recorder of a run's metrics, events and messages. A context manager; leaving it closes everything.

    If metrics.jsonl or events.jsonl cannot be written, StorageError is raised, because a run without a record is worth
    little. A console that is gone (a closed terminal, the end of ``| head``) is dropped, and so is TensorBoard if its
    files cannot be written, with one message: these must not end the run.
    """

    def __init__(
        self,
        metrics: MetricsFile,
        events: EventLog,
        tensorboard: TensorBoard | None,
        console: Console,
        *,
        total_steps: int,
        clock: Callable[[], float],
        batches: BatchSchedule,
    ) -> None:
        self._metrics, self._events, self._tensorboard, self._console = metrics, events, tensorboard, console
        self._total_steps = total_steps
        self._new_eta = partial(Eta, total_steps, clock, batches)
        self._eta = self._new_eta()

    def log(self, metrics: Metrics) -> None:
        """Record the metrics of a step; see ``Metrics`` for the keys."""
        self._metrics.append(metrics)
        self._plot(lambda plots: plots.log(metrics))
        eta = self._eta.mark(metrics["step"])
        self._show(lambda console: console.log(metrics, self._total_steps, eta))

    def ends_before(self, step: int) -> bool:
        """Return True if the last line of metrics is of an earlier step."""
        return self._metrics.last < step

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record an event; it and all metrics before it survive a power failure when this returns."""
        self._metrics.sync()
        self._events.append(kind, **fields)

    def rewind(self, step: int) -> None:
        """Drop the metrics of all steps after ``step``, which will be repeated. Events stay: they happened."""
        self._metrics.rewind(step)
        self._plot(lambda plots: plots.rewind(step))
        self._eta = self._new_eta()

    def message(self, text: str) -> None:
        """Show a message on the console, without credentials in URLs."""
        self._show(lambda console: console.message(redact(text)))

    def close(self) -> None:
        """Close all outputs, even if closing one of them fails."""
        with ExitStack() as stack:
            stack.callback(self._metrics.close)
            stack.callback(self._events.close)
            if self._tensorboard is not None:
                stack.callback(self._tensorboard.close)
            stack.callback(self._show, lambda console: console.close())

    def _plot(self, plot: Callable[[TensorBoard], None]) -> None:
        if self._tensorboard is None:
            return
        try:
            plot(self._tensorboard)
        except StorageError as error:
            self._tensorboard.close()
            self._tensorboard = None
            self.drop_tensorboard(str(error))

    def drop_tensorboard(self, why: str) -> None:
        """Report that TensorBoard files are no longer written, and why; a failing disk is reported by ``log``."""
        with suppress(StorageError):
            self.event("tensorboard_dropped", message=why)
        self.message(f"continuing without TensorBoard, metrics.jsonl has all values: {why}")

    def _show(self, show: Callable[[Console], None]) -> None:
        try:
            show(self._console)
        except OSError:
            self._console = SilentConsole()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_tracker(
    run_dir: Path,
    config: TrackingConfig,
    *,
    total_steps: int,
    start_step: int,
    batches: BatchSchedule = EQUAL_STEPS,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    stream: TextIO | None = None,
) -> Tracker:
    """Open the outputs of a run, to continue after ``start_step``.

    Args:
        run_dir: existing folder of the run.
        config: console and TensorBoard settings.
        total_steps: number of steps of the run, for percentage and time left.
        start_step: steps done so far; metrics of later steps are dropped from the file.
        batches: batches of the steps, for the time left; by default all steps are equal.
        clock: seconds, monotonic, for the time left.
        wall_clock: seconds since 1970, for the time of events.
        stream: output of the console; standard output if None.

    Raises:
        StorageError: a file cannot be opened or written; no file stays open.
    """
    with ExitStack() as opened:
        metrics = MetricsFile(run_dir / "metrics.jsonl", start_step=start_step)
        opened.callback(metrics.close)
        events = EventLog(run_dir / "events.jsonl", wall_clock)
        opened.callback(events.close)
        tensorboard, tensorboard_error = None, ""
        if config.tensorboard:
            try:
                tensorboard = TensorBoard(run_dir / "tensorboard", start_step=start_step)
                opened.callback(tensorboard.close)
            except StorageError as error:
                tensorboard_error = str(error)
        if metrics.unreadable:
            events.append("metrics_damaged", lines=metrics.unreadable)
        console = make_console(config, stream, total_steps=total_steps, start_step=start_step)
        opened.pop_all()
    tracker = Tracker(metrics, events, tensorboard, console, total_steps=total_steps, clock=clock, batches=batches)
    if metrics.unreadable:
        tracker.message(f"{run_dir / 'metrics.jsonl'}: {metrics.unreadable} damaged lines were dropped")
    if tensorboard_error:
        tracker.drop_tensorboard(tensorboard_error)
    return tracker
