"""Interruptions of the steps: a stop that is requested, a deadline, a snapshot that is due, a device out of memory.

    SIGINT, SIGTERM, SIGHUP, SIGUSR1, deadline --> stop request --vote of all ranks--> step after which all ranks stop
    recovery.deadline_seconds, counted by the supervisor --HLAT_DEADLINE--> deadline
    end of the Slurm job --SLURM_JOB_END_TIME, squeue--> deadline, minus the time that a save takes

    before a step   rank 0's clock, busy savers --asynchronous vote--> after the step, on all ranks: snapshot due or not
    TierEvent       --report_tier_notes--> events, and messages for the user

    torch.OutOfMemoryError --> peaks of the allocator, bytes as plans count them, changes that fit --> DeviceMemoryError

The first signal requests a stop after the current step, the second stops at once. A signal may reach a single rank, or
each rank in a different step, and clocks differ. So all ranks vote in every step and stop after the same one.

The deadline leaves time to save and stop before the scheduler ends the job. Time is counted on a monotonic clock, so
setting the system clock during training changes nothing. The time of day is read once, to convert the end time that
Slurm reports.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

import torch

from hlat.checkpoint import TierEvent
from hlat.config import Recipe, RecoveryConfig
from hlat.runtime import errors, slurm
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.host_collectives import AsyncMax, HostGroup
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import DeviceMemoryError, HlatError, StorageError
from hlat.runtime.process import DEADLINE_ENV, STOP_SIGNALS, interrupt
from hlat.runtime.progress import machine_clock
from hlat.runtime.storage.run_folder import EARLIER_ATTEMPT_ENV
from hlat.runtime.terminal import plural
from hlat.tracking import OtherRankTracker, Tracker

_DEADLINE_VOTE = 1 << 16  # value of the deadline in the vote; the other values are signal numbers

# A scheduler signals every process of a job: a rank receives the signal itself, and again forwarded by its launcher.
_SAME_REQUEST = 1.0  # seconds within which further signals count as the first one


class StopRequest:
    """Context manager in which stop signals set ``signal`` instead of ending the process; ignored signals stay ignored.

    A second signal raises KeyboardInterrupt wherever the program is but in an import, as ``interrupt`` does.
    ``on_request`` gets the name of the first one; ``is_over`` is True once the deadline has passed.
    """

    def __init__(
        self,
        ranks: HostGroup,
        on_request: Callable[[str], None],
        is_over: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.signal: signal.Signals | None = None
        self._goes_on = False  # what comes after the block is part of the run
        self._is_over = is_over
        self._on_request = on_request
        self._alone = ranks.world == 1
        self._clock, self._at = clock, 0.0
        self._vote = AsyncMax(ranks)
        self._previous: dict[signal.Signals, signal.Handlers | Callable[..., object] | int | None] = {}

    def start_vote(self) -> None:
        """Start the vote of all ranks on stopping, before a step. Does not wait."""
        if not self._alone:
            self._vote.start(self._request())

    def vote_result(self) -> str | None:
        """Return a signal's name, ``deadline``, or None to continue, after the step: the same on every rank.

        With several ranks, a signal that arrives during the step counts after the next one.
        """
        number = self._request() if self._alone else self._vote.result()
        if number == _DEADLINE_VOTE:
            return "deadline"
        return signal.Signals(number).name if number else None

    def late_vote(self) -> str | None:
        """Vote once more where the run goes on after this block: on signals during its last step and save.

        A signal that comes still later is delivered again after the block.
        """
        self.start_vote()
        result = self.vote_result()
        self._goes_on = result is None
        return result

    def _request(self) -> int:
        if self.signal is not None:
            return self.signal
        return _DEADLINE_VOTE if self._is_over() else 0

    def __enter__(self) -> "StopRequest":
        # Python delivers signals to the main thread only, and lets no other one set handlers.
        if threading.current_thread() is threading.main_thread():
            # Ignored signals stay ignored: nohup ignores SIGHUP, a shell's background job SIGINT.
            handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._receive) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._goes_on and self.signal is not None:
            signal.raise_signal(self.signal)  # it came after the last vote

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if self._clock() - self._at < _SAME_REQUEST:
                return
            interrupt(number, frame)
            return
        self._at = self._clock()
        self.signal = signal.Signals(number)
        self._on_request(self.signal.name)


_MIN_MARGIN = 60.0  # seconds left for the last save, at least
_SAVE_FACTOR = 2.0  # the margin as a multiple of the longest save so far


class Deadline:
    """Time to save and stop; ``longest_save`` returns the seconds of the longest save so far."""

    def __init__(
        self,
        recovery: RecoveryConfig,
        longest_save: Callable[[], float],
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = machine_clock,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self._longest_save, self._clock = longest_save, clock
        # The supervisor counts from the first attempt on; this process may be a later one.
        self._deadline = float(environment[DEADLINE_ENV]) if DEADLINE_ENV in environment else None
        if self._deadline is None and recovery.deadline_seconds is not None:  # no supervisor
            self._deadline = clock() + recovery.deadline_seconds
        end_of_job = slurm.job_end_time(environment)
        self._end_of_job = None if end_of_job is None else clock() + (end_of_job - time_of_day())

    @property
    def has_passed(self) -> bool:
        now = self._clock()
        if self._deadline is not None and now >= self._deadline:
            return True
        if self._end_of_job is None:
            return False
        # A multiple of the longest save so far, because the next one may take longer.
        return now >= self._end_of_job - max(_MIN_MARGIN, _SAVE_FACTOR * self._longest_save())


_SNAPSHOT_DUE, _SAVER_BUSY = 1, 2  # the vote is a maximum: a busy rank overrules


class SnapshotClock:
    """Timer of snapshots: rank 0's clock decides for all ranks. ``every`` is None for no snapshots."""

    def __init__(self, every: float | None, ranks: HostGroup, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._first, self._clock = every, ranks.is_first, clock
        self._vote, self._vote_open = AsyncMax(ranks), False
        self._last = clock()

    def start_vote(self, busy: bool) -> None:
        """Start the vote on a snapshot, before a step; ``busy`` is True if this rank's saver is. Does not wait."""
        if self._every is None:
            return
        self.is_due()  # completes the vote of a step that was rolled back
        due = self._first and self._clock() - self._last >= self._every
        self._vote.start(_SAVER_BUSY if busy else _SNAPSHOT_DUE if due else 0)
        self._vote_open = True

    def is_due(self) -> bool:
        """Return True, after the step, if a snapshot is due and no rank was busy. The same on every rank."""
        is_open, self._vote_open = self._vote_open, False
        return is_open and self._vote.result() == _SNAPSHOT_DUE

    def restart(self) -> None:
        self._last = self._clock()


def report_tier_notes(notes: Iterable[TierEvent], tracker: Tracker | OtherRankTracker) -> None:
    """Record snapshots and object-store uploads, and what went wrong with them."""
    for note in notes:
        with suppress(StorageError):  # a full disk must not end a run whose object store works
            tracker.event(note.kind, step=note.step, message=note.message, seconds=note.seconds)
        if note.kind == "remote_failed":
            which = "" if note.step is None else f" of step {note.step}"
            tracker.warn(f"no copy of the checkpoint{which} in the object store: {note.message}")
        elif note.kind != "remote":
            tracker.message(note.message)


@contextmanager
def explained_out_of_memory(recipe: Recipe, runtime: Runtime, steps: Callable[[], int]) -> Iterator[None]:
    """Raise DeviceMemoryError in place of torch's error: it says what the rank held and which changes would fit.

    ``steps`` returns the steps that this process has done. In the first one a restart would fail in the same way.
    """
    try:
        yield
    except Exception as raised:
        error = next((each for each in errors.causes(raised) if isinstance(each, torch.OutOfMemoryError)), None)
        if error is None:
            raise
        done = steps()
        explained = DeviceMemoryError(
            f"rank {runtime.rank} ran out of memory on {backend_of(runtime.device).describe(runtime.device)}"
            f"{' after ' + plural(done, 'step') if done else ''}: {_memory_request(error)}. {_memory_held(runtime)} "
            f"{_memory_advice(recipe, runtime)}"
        )
        # Processes of an earlier attempt may still hold memory.
        explained.retryable = done > 0 or EARLIER_ATTEMPT_ENV in os.environ
        raise explained from raised


def _memory_request(error: torch.OutOfMemoryError) -> str:
    # The first two sentences say what was asked for; the rest is torch's advice on its allocator.
    return ". ".join(str(error).partition("\n")[0].split(". ")[:2]).rstrip(".")


def _memory_held(runtime: Runtime) -> str:
    backend, device = backend_of(runtime.device), runtime.device
    text = f"Its tensors took {_gib(backend.peak_memory_bytes(device))} at most"
    use = backend.allocator_use(device)
    if use is not None:
        text += f"; the allocator had reserved {_gib(use.reserved)}, and gave memory back {use.retries} times"
    return f"{text}; the device has {_gib(backend.memory_bytes(device))}."


def _memory_advice(recipe: Recipe, runtime: Runtime) -> str:
    from hlat.planner import fit_here  # noqa: PLC0415 - only where memory is short

    fit = None
    with suppress(HlatError):  # a recipe that plans do not cover
        fit = fit_here(recipe, runtime.world, runtime.device)
    if fit is None:
        return "Use a smaller batch.micro_batch, or more devices."
    needed = fit.ranks[runtime.rank // (runtime.world // recipe.parallel.pipeline)]
    purposes = {
        "parameters": needed.parameters,
        "optimizer": needed.optimizer,
        "gradients": needed.gradients,
        "activations": needed.activations,
        "temporary tensors": needed.recomputing + needed.logits + needed.working + needed.buffers,
        "the device's runtime and allocator": needed.runtime + needed.slack,
    }
    parts = ", ".join(f"{name} {_gib(each)}" for name, each in purposes.items() if each)
    counted = f"Plans count {_gib(needed.total)} for this rank: {parts}."
    if needed.total <= fit.usable:
        return f"{counted} That fits: look for other programs on the device, or for gaps between reserved and taken."
    return f"{counted} {fit.remedy}"


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
