"""Messages of a run when its steps begin: three lines, then what is unusual; with -v also what was decided.

model and parameters
data, steps and their tokens
device, precision, layout, folder        --> console, and the event "start" or "resume" with the resolved recipe
"""

import logging
from collections.abc import Sequence

from hlat.config import recipe_notes
from hlat.hardware import device_chip, load_catalog
from hlat.model import count_parameters, deterministic_by_default
from hlat.parallel import decide_compilation
from hlat.runtime.backend.table import backend_of
from hlat.runtime.process.verbosity import is_verbose
from hlat.runtime.terminal_text import plural
from hlat.tracking import OtherRankTracker, Tracker
from hlat.training.newest_saved import DamagedCheckpoint
from hlat.training.process.snapshot_clock import report_tier_notes
from hlat.training.run_state import RunState

_LOG = logging.getLogger(__name__)


def announce(state: RunState, tracker: Tracker | OtherRankTracker) -> None:
    """Log model, data, device and plan of the run, and record its start or resume as an event."""
    recipe = state.recipe
    parameters = count_parameters(recipe.model).total
    device = backend_of(state.runtime.device).describe(state.runtime.device)
    for line in (*_header(state, parameters, device), *(_decisions(state) if is_verbose() else ())):
        tracker.message(line)
    _report_notes(state, tracker)
    recipe_changes = [{"path": c.path, "old": c.old, "new": c.new} for c in state.recipe_changes]
    begins = recipe.checkpoint.init_from is not None and state.saved is None
    loaded = {"init_from": recipe.checkpoint.init_from, "init_sha256": state.initial_weights} if begins else {}
    tracker.event(
        "resume" if state.step else "start",
        step=state.step,
        parameters=parameters,
        processes=state.runtime.world,
        device=device,
        **state.arithmetic.names(),
        changes=recipe_changes,
        recipe=recipe.model_dump(mode="json"),  # reports need it before there is a checkpoint
        **loaded,
    )


def _header(state: RunState, parameters: int, device: str) -> list[str]:
    """Return the lines that every run begins with, narrower than 80 columns where names allow it."""
    recipe, prepared, model = state.recipe, state.prepared, state.recipe.model
    layout = recipe.parallel.describe(state.model.layout.data) if state.runtime.world > 1 else "1 process"
    training = "" if recipe.data.mode == "online" else f"{prepared.train_tokens:,} tokens, "
    lines = [
        f"{recipe.run.name}: {parameters:,} parameters, {plural(model.layers, 'layer')}, "
        f"vocabulary {model.vocab_size:,}",
        f"data: {training}{prepared.validation_tokens:,} for validation; {recipe.steps_and_tokens}",
        f"run: {recipe.precision.mode} on {device}, {layout}; in {recipe.run_dir}",
    ]
    if recipe.checkpoint.init_from is not None and state.saved is None:
        lines.append(f"weights: loaded from {recipe.checkpoint.init_from}")
    return lines


def _decisions(state: RunState) -> list[str]:
    """Return what was measured and decided, for those who ask (-v)."""
    recipe, device = state.recipe, state.runtime.device
    new_choice = state.saved is None and state.mode_was_chosen
    chosen = [state.precision_note] if state.precision_note is not None and new_choice else []
    return [
        *chosen,
        f"peak: {state.peak.value / 1e9:,.0f} GFLOP/s ({state.peak.source})",
        "; ".join(f"{subject}: {name}" for subject, name in state.arithmetic.by_subject().items()),
        f"blocks: {decide_compilation(recipe, device, state.runtime.world)}",
        *state.prepared.advice,
    ]


def _report_notes(state: RunState, tracker: Tracker | OtherRankTracker) -> None:
    """Say what is unusual about this run, and what has changed since its checkpoint."""
    recipe, prepared = state.recipe, state.prepared
    if state.precision_note is not None and (state.saved is not None or not state.mode_was_chosen):
        tracker.message(state.precision_note)
    if (cost := _determinism_cost(state)) is not None:
        tracker.message(cost)
    if recipe.precision.mode == "bf16":
        tracker.warn(
            "precision.mode=bf16 rounds small updates away: training stalls as the learning rate falls. "
            "It is here for comparison; bf16-sr costs the same memory."
        )
    if recipe.precision.in_hardware:
        tracker.message(
            "precision.rounding=hardware: the device rounds every conversion to bf16 stochastically, with random "
            "numbers that no checkpoint has: a resumed run is not bitwise the one that was not interrupted"
        )
    for warning in recipe_notes(recipe):
        tracker.warn(str(warning))
    for note in state.training_data.notes:
        tracker.message(note)
    late = [note for data in (prepared, *state.sets.values()) for note in data.training_notes]
    for note in [*prepared.notes, *late]:
        tracker.message(f"data: {note}")
    report_damaged(state.damaged, tracker)
    report_tier_notes(state.tiers.events, tracker)
    if state.tiers.warning:
        tracker.warn(state.tiers.warning)
    if state.step > recipe.total_steps:
        tracker.message(
            f"at step {state.step} already, past the {plural(recipe.total_steps, 'step')} of the recipe; to go on, "
            "give a larger training.steps"
        )
    elif state.step:
        tracker.message(f"resumed at step {state.step} of {recipe.total_steps}")
    for note in state.arithmetic.differences(state.saved_arithmetic) if state.saved_arithmetic is not None else ():
        tracker.message(note)
    for change in state.recipe_changes:
        tracker.message(f"changed since the checkpoint: {change.path}: {change.old!r} -> {change.new!r}")
    report_component_changes(state, tracker)


def _determinism_cost(state: RunState) -> str | None:
    """Say what ``run.deterministic`` changes on this device, and what that costs; None where it changes no kernel."""
    recipe, device = state.recipe, state.runtime.device
    if deterministic_by_default(recipe, device):
        return None
    from hlat.planner import run_determinism_cost  # noqa: PLC0415 - most runs start without the planner

    # The estimate is for the kernels that such a chip usually gets: none if torch has chosen another one here.
    try:
        cost = run_determinism_cost(recipe, device_chip(device, load_catalog()), state.runtime.world)
    except Exception:  # no defect of an estimate may end a run
        _LOG.debug("no estimate of what run.deterministic costs", exc_info=True)
        return None
    return None if cost is None or cost.kernels[cost.chosen].name != state.arithmetic.attention else str(cost)


def report_component_changes(state: RunState, tracker: Tracker | OtherRankTracker) -> None:
    """Record components that begin without saved state, and saved state that is not continued."""
    for name in state.component_changes.begun:
        tracker.event("component_begun", step=state.step, name=name)
        tracker.message(f"{name}: the checkpoint has no state of it; it begins with the weights of step {state.step}")
    for name in state.component_changes.dropped:
        tracker.event("component_dropped", step=state.step, name=name)
        tracker.message(
            f"{name}: the checkpoint has its state, but the recipe does not ask for it: later checkpoints lack it"
        )


def report_damaged(damaged: Sequence[DamagedCheckpoint], tracker: Tracker | OtherRankTracker) -> None:
    """Record checkpoints that were found damaged and set aside."""
    for checkpoint in damaged:
        tracker.event("checkpoint_damaged", path=str(checkpoint.path), problems=checkpoint.problems)
        tracker.warn(f"damaged checkpoint set aside: {checkpoint.path}: {'; '.join(checkpoint.problems)}")
