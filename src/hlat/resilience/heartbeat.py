"""Heartbeats: what each rank is doing, in a small file that whoever started it reads at any moment.

    computing thread --phases, steps, saves--> rank-00000 (mapped) --read_beat--> Reading --> watchdog, goodput
    sampling thread  --alive, waiting, where-->

A rank writes into memory, so that it costs microseconds and waits for nobody; what is there stays readable when it
hangs or has been killed. Times are those of the monotonic clock, which all processes of a machine share. Without
HLAT_BEATS, the folder of these files, nothing is written.
"""

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hlat.resilience.stack_dumps import stacks_on_demand, stacks_path
from hlat.resilience.stack_sampler import sampled
from hlat.runtime.process import PHASES, current_phase, observe_phases

BEATS = "HLAT_BEATS"
"""The environment variable that names the folder."""

PRODUCTIVE = ("forward", "backward", "reduce", "optimizer", "device", "evaluation", "between")
"""The phases in which a run gets on; the others save, or wait for data."""

_FIELDS = ("version", "pid", "step", "phase", "since", "began", "first_step_at", "saved", "saved_seconds", "saver")
_SAMPLED = ("alive_at", "waiting")
_TABLES = ("seconds", "longest", "busy", "waited")
_TEXT = 256  # bytes
_PLACES = {name: place for place, name in enumerate((*_FIELDS, *_SAMPLED))}
_STARTS = {name: len(_PLACES) + number * len(PHASES) for number, name in enumerate(_TABLES)}
_NUMBERS = len(_PLACES) + len(_TABLES) * len(PHASES)
_BYTES = 8 * _NUMBERS + _TEXT
_TRIES = 5
_NUMBER = "run"


def beat_path(folder: Path, rank: int) -> Path:
    """Where the heartbeat of a rank lies."""
    return folder / f"rank-{rank:05d}"


@dataclass(frozen=True)
class Reading:
    """What a rank was doing when its heartbeat was read; times in seconds of the monotonic clock."""

    rank: int
    pid: int
    step: int  # optimizer steps done in the whole run
    phase: str
    since: float  # when the phase began
    began: int | None  # the step that this process started from; None before its first step
    first_step_at: float | None
    saved: int | None  # the newest step that this process knows to be durable
    saved_seconds: float  # productive seconds of this process up to that step
    alive_at: float  # when the rank last showed that Python runs
    waiting: bool  # for another rank
    where: str  # the innermost place in hlat
    saver: int | None  # the process that writes its checkpoints beside it
    seconds: dict[str, float]  # by phase, since the first step
    longest: dict[str, float]  # by phase: the longest that has ended; only those that have
    busy: dict[str, float]  # by phase, seconds in which it did not wait for another rank, sampled

    @property
    def productive(self) -> float:
        """Seconds in which this process got on."""
        return sum(self.seconds.get(phase, 0.0) for phase in PRODUCTIVE)

    @property
    def step_at_work(self) -> int:
        """The step that the phase belongs to, counted from 1."""
        return self.step + (self.phase in ("data", "forward", "backward", "reduce", "optimizer"))


class Beat:
    """The heartbeat of this rank. An observer of phases; only the thread that computes may call it.

    Args:
        path: of its file, which is made.
        clock: seconds, the monotonic clock of this machine.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._folder = clock, path.parent
        self._step: Callable[[], int] = lambda: 0
        self._productive_at: dict[int, float] = {}  # by step that is being saved
        with path.open("w+b") as file:
            file.truncate(_BYTES)
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._numbers = memoryview(self._map)[: 8 * _NUMBERS].cast("d")
        self._began = False
        self._put(began=-1, saved=-1, phase=PHASES.index(current_phase()), since=clock(), alive_at=clock())
        self._put(pid=os.getpid())

    def count_steps(self, step: Callable[[], int]) -> None:
        """Say how to ask for the steps done."""
        self._step = step

    def __call__(self, phase: str) -> None:
        """A phase begins."""
        numbers, now = self._numbers, self._clock()
        numbers[_PLACES["version"]] += 1
        before, took = int(numbers[_PLACES["phase"]]), now - numbers[_PLACES["since"]]
        numbers[_STARTS["seconds"] + before] += took
        longest = _STARTS["longest"] + before
        numbers[longest] = max(numbers[longest], took)
        self._put(phase=PHASES.index(phase), since=now, step=self._step())
        if phase == "data" and not self._began:
            self._begin(now)
        if phase == "checkpoint":
            self._productive_at[self._step()] = self._productive()
        numbers[_PLACES["version"]] += 1

    def secured(self, step: int) -> None:
        """The state of a step is durable."""
        seconds = self._productive_at.get(step, self._productive())
        self._productive_at = {later: value for later, value in self._productive_at.items() if later > step}
        self._put(saved_seconds=seconds, saved=step)

    def fell_back(self, step: int | None) -> None:
        """The newest durable state is of this step now, or there is none: what was newer is damaged."""
        self._put(saved=-1 if step is None else step)

    def saves_beside(self, pid: int) -> None:
        """Another process writes the checkpoints of this rank."""
        self._put(saver=pid)

    def trains_in(self, number: str) -> None:
        """The run whose heart beats here."""
        with suppress(OSError):  # whoever looks has gone
            (self._folder / _NUMBER).write_text(number)

    def look(self, waiting: bool, where: str, seconds: float) -> None:
        """Told by the sampling thread: whether the rank waits for another one, and since its last look."""
        phase = int(self._numbers[_PLACES["phase"]])
        self._numbers[_STARTS["waited" if waiting else "busy"] + phase] += seconds
        self._map[8 * _NUMBERS :] = where.encode()[-_TEXT:].ljust(_TEXT, b"\0")
        self._put(waiting=waiting, alive_at=self._clock())

    def _begin(self, now: float) -> None:
        """The first step: what was before it is none of the steps' time."""
        self._began = True
        for place in range(_STARTS["seconds"], _STARTS["busy"]):
            self._numbers[place] = 0.0
        self._put(began=self._step(), first_step_at=now)

    def _productive(self) -> float:
        start = _STARTS["seconds"]
        return sum(self._numbers[start + PHASES.index(phase)] for phase in PRODUCTIVE)

    def _put(self, **values: float) -> None:
        for name, value in values.items():
            self._numbers[_PLACES[name]] = value


_own: Beat | None = None


@contextmanager
def beating(rank: int) -> Iterator[Beat | None]:
    """Have this process's heart beat where whoever started it looks at it; yields None where nobody does."""
    global _own  # noqa: PLW0603  (what a process does there is one of)
    folder = os.environ.get(BEATS)
    if folder is None or not Path(folder).is_dir():  # nobody asked, or who did has gone
        yield None
        return
    with stacks_on_demand(stacks_path(Path(folder), rank)):
        _own = Beat(beat_path(Path(folder), rank))
        try:
            with observe_phases(_own), sampled(_own):
                yield _own
        finally:
            _own = None


def count_steps(step: Callable[[], int]) -> None:
    """Say how the heartbeat can ask for the number of steps done."""
    if _own is not None:
        _own.count_steps(step)


def secured(step: int) -> None:
    """Say that the state of a step is durable: nothing up to it can be lost any more."""
    if _own is not None:
        _own.secured(step)


def fell_back(step: int | None) -> None:
    """Say that the newest durable state is of an earlier step, or that there is none: what was newer is damaged."""
    if _own is not None:
        _own.fell_back(step)


def trains_in(number: str) -> None:
    """Say which run it is, by the number of its folder."""
    if _own is not None:
        _own.trains_in(number)


def saves_beside(pid: int) -> None:
    """Say which process writes the checkpoints of this one: it may outlive it for a while."""
    if _own is not None:
        _own.saves_beside(pid)


def number_of_run(folder: Path) -> str | None:
    """The number of the run whose heartbeats these are; None if it has not said it yet."""
    try:
        return (folder / _NUMBER).read_text() or None
    except FileNotFoundError:
        return None


def read_beat(folder: Path, rank: int) -> Reading | None:
    """What a rank is doing; None if it has not said anything yet."""
    for _ in range(_TRIES):  # one that was killed in the midst of writing is taken as it stands
        try:
            content = beat_path(folder, rank).read_bytes()
        except FileNotFoundError:
            return None
        if len(content) != _BYTES:
            return None
        numbers = memoryview(content)[: 8 * _NUMBERS].cast("d")
        if numbers[_PLACES["version"]] % 2 == 0:
            break
    return _reading(rank, numbers, content[8 * _NUMBERS :]) if numbers[_PLACES["pid"]] else None


def _reading(rank: int, numbers: "memoryview[float]", text: bytes) -> Reading:
    def of(name: str) -> float:
        return float(numbers[_PLACES[name]])

    def table(name: str) -> dict[str, float]:
        values = numbers[_STARTS[name] : _STARTS[name] + len(PHASES)]
        return {phase: value for phase, value in zip(PHASES, values, strict=True) if value > 0}

    return Reading(
        rank=rank,
        pid=int(of("pid")),
        step=int(of("step")),
        phase=PHASES[int(of("phase"))],
        since=of("since"),
        began=int(of("began")) if of("began") >= 0 else None,
        first_step_at=of("first_step_at") or None,
        saved=int(of("saved")) if of("saved") >= 0 else None,
        saved_seconds=of("saved_seconds"),
        alive_at=of("alive_at"),
        waiting=bool(of("waiting")),
        saver=int(of("saver")) or None,
        where=text.rstrip(b"\0").decode(errors="replace"),
        seconds=table("seconds"),
        longest=table("longest"),
        busy=table("busy"),
    )
