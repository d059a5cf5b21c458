"""The stage that a run is in, by its newest checkpoint, and whether the recipe still has the stages before it.

    recipe, newest checkpoint --find_stage--> recipe of the stage whose step is next, recipe of the stage that saved it

A border is a checkpoint: the last step of a stage saves one, and the next stage is built from it as a resumed run is,
in another layout if it names one.
"""

from dataclasses import replace
from typing import Any

from hlat.checkpoint import Checkpoint, check_fork, read_saved_run, saved_precision_mode
from hlat.config import Recipe, StagePlace
from hlat.data import (
    MANIFEST_FILE,
    PreparedData,
    TrainingData,
    check_inputs,
    open_prepared,
    readings,
    same_texts,
    text_problem,
    with_first_tokenizer,
)
from hlat.optim import placed, rate_at
from hlat.resilience import AnomalyPolicy, SkippedSamples
from hlat.runtime.errors import CheckpointError, DataError


def stage_record(recipe: Recipe) -> dict[str, Any]:
    """Return what a checkpoint keeps of the stage that saves it: which one, where it began, and what it reads."""
    place = recipe.place
    assert place is not None, "the recipe of a stage"
    return {
        "index": place.index,
        "name": place.stage.name,
        "first": place.first,
        "schedule_first": place.schedule_first,
        "schedule_stop": place.schedule_stop,
        "start": place.start,
        "from_current": place.from_current,
        "reads": [{"first": each.first, "earlier": list(each.earlier), "own": each.own} for each in readings(recipe)],
    }


def find_stage(recipe: Recipe, newest: Checkpoint | None, is_fork: bool = False) -> tuple[Recipe, Recipe]:
    """Return the recipe of the stage whose step is next, and that of the stage that saved the newest checkpoint.

    Without stages, and without a checkpoint, both are the same object. In a fork the steps done may have had other
    rates.

    Raises:
        CheckpointError: the recipe has other stages than those that led to the checkpoint.
    """
    stages = [placed(stage) for stage in recipe.each_stage()]
    if newest is None or recipe.place is not None or not recipe.stages:
        return stages[0], stages[0]
    skipped = _skipped(recipe, newest)
    following = skipped.next_batch(newest.step)
    last = recipe.batches.containing(max(0, skipped.position_after(newest.step) - 1))
    here, saved_by = (_stage_of(stages, batch) for batch in (following, last))
    saved = newest.meta.get("stage") or _record_without_stages(stages[0], newest)
    _check_same(saved, saved_by, newest, None if is_fork else last + 1)
    return here, saved_by


def _skipped(recipe: Recipe, newest: Checkpoint) -> SkippedSamples:
    policy = AnomalyPolicy(recipe.anomalies, recipe.batches, recipe.data.sequence_length)
    policy.restore(newest.meta.get("anomalies"))
    return policy.skipped


def stage_line(place: StagePlace) -> str:
    """Return what a run says when a stage begins."""
    number = f"stage {place.index + 1} of {len(place.run.stages)}, {place.stage.name}"
    return f"{number}: steps {place.first + 1:,} to {place.stop:,}"


def check_fork_stages(recipe: Recipe, checkpoint: Checkpoint) -> tuple[dict[str, Any], int]:
    """Return the metadata of a fork's checkpoint that its stages change, and the batch that its next step reads.

    Rates may change, what was read may not.

    Raises:
        CheckpointError: a fork with these stages cannot go on from the checkpoint of its parent.
    """
    batch = _skipped(recipe, checkpoint).next_batch(checkpoint.step)
    if not recipe.stages:
        return {}, batch
    saved, _ = read_saved_run(checkpoint)
    _, saved_by = find_stage(recipe, checkpoint, is_fork=True)
    settled = saved_by.in_mode(saved_precision_mode(saved))
    check_fork(saved, settled)
    # As if the stage had had these rates all along: the run that goes on compares itself with them.
    content = settled.model_dump(mode="json")
    rates = {name: content[name] for name in ("optimizer", "schedule", "training")}
    return {"recipe": {**saved, **rates}, "stage": stage_record(settled)}, batch


def _record_without_stages(first: Recipe, newest: Checkpoint) -> dict[str, Any]:
    """Return the record of a run that gets stages only now: all that it has done is of the first one."""
    stop = Recipe.model_validate(newest.meta["recipe"]).horizon_steps
    return {**stage_record(first), "reads": None, "schedule_stop": stop}


def check_later_texts(recipe: Recipe) -> None:
    """Raise DataError for what is known of the text of later stages before it is prepared: files, columns, amount."""
    place = recipe.place
    if place is None:
        return
    problems = [message for _, message in same_texts(place.run, stores=True)]
    for stage in place.run.each_stage()[place.index + 1 :]:
        assert stage.place is not None, "the recipe of a stage"
        of_stage, most = f"stage {stage.place.stage.name}: ", None
        if stage.prepared_dir != recipe.prepared_dir and not (stage.prepared_dir / MANIFEST_FILE).is_file():
            data, rows = with_first_tokenizer(stage), stage.model.vocab_size
            report = check_inputs(data, stage.prepared_dir, rows, {}, stores=True)
            problems += [f"{of_stage}{each.field} {each.value}: {each.message}" for each in report.problems]
            most = report.most_tokens
        problems += [f"{of_stage}{message}"] if (message := text_problem(stage, most)) else []
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))


def check_later_stages(recipe: Recipe, prepared: PreparedData) -> None:
    """Raise DataError if a later stage would find too little text: before the first step, not at its border."""
    place = recipe.place
    for stage in place.run.each_stage()[place.index + 1 :] if place is not None else ():
        its = stage.place
        assert its is not None, "the recipe of a stage"
        shares = readings(stage)
        is_here = stage.prepared_dir == recipe.prepared_dir
        if is_here or (stage.prepared_dir / MANIFEST_FILE).is_file():
            its_text = prepared if is_here else open_prepared(stage.prepared_dir)
            data = TrainingData(its_text, stage.data, stage.training.seed, shares, its.batches.first_of(its.first))
            data.refuse_too_short(its.batches.first_of(its.stop) - its.batches.first_of(its.first))


def _stage_of(stages: list[Recipe], batch: int) -> Recipe:
    each = [(stage, stage.place) for stage in stages]
    return next((stage for stage, place in each if place is not None and batch < place.stop), stages[-1])


def _same_rates(saved: dict[str, Any], stage: Recipe, steps: int) -> bool:
    """Return True if the schedule as it was saved gave the steps done the rates that they would get now."""
    assert stage.place is not None, "the recipe of a stage"
    names = ("schedule_first", "schedule_stop", "start", "from_current")
    before = stage.placed(replace(stage.place, **{name: saved[name] for name in names if name in saved}))
    done = range(stage.place.schedule_first + 1, steps + 1)
    return before.place == stage.place or all(rate_at(before, step) == rate_at(stage, step) for step in done)


def _other_rates_remedy(saved: dict[str, Any], stage: Recipe) -> str:
    """Say how a run keeps the rates of the steps it has done: the usual mistake is a stage after a decay."""
    place, end = stage.place, saved["schedule_stop"]
    assert place is not None, "the recipe of a stage"
    if end == place.schedule_stop:
        return "Keep lengths and rates of the stages, or fork the run"
    added = [each.place.stage.name for each in place.run.each_stage() if each.place and each.place.first == end]
    own = f"Let a stage end with batch {end}, and give the next one a schedule of its own"
    if added:
        own = (
            f"Give stage {added[0]} a schedule of its own, as schedule: {{kind: constant}}, which goes on from the "
            "rate that holds there; and an optimizer.lr, if that is 0"
        )
    was = f"Their schedule ended with batch {end}, and would end with batch {place.schedule_stop}"
    return f"{was}. {own}. Or fork the run"


def _check_same(saved: dict[str, Any], stage: Recipe, newest: Checkpoint, steps: int | None) -> None:
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
    elif steps is not None and not _same_rates(saved, stage, steps):
        reason = f"steps done would have had other learning rates. {_other_rates_remedy(saved, stage)}"
    else:
        return
    raise CheckpointError(f"{newest.path}: the run cannot go on with these stages: {reason}.")
