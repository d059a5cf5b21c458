"""Whether the numbers of a step are what they should be, and what is done where they are not.

    loss, gradient norm --judge--> Verdict: apply | warn | skip | rollback | stop
                          |
            the last losses and norms of applied updates: median and median deviation, which a few outliers cannot move

Every rank judges the same bits with the same state, so all come to the same verdict without a word. The state goes into
every checkpoint: a run that is resumed decides as the one that was not interrupted.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from hlat.config.sections import AnomalyConfig
from hlat.resilience.skipped_samples import Range, SkippedSamples
from hlat.runtime import CheckpointError

Action = Literal["apply", "warn", "skip", "rollback", "stop"]

_NORMAL = 1.4826  # the standard deviation of a normal distribution, in median absolute deviations


@dataclass(frozen=True)
class Verdict:
    """What is done about a step.

    Attributes:
        action: ``apply`` and ``warn`` apply the update, the others do not.
        kind: ``non_finite``, ``loss_spike`` or ``norm_spike``; empty where nothing is wrong.
        reason: that in words.
        samples: what the step has read, where something is wrong.
        window: what was looked back on: values by name.
    """

    action: Action = "apply"
    kind: str = ""
    reason: str = ""
    samples: Range | None = None
    window: Mapping[str, float] = field(default_factory=dict)

    @property
    def applied(self) -> bool:
        """Whether the update is applied."""
        return self.action in ("apply", "warn")


APPLY = Verdict()


class AnomalyPolicy:
    """Judges steps, and remembers what it has to for the next.

    Args:
        config: what is done about what.
        batch: sequences of a global batch.
        tokens: of a global batch.

    Attributes:
        skipped: what is left out of the data after rollbacks.
    """

    def __init__(self, config: AnomalyConfig, batch: int, tokens: int) -> None:
        self._config, self._batch, self._tokens = config, batch, tokens
        self._losses: deque[float] = deque(maxlen=config.window)
        self._norms: deque[float] = deque(maxlen=config.window)
        self._skips: list[int] = []  # steps whose update was not applied, as far as they count
        self._rollbacks: list[tuple[int, Range]] = []  # the step that was undone, and what it had read
        self.skipped = SkippedSamples(batch)

    def judge(self, step: int, samples: int, loss: float, norm: float) -> Verdict:
        """Judge a step before its update, and take note of what is decided.

        Args:
            step: counted from 1.
            samples: the first that it has read.
            loss: mean over the global batch, in nats.
            norm: of the gradient, before clipping.
        """
        kind, reason = self._anomaly(loss, norm)
        if not kind:
            self._accept(loss, norm)
            return APPLY
        batch = Range(samples, samples + self._batch)
        wanted: Action = self._config.non_finite if kind == "non_finite" else _SPIKES[self._config.spike]
        statistics = self._statistics()
        if wanted in ("apply", "warn"):
            self._accept(loss, norm)
            return Verdict(wanted, kind, reason, batch, statistics) if wanted == "warn" else APPLY
        if wanted != "stop" and self._spent(step) >= self._config.budget:
            reason += (
                f"; {self._config.budget} steps have been skipped or rolled back within {self._config.window}, which "
                "is all that anomalies.budget allows"
            )
            return Verdict("stop", kind, reason, batch, statistics)
        if wanted == "skip":
            self._skips = [one for one in self._skips if one > step - self._config.window] + [step]
        elif wanted == "rollback":
            self._rollbacks.append((step, batch))
            self.skipped.add(batch)
        return Verdict(wanted, kind, reason, batch, statistics)

    def roll_back(self, state: Any) -> None:
        """Go back to an earlier state, as ``state`` gave it, None for the beginning; what was rolled back stays so.

        Raises:
            CheckpointError: that is no state of this policy.
        """
        rollbacks = self._rollbacks
        self.restore(state)
        self._rollbacks = []
        self._roll_back_all(rollbacks)

    def state(self) -> dict[str, Any]:
        """Everything that later verdicts depend on, as JSON values; floats come back to the bit."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "skipped_steps": list(self._skips),
            "rollbacks": [{"step": step, "samples": list(samples)} for step, samples in self._rollbacks],
        }

    def restore(self, state: Any) -> None:
        """Take over what ``state`` gave; None, of a checkpoint that has none, is a policy that has seen nothing.

        Raises:
            CheckpointError: that is no state of this policy.
        """
        self._losses.clear()
        self._norms.clear()
        self._skips, self._rollbacks, self.skipped = [], [], SkippedSamples(self._batch)
        if state is None:
            return
        try:
            self._losses.extend(_finite(state["losses"]))
            self._norms.extend(_finite(state["norms"]))
            self._skips = [int(step) for step in state["skipped_steps"]]
            self._roll_back_all([(int(one["step"]), Range(*map(int, one["samples"]))) for one in state["rollbacks"]])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's record of anomalies cannot be read ({error!r}). Use an earlier checkpoint."
            ) from error

    def _roll_back_all(self, rollbacks: Sequence[tuple[int, Range]]) -> None:
        self.skipped = SkippedSamples(self._batch, [samples for _, samples in rollbacks])
        self._rollbacks = list(rollbacks)

    def _accept(self, loss: float, norm: float) -> None:
        self._losses.append(loss)
        self._norms.append(norm)

    def _spent(self, step: int) -> int:
        """How many steps of the window that ends here were skipped or rolled back; such as lie ahead count too."""
        steps = [*self._skips, *(one for one, _ in self._rollbacks)]
        return sum(one > step - self._config.window for one in steps)

    def _anomaly(self, loss: float, norm: float) -> tuple[str, str]:
        """What is wrong with a step, and that in words; empty where nothing is."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "non_finite", f"loss {loss}, gradient norm {norm}"
        if len(self._losses) < math.ceil(self._config.window / 4):
            return "", ""
        for kind, name, value, seen in (
            ("loss_spike", "loss", loss, self._losses),
            ("norm_spike", "gradient norm", norm, self._norms),
        ):
            middle, deviation = center_and_scale(seen, self._tokens)
            if value - middle > self._config.threshold * deviation:
                far = f"{(value - middle) / deviation:.1f}" if deviation else "infinitely many"
                return kind, (
                    f"{name} {value:.6g} is {far} robust standard deviations ({deviation:.3g}) above the median "
                    f"{middle:.6g} of the last {len(seen)} applied steps"
                )
        return "", ""

    def _statistics(self) -> dict[str, float]:
        found: dict[str, float] = {"steps": len(self._losses)}
        for name, seen in (("loss", self._losses), ("norm", self._norms)):
            if seen:
                middle, deviation = center_and_scale(seen, self._tokens)
                found |= {f"{name}_median": middle, f"{name}_deviation": deviation}
        return found


_SPIKES: dict[str, Action] = {"ignore": "apply", "warn": "warn", "skip": "skip", "rollback": "rollback"}


def center_and_scale(values: Sequence[float], tokens: int) -> tuple[float, float]:
    """The median of some values, and a robust standard deviation.

    That is 1.4826 times the median absolute deviation, but never less than ``|median| / sqrt(tokens)``. Both loss and
    gradient norm are means over the tokens of a batch (the norm: of the gradients' components along their sum) of
    quantities that scatter about as much as they are large, so even where tokens were independent their mean would
    scatter by that. A window that scatters less is flat by chance, and would make a spike of every next step.

    Args:
        values: at least one, finite.
        tokens: in the batch that each is a mean over.
    """
    middle = median(values)
    deviation = _NORMAL * median(abs(value - middle) for value in values)
    return middle, max(deviation, abs(middle) / math.sqrt(tokens))


def _finite(values: Any) -> list[float]:
    numbers = [float(value) for value in values]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a number that is not finite")
    return numbers
