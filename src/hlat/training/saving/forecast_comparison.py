"""The forecast of a run: registered before the first step, and compared with every validation loss.

    run.ladder --first start--> forecast.json, event "forecast"; later starts keep it, whatever the ladder has by then
    validation loss --ForecastWatch--> several in a row too high: event "off_forecast" and a warning, once,
                                       and with anomalies.forecast=stop NumericsError before the next step

A checkpoint is saved before its step is evaluated, so it lacks that evaluation. A resumed run, or one that was rolled
back, takes it from the step's line of metrics. The event comes before the line: an evaluation whose line is there has
been reported, and one whose line is missing is evaluated again.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from hlat.forecast import (
    TOO_HIGH_IN_A_ROW,
    Forecast,
    ForecastWatch,
    LossRange,
    expected_at,
    forecast_json,
    parse_forecast,
    read_forecast,
    recipe_forecast,
    sizes_of,
    write_forecast,
)
from hlat.optim import rate_at
from hlat.runtime.errors import NumericsError, PlanError, StorageError
from hlat.tracking import OtherRankTracker, Tracker, read_last_metrics, read_valid_records
from hlat.training.components import LoopStart, TrainingComponent
from hlat.training.run_state import RunState
from hlat.training.step_metrics import evaluations_after


class ForecastComparison(TrainingComponent):
    """Registers the forecast that ``run.ladder`` gives, and compares validation losses with it."""

    def __init__(self, state: RunState, tracker: Tracker | OtherRankTracker) -> None:
        self._state, self._tracker = state, tracker
        self._forecast: Forecast | None = None  # None if none holds for this run, or it is to be ignored
        self._sha256 = ""  # of the forecast
        self._action = state.recipe.anomalies.forecast

    def begin(self, start: LoopStart) -> None:
        """Register the forecast, or read it; raises PlanError if it was changed. Collective."""
        found = start.runtime.ranks.run_on_rank0(self._register)
        if found is not None and self._action != "ignore":
            self._forecast, self._sha256 = parse_forecast(found), found["sha256"]
        self._compare_last()

    def before_step(self) -> None:
        """Raise NumericsError if the run is to stop, on every rank."""
        # Here, not where the loss is compared: by now its line is written, and a resumed run stops as well.
        if self._forecast and self._action == "stop" and self._state.forecast_watch.too_high >= TOO_HIGH_IN_A_ROW:
            recipe, good = self._state.recipe, self._state.forecast_watch.good_step
            raise NumericsError(
                f"step {self._state.step}: the last {self._state.forecast_watch.too_high} validation losses are above "
                f"the forecast, which they followed until step {good}; the event off_forecast has what happened since. "
                f"To go on, give anomalies.forecast=warn; to try something else from there: "
                f"hlat fork {recipe.run_dir}@STEP --to NEW."
            )

    def after_rollback(self, step: int) -> None:
        self._compare_last()

    def compare(self, loss: float) -> None:
        """Compare the validation loss of the step just done, before its line is written. Collective."""
        expected, count = self._count(loss)
        if expected is not None and count == TOO_HIGH_IN_A_ROW:
            self._report(loss, expected)

    def _compare_last(self) -> None:
        """Count the evaluation of the checkpoint's step, if its line is there. Collective."""
        state = self._state
        if state.forecast_watch.sha256 != self._sha256:  # a fork has its own, and one that was ignored begins anew
            state.forecast_watch = ForecastWatch(self._sha256, good_step=state.step)

        def read() -> float | None:
            path = state.recipe.run_dir / "metrics.jsonl"
            line = read_last_metrics(path) if path.is_file() else None
            return line.get("val_loss") if line is not None and line.get("step") == state.step else None

        loss = state.runtime.ranks.run_on_rank0(read)
        if loss is not None:
            self._count(loss)

    def _count(self, loss: float) -> tuple[LossRange | None, int]:
        forecast, state = self._forecast, self._state
        expected = None if forecast is None else expected_at(forecast, state.tokens / forecast.tokens)
        if expected is None:
            return None, 0
        return expected, state.forecast_watch.check(state.step, loss, expected)

    def _register(self) -> dict[str, Any] | None:
        """Return the forecast of this run as JSON values; None if the one that is there does not hold. For rank 0."""
        recipe, tracker = self._state.recipe, self._tracker
        events, _ = read_valid_records(recipe.run_dir / "events.jsonl")
        earlier = next((event for event in events if event.get("event") == "forecast"), None)
        known = read_forecast(recipe.run_dir)
        if known is None and earlier is not None:
            tracker.warn("forecast.json of this run was removed: no loss is compared with its forecast")
            return None
        if known is None:
            try:
                write_forecast(recipe.run_dir, recipe_forecast(recipe), datetime.now(UTC))
            except OSError as error:
                raise StorageError(f"{recipe.run_dir}: the forecast cannot be written: {error.strerror}.") from error
            known = read_forecast(recipe.run_dir)
            assert known is not None, "it has just been written"
        content, end = forecast_json(known), known.end
        if earlier is None:
            fields = {"ladder": known.ladder, "tokens": known.tokens, **end._asdict(), "sha256": content["sha256"]}
            tracker.event("forecast", step=self._state.step, folder=recipe.run.ladder, **fields)
        elif earlier.get("sha256") != content["sha256"]:
            raise PlanError(
                f"{recipe.run_dir}/forecast.json is not the forecast that this run registered at {earlier.get('time')}."
                " Restore that file, or give run.ladder=null to go on without a forecast."
            )
        tracker.message(f"forecast: {known.words} ({recipe.run.ladder}), registered {known.written}")
        for warning in known.warnings:
            tracker.warn(f"forecast: {warning}")
        if known.tokens == recipe.total_tokens and math.isclose(known.sizes[known.kind], sizes_of(recipe)[known.kind]):
            if earlier is None:
                self._warn_of_silence(known)
            return content
        tracker.warn(
            f"the forecast is of a run of {known.tokens:,} tokens and {known.sizes['total']:,.0f} parameters, and the "
            f"recipe is now of another one ({recipe.total_tokens:,} tokens): no loss is compared with it"
        )
        return None

    def _warn_of_silence(self, forecast: Forecast) -> None:
        """Say that no alarm can come, where too few evaluations are left that the curve has something for. Rank 0."""
        recipe, begin = self._state.recipe, forecast.curve[0][0]
        first = bisect_left(range(recipe.total_steps), begin * forecast.tokens, key=recipe.batches.tokens_before)
        count = evaluations_after(recipe, max(first - 1, self._state.step))
        if count < TOO_HIGH_IN_A_ROW and self._action != "ignore":
            self._tracker.warn(
                f"anomalies.forecast={self._action}: {TOO_HIGH_IN_A_ROW} validation losses in a row make an alarm, and "
                f"this run compares {count}: its forecast begins at {begin:.0%} of the tokens. Validate more often "
                "(evaluation.every_steps), or make a ladder whose runs do."
            )

    def _report(self, loss: float, expected: LossRange) -> None:
        """Record and say that the run is above its forecast, and what happened since it was not. Collective."""
        state, since = self._state, self._state.forecast_watch.good_step
        causes = state.runtime.ranks.run_on_rank0(lambda: list(self._causes(since)))
        fields = {"loss": loss, "expected": expected.loss, "low": expected.low, "high": expected.high}
        self._tracker.event("off_forecast", step=state.step, action=self._action, since=since, causes=causes, **fields)
        self._tracker.warn(
            f"step {state.step}: validation loss {loss:.3f}, forecast {expected.loss:.3f} ({expected.low:.3f} to "
            f"{expected.high:.3f}): {TOO_HIGH_IN_A_ROW} in a row are higher than noise explains. "
            f"Since step {since}: {'; '.join(causes)}"
        )

    def _causes(self, since: int) -> Iterator[str]:
        """Yield what happened after a step: phases and passes of the data that began, rates, anomalies."""
        state, recipe, skipped = self._state, self._state.recipe, self._state.anomalies.skipped
        before, now = (skipped.position_after(step) for step in (since, state.step))
        length = recipe.data.sequence_length
        for number, phase in enumerate(recipe.data.phases[:-1], start=2):
            if phase.until_tokens is not None and before * length < phase.until_tokens <= now * length:
                yield f"phase {number} of data.phases began at {phase.until_tokens:,.0f} tokens"
        earlier = state.training_data.epochs(before)
        for name, count in state.training_data.epochs(now).items():
            if math.ceil(count) > max(1, math.ceil(earlier[name])):
                yield f"pass {math.ceil(count)} over {name or 'the text'} began"
        first, last = (rate_at(recipe, step) for step in (since + 1, state.step))
        yield f"learning rate {first:.3g} to {last:.3g}"
        events, _ = read_valid_records(recipe.run_dir / "events.jsonl")
        # A step that was repeated has its event twice.
        kinds = {event["step"]: event.get("kind") for event in events if event.get("event") == "anomaly"}
        found = [(step, str(kind).replace("_", " ")) for step, kind in kinds.items() if since < step <= state.step]
        if found:
            step, kind = max(found)
            yield f"anomalies: {len(found)}, the last one a {kind} at step {step}"
