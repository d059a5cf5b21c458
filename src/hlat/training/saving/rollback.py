"""Back to an earlier state of this run, in place, and on from there without the samples that spoiled it.

newest whole checkpoint, or the beginning -> weights, moments, generators, cursors, policy -> feed, metrics from there

What is done again on the way back to where the spike was reads the same samples and gives the same bits, so which
checkpoint it begins from changes nothing of the run. Processes, groups and compiled code stay.
"""

from pathlib import Path

from hlat.checkpoint import load_weights, restore
from hlat.model import initialise
from hlat.resilience import fell_back
from hlat.runtime.process import enter_phase
from hlat.runtime.randomness import seed_generators
from hlat.runtime.storage import EarlierAttempt
from hlat.tracking import OtherRank, Tracker
from hlat.training.batches import Feed
from hlat.training.newest_saved import Saved, refuse_lost
from hlat.training.run_state import Job
from hlat.training.step_metrics import tell_damage


def roll_back(job: Job, feed: Feed, tracker: Tracker | OtherRank) -> None:
    """Undo the steps since the newest checkpoint, the one just judged among them. Collective.

    Raises:
        CheckpointError: there are checkpoints and none is whole.
        LostError: the newest checkpoint has gone, or the run's folder.
        StorageError: the storage cannot be read.
    """
    enter_phase("checkpoint")
    undone, known = job.step, len(job.damaged)
    feed.drop()
    job.check_folder()  # or what is gone would read as a run without checkpoints
    checkpoint = job.store.newest()
    tell_damage(job.damaged[known:], tracker)
    found, left = checkpoint.step if checkpoint is not None else None, job.saved
    had = EarlierAttempt(left.step, "") if left is not None else None
    refuse_lost(job.runtime.ranks, job.recipe.run_dir, found, had, job.damaged[known:])
    if left is not None and (found or 0) < left.step:
        fell_back(found)
    if checkpoint is None:
        _begin_again(job)
    else:
        assert checkpoint.step < undone, "a step is saved after it was judged"
        job.runtime.ranks.run_on_all(lambda: restore(checkpoint, job.recipe.model, job.model.held, job.optimizer))
    job.training_data.restore(checkpoint)
    job.anomalies.roll_back(checkpoint.meta.get("anomalies") if checkpoint is not None else None)
    job.step = checkpoint.step if checkpoint is not None else 0
    job.saved = Saved(checkpoint.step, checkpoint.path) if checkpoint is not None else None
    feed.begin(job.training_data.reader(job.model, job.samples))
    tracker.rewind(job.step)
    tracker.event("rollback", step=job.step, undone=undone, path=str(checkpoint.path) if checkpoint else None)
    enter_phase("between")


def _begin_again(job: Job) -> None:
    """The state before the first step."""
    recipe = job.recipe
    seed_generators(recipe.training.seed)
    if recipe.checkpoint.init_from is None:
        initialise(job.model.held, recipe.model, recipe.training.seed)
    else:
        load_weights(Path(recipe.checkpoint.init_from), recipe.model, job.model.held, job.runtime.ranks)
    job.optimizer.state.clear()
