"""Runs as text: recipe, attempts, curve, last numbers, checkpoints of one; several side by side. No torch, no numpy.

    recipe.yaml, attempts.jsonl, events.jsonl, metrics.jsonl, names in checkpoints/ --read_overview--> RunOverview
    RunOverview each --compare_runs--> RunComparison: fields in which their recipes differ, losses at the same tokens,
                                       last numbers --> text of `hlat compare`, or JSON

Damaged lines are left out and counted, so that a run whose disk was full can still be looked at.

Losses are compared at token counts that all runs have logged. Only if there are none, at those of the run that has
logged least, where the losses of the others are interpolated and marked. No run is compared beyond the tokens of the
shortest, and no value is repeated: two logged steps are two rows.
"""

import json
import math
import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

from hlat.reporting.run_status import (
    RunEvent,
    RunStatus,
    forecast_line,
    is_run,
    last_recipe,
    last_stage,
    no_run,
    parameters_of,
    read_status,
    run_events,
    run_name,
    stage_words,
)
from hlat.runtime.storage.run_folder import ATTEMPTS_NAME, forks_of, read_resolved
from hlat.runtime.terminal import NAMED, TABLE_ROWS, is_verbose, listed
from hlat.tracking import from_json_value, iter_valid_records, read_valid_records

_BLOCKS = "▁▂▃▄▅▆▇█"
_NUMBERS = ("step", "tokens", "loss", "val_loss", "val_bits_per_byte", "tokens_per_second", "mfu", "memory_bytes")


_ELEMENT = re.compile(r"(?<=\.)\d+(?=\.|$)")  # the number of an element, in the path of a field
_NAMED_ELEMENT = re.compile(r"\.(sets|tasks|weights|components)\..+")
T = TypeVar("T")


class Curve(Sequence[tuple[float, float]]):
    """Pairs of tokens and the loss there, in the order of the file, in 16 bytes each: a run may log a million."""

    def __init__(self, pairs: Iterable[tuple[float, float]] = ()) -> None:
        self.tokens, self.losses = array("d"), array("d")
        for pair in pairs:
            self.append(*pair)

    def append(self, tokens: float, loss: float) -> None:
        self.tokens.append(tokens)
        self.losses.append(loss)

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> tuple[float, float]: ...
    @overload
    def __getitem__(self, index: slice) -> "Curve": ...
    def __getitem__(self, index: int | slice) -> "tuple[float, float] | Curve":
        if isinstance(index, slice):
            return Curve(zip(self.tokens[index], self.losses[index], strict=True))
        return self.tokens[index], self.losses[index]

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return zip(self.tokens, self.losses, strict=True)


@dataclass(frozen=True)
class RunOverview:
    """Overview of a run, from the files in its folder."""

    folder: Path
    name: str
    status: RunStatus
    settings: Mapping[str, Any]  # resolved recipe as JSON values; empty if unknown
    attempts: tuple[Mapping[str, Any], ...]  # starts of the run, oldest first, as recorded; see ``hlat.training.start``
    parameters: int | None  # of the model; None if its steps have not begun
    loss: Curve  # training loss by tokens
    # last loss of each validation set and source, by name; "validation" is that of the whole split
    validation: Mapping[str, float]
    numbers: Mapping[str, float]  # last values of the main metrics, by name
    checkpoints: tuple[int, ...]  # steps of those in the folder, ascending
    damaged_lines: int  # lines of its files that cannot be read
    parent: RunEvent | None = None  # the event of a fork: parent (folder, id, step) and changes
    forks: tuple[tuple[int, Path], ...] = ()  # step and folder of those made from this run
    stage: str = ""  # that it is in, or was in last; empty without stages

    @property
    def stage_words(self) -> str:
        return stage_words(self.settings, self.stage)

    forecast: str = ""  # that of its loss and what became of it, a sentence; empty without a forecast

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "name": self.name,
            "state": self.status.state,
            "reason": self.status.reason,
            "stage": self.stage or None,
            "parameters": self.parameters,
            "recipe": self.settings,
            "attempts": list(self.attempts),
            "loss": [{"tokens": tokens, "loss": loss} for tokens, loss in self.loss],
            "validation": dict(self.validation),
            "numbers": dict(self.numbers),
            "checkpoints": list(self.checkpoints),
            "forecast": self.forecast or None,
            "damaged_lines": self.damaged_lines,
            "parent": None if self.parent is None else self.parent.fields.get("parent"),
            "forks": [{"step": step, "folder": str(folder)} for step, folder in self.forks],
        }


def read_overview(folder: Path) -> RunOverview:
    """Read what a run has left in its folder; DataError if it is not that of a run, StorageError if unreadable."""
    if not is_run(folder):
        raise no_run(folder)
    metrics = _Metrics(folder / "metrics.jsonl")
    records, damaged_events = read_valid_records(folder / "events.jsonl")
    attempts, damaged_attempts = read_valid_records(folder / ATTEMPTS_NAME)
    events = run_events(records)
    # The file is of a run that has not recorded an event with its recipe yet.
    settings = last_recipe(events) or read_resolved(folder)
    return RunOverview(
        folder=folder,
        name=run_name(settings, folder),
        status=read_status(folder, events),
        settings=settings,
        attempts=tuple(attempts),
        parameters=parameters_of(events),
        loss=metrics.loss,
        validation=metrics.validation,
        numbers=metrics.numbers,
        checkpoints=_checkpoints(folder / "checkpoints"),
        damaged_lines=metrics.damaged + damaged_events + damaged_attempts,
        parent=parent_of(events),
        forks=tuple(forks_of(folder)),
        stage=last_stage(events),
        forecast=forecast_line(events, metrics.validation.get("validation"), metrics.validated_tokens),
    )


def parent_of(events: Sequence[RunEvent]) -> RunEvent | None:
    """Return the event with which a fork began; None for a run of its own."""
    return next((event for event in events if event.kind == "fork"), None)


def family_lines(parent: RunEvent | None, forks: Sequence[tuple[int, Path]]) -> Iterator[str]:
    """Say from which run, at which step and with which changes a run was forked, and which runs from it."""
    if parent is not None:
        origin, changes = parent.fields.get("parent"), changes_text(parent.fields.get("changes"))
        where = _below_here(Path(str(origin.get("folder")))) if isinstance(origin, dict) else "another run"
        yield f"forked from {where} at step {parent.step or 0:,}{f', with {changes}' if changes else ''}"
    if forks:
        yield "forks: " + listed((f"{_below_here(fork)} at step {step:,}" for step, fork in forks), TABLE_ROWS)


def _below_here(folder: Path) -> str:
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def changes_text(changes: object) -> str:
    """Changes of fields as ``training.tokens: 100 -> 200``; empty if they are something else."""
    fields = {"path", "old", "new"}
    if not isinstance(changes, list) or not all(isinstance(each, dict) and fields <= set(each) for each in changes):
        return ""
    from hlat.config import short  # noqa: PLC0415  (an overview of a run without changes starts without it)

    return "; ".join(f"{each['path']}: {short(each['old'])} -> {short(each['new'])}" for each in changes)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as blocks of eight heights: means of equal parts; not finite ones are left out."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    parts = min(width, len(finite))
    means = []
    for part in range(parts):
        inside = finite[part * len(finite) // parts : (part + 1) * len(finite) // parts]
        means.append(sum(inside) / len(inside))
    low, high = min(means), max(means)
    # A flat curve is drawn low, without a division by zero.
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten a recipe to one text per field, by dotted path; of sections in a list, the path has the number."""
    found: dict[str, str] = {}
    for name, given in settings.items():
        path = f"{prefix}{name}"
        are_sections = isinstance(given, list | tuple) and given and all(isinstance(each, dict) for each in given)
        value = {str(number): each for number, each in enumerate(given)} if are_sections else given
        if isinstance(value, dict) and value:
            found |= flat_settings(value, f"{path}.")
        else:
            found[path] = value if isinstance(value, str) else json.dumps(value)
    return found


def shown_settings(flat: Mapping[str, T]) -> tuple[list[tuple[str, T]], str]:
    """Return the fields to show, of elements of a list or mapping the first three, and what to say of the others."""
    counts, shown = Counter[str](), list[tuple[str, T]]()
    for path, value in flat.items():
        alike = _NAMED_ELEMENT.sub(r".\1", _ELEMENT.sub("N", path))
        counts[alike] += 1
        if counts[alike] <= NAMED or is_verbose():
            shown.append((path, value))
    hidden = len(flat) - len(shown)
    return shown, f"and {hidden:,} more fields of list elements (-v)" if hidden else ""


class _Metrics:
    """Metrics of a run as far as they are shown, read line by line."""

    def __init__(self, path: Path) -> None:
        self.loss, self.damaged = Curve(), 0
        self.validated_tokens: float | None = None  # at the last validation
        last: dict[str, float] = {}
        for record in iter_valid_records(path):
            if record is None:  # a damaged line
                self.damaged += 1
                continue
            for name, value in record.items():
                if name in _NUMBERS or name.startswith("val"):
                    number = _number(value)
                    if number is not None:
                        last[name] = number
            tokens, loss = _number(record.get("tokens")), _number(record.get("loss"))
            if tokens is not None and loss is not None:
                self.loss.append(tokens, loss)
            if _number(record.get("val_loss")) is not None:
                self.validated_tokens = tokens
        # last values of the main metrics
        self.numbers = {name: value for name, value in last.items() if name in _NUMBERS}
        # Last loss of each validation set and source: val_loss, or val/NAME/loss.
        self.validation = {
            "validation" if name == "val_loss" else name.partition("/")[2].removesuffix("/loss"): value
            for name, value in last.items()
            if name == "val_loss" or name.endswith("/loss")
        }


def _number(value: Any) -> float | None:
    # JSON has no NaN and no infinity: they are logged as text.
    number = from_json_value(value) if isinstance(value, str) else value
    # bool is an int in Python, and no metric.
    return float(number) if isinstance(number, (int, float)) and not isinstance(number, bool) else None


def _checkpoints(folder: Path) -> tuple[int, ...]:
    """Steps of complete checkpoints: those that have been renamed to their final names."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return ()
    # By name alone: the readers of checkpoints need torch, and an overview starts without it.
    steps = [name.removeprefix("step-") for name in names if name.startswith("step-")]
    return tuple(sorted(int(step) for step in steps if step.isdecimal()))


_COMPARED_PLACES = 8  # rows of a comparison, at most
_OWN_FIELDS = ("run.name", "run.dir")  # differ in any two runs


class LossesAt(NamedTuple):
    """Training losses of several runs after the same number of tokens."""

    tokens: float
    losses: list[float]  # of each run
    interpolated: list[bool]  # for each run, True if it logged no loss there, so that it lies between two logged ones


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side: fields in which their recipes differ, and losses at the same tokens."""

    runs: tuple[RunOverview, ...]
    recipe: dict[str, list[str | None]]  # by field: the value in each run, None where a recipe lacks it
    curve: list[LossesAt]  # at most eight rows, the last one at the most tokens

    def to_dict(self) -> dict[str, Any]:
        return {
            # Complete curves and recipes would hide what differs.
            "runs": [{**run.to_dict(), "loss": None, "recipe": None} for run in self.runs],
            "recipe": self.recipe,
            "curve": [
                {"tokens": each.tokens, "loss": each.losses, "interpolated": each.interpolated} for each in self.curve
            ],
        }


def compare_runs(folders: Sequence[Path]) -> RunComparison:
    """Read and compare runs; DataError if a folder is not that of a run, StorageError if a file is unreadable."""
    runs = tuple(read_overview(folder) for folder in folders)
    differing = differing_settings([run.settings for run in runs])
    return RunComparison(runs, differing, _compare_losses([run.loss for run in runs]))


def differing_settings(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Find the fields in which recipes differ, besides name and folder: the value in each, None where it is missing."""
    flat = [flat_settings(settings) for settings in recipes]
    fields = dict.fromkeys(field for settings in flat for field in settings)
    values = {field: [settings.get(field) for settings in flat] for field in fields}
    return {field: found for field, found in values.items() if len(set(found)) > 1 and field not in _OWN_FIELDS}


def _compare_losses(curves: Sequence[Curve]) -> list[LossesAt]:
    if not curves or not all(curves):
        return []
    # At tokens that all have logged, nothing needs to be interpolated.
    common = set(curves[0].tokens)
    for curve in curves[1:]:
        common = {tokens for tokens in curve.tokens if tokens in common}
    places = _some_places(sorted(common) or _fewest_places(curves))
    found = [[_loss_at(curve, tokens) for curve in curves] for tokens in places]
    return [
        LossesAt(tokens, [loss for loss, _ in each], [is_interpolated for _, is_interpolated in each])
        for tokens, each in zip(places, found, strict=True)
    ]


def _fewest_places(curves: Sequence[Curve]) -> list[float]:
    """Tokens, within the range of all runs, at which the run logged that has logged least there."""
    first, last = max(curve.tokens[0] for curve in curves), min(curve.tokens[-1] for curve in curves)
    ranges = [[tokens for tokens in curve.tokens if first <= tokens <= last] for curve in curves]
    return min((each for each in ranges if each), key=len, default=[])


def _some_places(places: Sequence[float]) -> list[float]:
    """At most eight values, evenly spread, the last one included."""
    count = min(_COMPARED_PLACES, len(places))
    return [places[len(places) * (number + 1) // count - 1] for number in range(count)]


def _loss_at(curve: Curve, tokens: float) -> tuple[float, bool]:
    """Loss that was logged there, else one interpolated linearly and True; a curve's ends go on as they are."""
    index = bisect_left(curve.tokens, tokens)
    if index == len(curve):
        return curve.losses[-1], True
    (x1, y1), (x0, y0) = curve[index], curve[max(0, index - 1)]
    # Before the first logged step there is nothing to interpolate.
    if x1 == tokens or x1 <= x0:
        return y1, x1 != tokens
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0), True
