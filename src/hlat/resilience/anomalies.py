"""Anomalies: detect non-finite values and spikes of loss and gradient norm, decide what to do, and skip bad batches.

    loss, gradient norm --AnomalyPolicy.check--> StepVerdict: apply | warn | skip | rollback | stop
                                 |                                              |
            window of the last applied steps: median and median      SkippedSamples: batches that are not read again
            absolute deviation, which a few outliers cannot move        --batch schedule--> first sample of each step

Every rank checks the same bits with the same state, so all ranks decide the same without communication. The state is
part of every checkpoint, so a resumed run decides as an uninterrupted one.

The order of samples stays a pure function: step k reads the k-th global batch that is not skipped. Ranges are added
during the run, always after the last sample that was read, so the positions of finished steps never change.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

from hlat.config import AnomalyConfig, BatchSchedule
from hlat.runtime.errors import CheckpointError


class SampleRange(NamedTuple):
    """Global samples ``first <= g < stop``: one global batch."""

    first: int
    stop: int


class SkippedSamples:
    """Global batches that are skipped, given as ranges in any order."""

    def __init__(self, batches: BatchSchedule, ranges: Iterable[SampleRange] = ()) -> None:
        self._batches = batches
        self._skipped: set[int] = set()  # numbers of batches
        for samples in ranges:
            self.add(samples)

    def add(self, samples: SampleRange) -> None:
        """Skip a global batch; ValueError if ``samples`` is none, or is skipped already."""
        number = self._batches.number_of(samples.first)
        if samples.stop != self._batches.first_of(number + 1) or number in self._skipped:
            raise ValueError(f"[{samples.first}, {samples.stop}) is no global batch, or is skipped already")
        self._skipped.add(number)

    def position_after(self, steps: int) -> int:
        """Sample after the last one read by the first ``steps`` steps: the position in the data."""
        return self._batches.first_of(self._batches_until(steps))

    def tokens_of(self, steps: int) -> int:
        end = self._batches_until(steps)
        skipped = sum(self._batches.tokens_of(number) for number in self._skipped if number < end)
        return self._batches.tokens_before(end) - skipped

    def skipped_after(self, steps: int) -> Iterator[int]:
        """Yield the first samples of the batches that are skipped between step ``steps`` and the next one."""
        number = self._batches_until(steps)
        while number in self._skipped:
            yield self._batches.first_of(number)
            number += 1

    def next_step_start(self, steps: int) -> int:
        return self._batches.first_of(self.next_batch(steps))

    def next_batch(self, steps: int) -> int:
        """Return the number of the batch that the step after the first ``steps`` reads."""
        return self._batches_until(steps) + sum(1 for _ in self.skipped_after(steps))

    def _batches_until(self, steps: int) -> int:
        """Number of batches up to the last one that the first ``steps`` steps read."""
        count = steps
        for number in sorted(self._skipped):
            if number >= count:
                break
            count += 1
        return count


Action = Literal["apply", "warn", "skip", "rollback", "stop"]

_MAD_TO_SIGMA = 1.4826  # standard deviation of a normal distribution divided by its median absolute deviation


@dataclass(frozen=True)
class StepVerdict:
    """Decision about a step's update."""

    action: Action = "apply"  # ``apply`` and ``warn`` apply the update, the others do not
    kind: str = ""  # ``non_finite``, ``loss_spike`` or ``norm_spike``; empty without anomaly
    reason: str = ""  # description of the anomaly
    samples: SampleRange | None = None  # global samples that the step read; None if there is no anomaly
    window: Mapping[str, float] = field(default_factory=dict)  # statistics of the window, by name

    @property
    def applied(self) -> bool:
        return self.action in ("apply", "warn")

    @property
    def leaves_doubt(self) -> bool:
        # Weights that are ruined cause numbers that are not finite, too.
        return self.kind == "non_finite" and not self.applied


APPLY = StepVerdict()


class AnomalyPolicy:
    """Checks the loss and gradient norm of each step against those of the steps before.

    ``config`` has window, threshold, budget, and the action for each kind of anomaly; ``sequence_length`` is in tokens.
    ``skipped`` are the samples that are skipped after rollbacks.
    """

    def __init__(self, config: AnomalyConfig, batches: BatchSchedule, sequence_length: int) -> None:
        self._config, self._batches, self._length = config, batches, sequence_length
        self._on_spike: Action = "apply" if config.spike == "ignore" else config.spike
        # of the last applied steps: losses, and gradient norms
        self._window = {name: deque[float](maxlen=config.window) for name in ("loss", "norm")}
        self._skipped_steps: list[int] = []  # steps whose update was not applied, within the window
        self._rollbacks: list[tuple[int, SampleRange]] = []  # step that was rolled back, and the samples it had read
        self.skipped = SkippedSamples(batches)

    def check(self, step: int, samples: int, loss: float, norm: float) -> StepVerdict:
        """Check step number ``step``, counted from 1, before its update, and record the decision.

        ``samples`` is the first global sample that it read, ``loss`` the mean over the global batch in nats, ``norm``
        the global gradient norm before clipping.
        """
        number = self._batches.number_of(samples)
        # In a ramp the first batch of the window is the smallest, and its mean varies most.
        tokens = len(self._batches.batch(max(0, number - len(self._window["loss"])))) * self._length
        kind, reason = self._find_anomaly(loss, norm, tokens)
        if not kind:
            self._add_to_window(loss, norm)
            return APPLY
        batch = SampleRange(samples, self._batches.first_of(number + 1))
        action: Action = self._config.non_finite if kind == "non_finite" else self._on_spike
        statistics = self._statistics(tokens)
        if action in ("apply", "warn"):
            self._add_to_window(loss, norm)
            return StepVerdict(action, kind, reason, batch, statistics) if action == "warn" else APPLY
        # A run that skips all the time no longer trains.
        if action != "stop" and self._budget_used(step) >= self._config.budget:
            reason += (
                f". {self._config.budget} steps were skipped or rolled back within {self._config.window} steps, the "
                "limit of anomalies.budget"
            )
            return StepVerdict("stop", kind, reason, batch, statistics)
        if action == "skip":
            self._skipped_steps = [
                earlier for earlier in self._skipped_steps if earlier > step - self._config.window
            ] + [step]
        elif action == "rollback":
            self._rollbacks.append((step, batch))
            self.skipped.add(batch)
        return StepVerdict(action, kind, reason, batch, statistics)

    def begin_stage(self) -> None:
        """Forget the losses of other data: what is usual is learned anew."""
        for values in self._window.values():
            values.clear()

    def roll_back(self, state: Any) -> None:
        """Restore an earlier ``state()``, or None for the beginning, but keep later rollbacks and skipped samples."""
        # Later rollbacks must not be forgotten: the run would read the bad batch again.
        rollbacks = self._rollbacks
        self.restore(state)
        self._rollbacks = []
        self._set_rollbacks(rollbacks)

    def state(self) -> dict[str, Any]:
        """Return everything that later verdicts depend on, as JSON values; floats keep every bit."""
        return {
            "losses": list(self._window["loss"]),
            "norms": list(self._window["norm"]),
            "skipped_steps": list(self._skipped_steps),
            "rollbacks": [{"step": step, "samples": list(samples)} for step, samples in self._rollbacks],
        }

    def restore(self, state: Any) -> None:
        """Restore the state of a checkpoint; None resets the policy. CheckpointError if it is invalid."""
        self.begin_stage()
        self._skipped_steps, self._rollbacks, self.skipped = [], [], SkippedSamples(self._batches)
        if state is None:
            return
        try:
            self._window["loss"].extend(_finite(state["losses"]))
            self._window["norm"].extend(_finite(state["norms"]))
            self._skipped_steps = [int(step) for step in state["skipped_steps"]]
            self._set_rollbacks(
                [(int(each["step"]), SampleRange(*map(int, each["samples"]))) for each in state["rollbacks"]]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's record of anomalies cannot be read ({error!r}). Use an earlier checkpoint."
            ) from error

    def _set_rollbacks(self, rollbacks: Sequence[tuple[int, SampleRange]]) -> None:
        self.skipped = SkippedSamples(self._batches, [samples for _, samples in rollbacks])
        self._rollbacks = list(rollbacks)

    def _add_to_window(self, loss: float, norm: float) -> None:
        self._window["loss"].append(loss)
        self._window["norm"].append(norm)

    def _budget_used(self, step: int) -> int:
        # Rolled-back steps ahead count too: the run is on its way to them again.
        steps = [*self._skipped_steps, *(undone for undone, _ in self._rollbacks)]
        return sum(counted > step - self._config.window for counted in steps)

    def _find_anomaly(self, loss: float, norm: float, tokens: int) -> tuple[str, str]:
        """Kind and description of a step's anomaly, or empty; ``tokens`` of the smallest batch of the window."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "non_finite", f"loss {loss}, gradient norm {norm}"
        # Too few values for a deviation.
        if len(self._window["loss"]) < math.ceil(self._config.window / 4):
            return "", ""
        for name, words, value in (("loss", "loss", loss), ("norm", "gradient norm", norm)):
            center, deviation = center_and_scale(self._window[name], tokens)
            # Only above: a loss that falls is no anomaly.
            if value - center > self._config.threshold * deviation:
                return (
                    f"{name}_spike",
                    f"{words} {value:.3g}, usually {center:.2g}",
                )  # the verdict's window has the numbers
        return "", ""

    def _statistics(self, tokens: int) -> dict[str, float]:
        statistics: dict[str, float] = {"steps": len(self._window["loss"])}
        for name, window in self._window.items():
            if window:
                center, deviation = center_and_scale(window, tokens)
                statistics |= {f"{name}_median": center, f"{name}_deviation": deviation}
        return statistics


def center_and_scale(values: Sequence[float], tokens: int) -> tuple[float, float]:
    """Median of finite values, and a robust standard deviation for means over ``tokens`` tokens."""
    # 1.4826 times the median absolute deviation, but at least |median| / sqrt(tokens). Loss and gradient norm are
    # means over the tokens of a batch (the norm: of the gradients' components along their sum) of quantities whose
    # standard deviation is about as large as their mean. So even with independent tokens a batch mean has that
    # standard deviation. A window with less is flat by chance, and every next step would look like a spike.
    center = median(values)
    deviation = _MAD_TO_SIGMA * median(abs(value - center) for value in values)
    return center, max(deviation, abs(center) / math.sqrt(tokens))


def _finite(values: Any) -> list[float]:
    numbers = [float(value) for value in values]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a value is not finite")
    return numbers
