"""Report anomalous steps; stop the run when loss, gradient or weights are not finite.

    verdict on a step -> report_anomaly -> event and message; NumericsError if the action is "stop"
    weights           -> check_finite   -> NumericsError if they are not finite

The run stops before it overwrites the last good checkpoint.
"""

import math

import torch

from hlat.runtime.errors import NumericsError
from hlat.tracking import OtherRankTracker, Tracker
from hlat.training.run_state import RunState
from hlat.training.step import StepResult
from hlat.training.step_metrics import batch_crc32

_ACTIONS = {
    "warn": "the update is applied",
    "skip": "the update is not applied",
    "rollback": "rolling back to the last checkpoint; these samples will be skipped",
    "stop": "the run stops",
}


def report_anomaly(state: RunState, result: StepResult, tracker: Tracker | OtherRankTracker) -> None:
    """Record the anomaly of the step just done, if there is one. Collective.

    Raises:
        NumericsError: the action of the verdict is "stop".
    """
    verdict = result.verdict
    if verdict.samples is None:
        return
    first, stop = verdict.samples
    tracker.event(
        "anomaly",
        step=state.step,
        kind=verdict.kind,
        action=verdict.action,
        samples=[first, stop],
        batch_crc32=batch_crc32(state),
        loss=float(result.loss),
        grad_norm=float(result.gradient_norm),
        window=dict(verdict.window),
        reason=verdict.reason,
    )
    where = f"step {state.step}, samples {first} to {stop - 1}"
    if verdict.action == "stop":
        raise _diverged(state, f"{where}: {verdict.reason}")
    tracker.message(f"{where}: {verdict.reason}: {_ACTIONS[verdict.action]}")


def check_finite(state: RunState, result: StepResult) -> None:
    """Check that the weights are finite, and also loss and gradient norm if the update was applied. Collective.

    Every rank sees the same numbers and decides the same. Waits for the device, so call it where that happens anyway.

    Raises:
        NumericsError: one of them is infinite or NaN.
    """
    values = torch.stack((result.loss, result.gradient_norm, state.model.parameter_norm())).tolist()
    check_values(state, result.verdict.applied, *values)


def check_values(state: RunState, applied: bool, loss: float, gradient_norm: float, parameter_norm: float) -> None:
    """Check that the norm of the weights is finite, and also loss and gradient norm if the update was applied.

    Raises:
        NumericsError: one of them is infinite or NaN.
    """
    if all(map(math.isfinite, (parameter_norm, *((loss, gradient_norm) if applied else ())))):
        return
    numbers = f"loss {loss}, gradient norm {gradient_norm}, parameter norm {parameter_norm}"
    raise _diverged(state, f"step {state.step}: {numbers}")


def _diverged(state: RunState, problem: str) -> NumericsError:
    recipe = state.recipe
    clip = "" if recipe.optimizer.clip_norm is not None else ", or optimizer.clip_norm=1.0"
    remedies = (
        f"Try an optimizer.lr well below {recipe.optimizer.lr:g} (usual are 1e-4 to 3e-3) or a schedule.warmup_steps "
        f"above {recipe.schedule.warmup_steps}{clip}"
    )
    if state.saved is None:
        good = f"No checkpoint has been written. {remedies}: the same command begins anew."
    else:
        good = f"The last good state is {state.saved.path}. {remedies}: the same command resumes from that checkpoint."
    return NumericsError(f"{problem}: training has diverged. {good}")
