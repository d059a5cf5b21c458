"""The stage that a run is in, by its newest checkpoint, and whether the recipe still has the stages before it.

    recipe, newest checkpoint --find_stage--> recipe of the stage whose step is next, recipe of the stage that saved it

A border is a checkpoint: the last step of a stage saves one, and the next stage is built from it as a resumed run is,
in another layout if it names one.
"""

from typing import Any

from hlat.checkpoint import Checkpoint
from hlat.config import Recipe
from hlat.data import PreparedData, TrainingData, readings
from hlat.optim import placed
from hlat.resilience import AnomalyPolicy
from hlat.runtime.errors import CheckpointError


def stage_record(recipe: Recipe) -> dict[str, Any]:
    """Return what a checkpoint keeps of the stage that saves it: which one, where it began, and what it reads."""
    place = recipe.place
    index, name, first = (0, "", 0) if place is None else (place.index, place.stage.name, place.first)
    return {
        "index": index,
        "name": name,
        "first": first,
        "reads": [{"first": each.first, "earlier": list(each.earlier), "own": each.own} for each in readings(recipe)],
    }


def find_stage(recipe: Recipe, newest: Checkpoint | None) -> tuple[Recipe, Recipe]:
    """Return the recipe of the stage whose step is next, and that of the stage that saved the newest checkpoint.

    Without stages, and without a checkpoint, both are the same object.

    Raises:
        CheckpointError: the recipe has other stages than those that led to the checkpoint.
    """
    stages = [placed(stage) for stage in recipe.each_stage()]
    if newest is None or recipe.place is not None or not recipe.stages:
        return stages[0], stages[0]
    policy = AnomalyPolicy(recipe.anomalies, recipe.batches, recipe.data.sequence_length)
    policy.restore(newest.meta.get("anomalies"))
    following = policy.skipped.next_batch(newest.step)
    last = recipe.batches.containing(max(0, policy.skipped.position_after(newest.step) - 1))
    here, saved_by = (_stage_of(stages, batch) for batch in (following, last))
    # A run without stages that gets some is in its first stage, and its checkpoints have no record of one.
    saved = newest.meta.get("stage") or {**stage_record(stages[0]), "reads": None}
    _check_same(saved, saved_by, newest)
    return here, saved_by


def check_later_stages(recipe: Recipe, prepared: PreparedData) -> None:
    """Raise DataError if a later stage would find too little text: before the first step, not at its border."""
    place = recipe.place
    for stage in place.run.each_stage()[place.index + 1 :] if place is not None else ():
        its = stage.place
        assert its is not None, "the recipe of a stage"
        shares = readings(stage)
        if stage.prepared_dir == recipe.prepared_dir:
            data = TrainingData(prepared, stage.data, stage.training.seed, shares, its.batches.first_of(its.first))
            data.refuse_too_short(its.batches.first_of(its.stop) - its.batches.first_of(its.first))


def _stage_of(stages: list[Recipe], batch: int) -> Recipe:
    each = [(stage, stage.place) for stage in stages]
    return next((stage for stage, place in each if place is not None and batch < place.stop), stages[-1])


def _check_same(saved: dict[str, Any], stage: Recipe, newest: Checkpoint) -> None:
    now = stage_record(stage)
    if saved["reads"] is None and any(each["earlier"] or each["own"] for each in now["reads"]):
        reason = "a later stage would get text of which this run has read a part. Say restart: true in it"
    elif (saved["index"], saved["first"]) != (now["index"], now["first"]):
        reason = (
            f"it was saved in stage {saved['name'] or saved['index']}, which began with batch {saved['first']}; now "
            f"that step is in stage {now['name']}, which begins with batch {now['first']}. Stages that a run has left "
            "keep their lengths"
        )
    elif saved["reads"] is not None and saved["reads"] != now["reads"]:
        reason = (
            f"what stage {now['name']} reads would change: a stage with other rows shares out its sources in another "
            "way now. Set the stages again as they were"
        )
    else:
        return
    raise CheckpointError(
        f"{newest.path}: the run cannot go on with these stages: {reason}, or begin another run with hlat fork."
    )
