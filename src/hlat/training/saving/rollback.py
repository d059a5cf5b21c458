"""Rollback: return to an earlier state of this run in place, and continue without the samples that spoiled it.

newest valid checkpoint, or the initial state -> weights, optimizer state, RNG, data cursors, anomaly policy
    -> components, prefetcher and metrics continue from there

Steps that are repeated read the same samples and give the same bits, so the result does not depend on the checkpoint
from which they start. Processes, process groups and compiled code stay.
"""

from hlat.checkpoint import load_weights
from hlat.model import initialise
from hlat.resilience import reset_durable_step
from hlat.runtime.process.phase import enter_phase
from hlat.runtime.randomness.generator_state import seed_generators
from hlat.runtime.storage.run_folder import EarlierAttempt
from hlat.tracking import OtherRankTracker, Tracker
from hlat.training.announcement import report_damaged
from hlat.training.batches.prefetch import BatchPrefetcher
from hlat.training.components.saved_state import load_state
from hlat.training.newest_saved import SavedCheckpoint, check_nothing_lost
from hlat.training.run_state import RunState


def roll_back(state: RunState, prefetcher: BatchPrefetcher, tracker: Tracker | OtherRankTracker) -> None:
    """Undo the steps since the newest checkpoint, including the anomalous one. Collective.

    Raises:
        CheckpointError: there are checkpoints, but none is valid.
        StateLostError: the newest checkpoint, or the run's folder, is gone.
        StorageError: the storage cannot be read.
    """
    enter_phase("checkpoint")
    undone, damaged_before = state.step, len(state.damaged)
    prefetcher.discard()
    state.check_folder()  # a missing folder would look like a run without checkpoints
    checkpoint = state.store.newest()
    report_damaged(state.damaged[damaged_before:], tracker)
    found, expected = checkpoint.step if checkpoint is not None else None, state.saved
    durable = EarlierAttempt(expected.step, "") if expected is not None else None
    check_nothing_lost(state.runtime.ranks, state.recipe.run_dir, found, durable, state.damaged[damaged_before:])
    if expected is not None and (found or 0) < expected.step:
        reset_durable_step(found)
    if checkpoint is None:
        _reset_to_start(state)
    else:
        assert checkpoint.step < undone, "a step is saved only after its anomaly check"
        state.runtime.ranks.run_on_all(
            lambda: load_state(checkpoint, state.recipe, state.model, state.optimizer, state.components)
        )
    state.training_data.restore(checkpoint)
    state.anomalies.roll_back(checkpoint.meta.get("anomalies") if checkpoint is not None else None)
    state.step = checkpoint.step if checkpoint is not None else 0
    state.saved = SavedCheckpoint(checkpoint.step, checkpoint.path) if checkpoint is not None else None
    prefetcher.restart(state.training_data.reader(state.model, state.samples))
    tracker.rewind(state.step)
    tracker.event("rollback", step=state.step, undone=undone, path=str(checkpoint.path) if checkpoint else None)
    enter_phase("between")


def _reset_to_start(state: RunState) -> None:
    """Restore the state before the first step."""
    recipe = state.recipe
    seed_generators(recipe.training.seed)
    if recipe.checkpoint.init_from is None:
        initialise(state.model.local_parameters, recipe.model, recipe.training.seed)
    else:
        parameters, expected = state.model.local_parameters, state.initial_weights
        load_weights(recipe.checkpoint.init_from, recipe.model, parameters, state.runtime.ranks, expected)
    state.optimizer.state.clear()
    state.components.reset()
