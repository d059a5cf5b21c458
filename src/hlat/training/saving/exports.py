"""Hugging Face weights beside the checkpoints of a run (``checkpoint.export``).

    a checkpoint at a multiple of every_steps is durable --> export_hf, in a helper process --> run/exports/step-N
        its end, or its error --after a later step--> event ``export`` or ``export_failed``

The process reads the checkpoint from disk, so it shares nothing with the run: if it fails, hangs or is killed, training
does not notice. There is one at a time; others wait for it.
"""

import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hlat.checkpoint import export_hf, step_folder_name
from hlat.runtime.errors import HlatError, StorageError
from hlat.runtime.helper_process import Channel, HelperProcess, PeerEnded, start_program
from hlat.runtime.progress import enter_phase
from hlat.tracking import OtherRankTracker, Tracker
from hlat.training.components import LoopStart, StepEnd, StepResult, TrainingComponent
from hlat.training.run_state import RunState, SavedCheckpoint

_LINGER_SECONDS = 600.0  # that the end of a run waits for exports; then they go on by themselves
_POLL_SECONDS = 0.1
_NICENESS = 10  # training has the processors first


def export_checkpoint(channel: Channel, checkpoint: Path, target: Path, dtype: str | None, weights: str) -> None:
    """Export a checkpoint; the work of the helper process."""
    del channel  # its end says enough
    export_hf(checkpoint, target, dtype=dtype, weights=weights)


def start_export(checkpoint: Path, target: Path, dtype: str | None, weights: str) -> HelperProcess:
    """Start ``export_checkpoint``, which goes on if this process ends; raises OSError if no process can be started."""
    return start_program(
        f"{__name__}:{export_checkpoint.__name__}",
        *(checkpoint, target, dtype, weights),
        name="the export",
        linger=None,
        niceness=_NICENESS,
        output=subprocess.DEVNULL,  # its error comes through the channel
    )


class WeightExports(TrainingComponent):
    """Exports checkpoints of a run, if its recipe has ``checkpoint.export``; on rank 0 only."""

    def __init__(
        self,
        state: RunState,
        tracker: Tracker | OtherRankTracker,
        start: Callable[[Path, Path, str | None, str], HelperProcess] = start_export,
        linger_seconds: float = _LINGER_SECONDS,
    ) -> None:
        self._state, self._tracker, self._start, self._linger = state, tracker, start, linger_seconds
        self._config = state.recipe.checkpoint.export if state.runtime.ranks.is_first else None
        self._waiting: deque[SavedCheckpoint] = deque()
        self._running: tuple[SavedCheckpoint, HelperProcess, float] | None = None
        self._seen = -1  # step of the newest checkpoint that was considered
        self._written: set[Path] = set()  # exports of this process

    def begin(self, start: LoopStart) -> None:
        saved = self._state.saved
        # Without its export, the checkpoint that the run resumes from is exported now: the export may have been cut
        # off.
        if saved is not None and self._config is not None and self._target(saved).exists():
            self._seen = saved.step
        self._advance()

    def after_step(self, end: StepEnd) -> None:
        self._advance()

    def after_rollback(self, step: int) -> None:
        # Undone steps are saved again with other weights, and exported again in place of the old ones.
        self._seen = min(self._seen, step)
        self._waiting = deque(saved for saved in self._waiting if saved.step <= step)

    def at_end(self, result: StepResult | None) -> None:
        self._advance()
        deadline = time.monotonic() + self._linger
        while self._running is not None and time.monotonic() < deadline:
            enter_phase("end")  # a phase without time limit
            time.sleep(_POLL_SECONDS)
            self._advance()
        left = [] if self._running is None else [self._running[0]]
        for saved in (*left, *self._waiting):
            self._fail(saved, f"it was not done {self._linger:g} s after the last step")

    def _advance(self) -> None:
        if self._config is None:
            return
        saved = self._state.saved
        if saved is not None and saved.step > self._seen:
            self._seen = saved.step
            if saved.step % self._config.every_steps == 0:
                self._waiting.append(saved)
        self._receive()
        while self._running is None and self._waiting:
            self._begin_export(self._waiting.popleft(), self._config.dtype, self._config.weights)

    def _begin_export(self, saved: SavedCheckpoint, dtype: str | None, weights: str) -> None:
        target = self._target(saved)
        if self._is_own(target):  # of weights that a rollback undid: left there, they would pass for these
            shutil.rmtree(target, ignore_errors=True)
        try:
            self._running = saved, self._start(saved.path, target, dtype, weights), time.monotonic()
        except OSError as error:
            self._fail(saved, f"no process can be started: {error.strerror}")

    def _is_own(self, target: Path) -> bool:
        # In the run's own folder all exports are the run's; elsewhere only those that this process wrote.
        return target in self._written or (self._config is not None and self._config.dir is None)

    def _receive(self) -> None:
        if self._running is None:
            return
        (saved, process, begin), problem = self._running, ""
        try:
            process.receive(0.0)
            return
        except PeerEnded as end:
            problem = str(end) if end.code else ""
        except HlatError as error:
            problem = str(error)
        except RuntimeError as error:  # a traceback, which ends with the error
            problem = str(error).strip().splitlines()[-1]
        self._running = None
        if problem:
            self._fail(saved, problem)
            return
        target = self._target(saved)
        self._written.add(target)
        with suppress(StorageError):
            self._tracker.event("export", step=saved.step, path=str(target), seconds=time.monotonic() - begin)

    def _fail(self, saved: SavedCheckpoint, message: str) -> None:
        with suppress(StorageError):  # the disk that failed the export may fail the event too
            self._tracker.event("export_failed", step=saved.step, message=message)
        self._tracker.warn(f"the export of step {saved.step} failed, training continues: {message}")

    def _target(self, saved: SavedCheckpoint) -> Path:
        recipe = self._state.recipe
        folder = recipe.checkpoint.export.dir if recipe.checkpoint.export is not None else None
        return (Path(folder) if folder is not None else recipe.run_dir / "exports") / step_folder_name(saved.step)
