"""The one object that training tells; it passes everything on to whoever listens.

open_tracker(run_dir) -> Tracker -> metrics.jsonl, events.jsonl, tensorboard/, console
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from hlat.config.sections import TrackingConfig
from hlat.runtime import StorageError, redact
from hlat.tracking.console import Console, Silent, make_console
from hlat.tracking.eta import Eta
from hlat.tracking.events import EventLog
from hlat.tracking.metrics import Metrics, MetricsFile
from hlat.tracking.tensorboard import TensorBoard


class Tracker:
    """Tells files and the console about a run. A context manager; leaving it closes everything.

    A file that cannot be written raises StorageError, because a run without a record is worth little. A console that
    has gone away (a closed terminal, the end of ``| head``) is forgotten, and TensorBoard on a disk that refuses is
    told once and forgotten: they must not end the run.
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
    ) -> None:
        self._metrics, self._events, self._tensorboard, self._console = metrics, events, tensorboard, console
        self._total_steps, self._clock = total_steps, clock
        self._eta = Eta(total_steps, clock)

    def log(self, metrics: Metrics) -> None:
        """Record one step; see ``Metrics`` for its keys."""
        self._metrics.append(metrics)
        self._plot(lambda plots: plots.log(metrics))
        eta = self._eta.mark(metrics["step"])
        self._show(lambda console: console.log(metrics, self._total_steps, eta))

    def lacks(self, step: int) -> bool:
        """Whether the record that was opened ends before a step."""
        return self._metrics.last < step

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record that something happened to the run; it and all metrics before it now survive a power cut."""
        self._metrics.sync()
        self._events.append(kind, **fields)

    def rewind(self, step: int) -> None:
        """Drop the metrics of every step after ``step``, which is done again. Events stay: they happened."""
        self._metrics.rewind(step)
        self._plot(lambda plots: plots.rewind(step))
        self._eta = Eta(self._total_steps, self._clock)

    def message(self, text: str) -> None:
        """Tell the person at the console; URLs without what they may open."""
        self._show(lambda console: console.message(redact(text)))

    def close(self) -> None:
        """Close everything, even if closing one of them fails."""
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
            self.without_plots(str(error))

    def without_plots(self, why: str) -> None:
        """Tell that TensorBoard is written no more, and why. A disk that refuses that too is left to the metrics."""
        with suppress(StorageError):
            self.event("tensorboard_dropped", message=why)
        self.message(f"going on without TensorBoard, metrics.jsonl has every number: {why}")

    def _show(self, show: Callable[[Console], None]) -> None:
        try:
            show(self._console)
        except OSError:
            self._console = Silent()

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
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    stream: TextIO | None = None,
) -> Tracker:
    """Open the record of a run, to continue after ``start_step``.

    Args:
        run_dir: folder of the run, which exists.
        config: who listens, besides the two files.
        total_steps: steps of the whole run, for percent and time left.
        start_step: steps done so far; metrics of later steps are dropped from what is there.
        clock: seconds, monotonic, for the time left.
        wall_clock: seconds since 1970, for the time of events.
        stream: where the console writes; standard output if None.

    Raises:
        StorageError: a file cannot be opened or written; nothing stays open.
    """
    with ExitStack() as opened:
        metrics = MetricsFile(run_dir / "metrics.jsonl", start_step=start_step)
        opened.callback(metrics.close)
        events = EventLog(run_dir / "events.jsonl", wall_clock)
        opened.callback(events.close)
        tensorboard, refusal = None, ""
        if config.tensorboard:
            try:
                tensorboard = TensorBoard(run_dir / "tensorboard", start_step=start_step)
                opened.callback(tensorboard.close)
            except StorageError as error:
                refusal = str(error)
        if metrics.unreadable:
            events.append("metrics_damaged", lines=metrics.unreadable)
        console = make_console(config, stream, total_steps=total_steps, start_step=start_step)
        opened.pop_all()
    tracker = Tracker(metrics, events, tensorboard, console, total_steps=total_steps, clock=clock)
    if metrics.unreadable:
        tracker.message(f"{run_dir / 'metrics.jsonl'}: {metrics.unreadable} damaged lines were dropped")
    if refusal:
        tracker.without_plots(refusal)
    return tracker
