"""Data of a run: prepared if it is not yet, opened on every rank, and checked before the first step.

recipe --prepare--> prepared folder, on each machine --> training samples, validation sets --> evaluation
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from hlat.checkpoint import check_same_tokenizer, find_weights
from hlat.config import Recipe
from hlat.data import (
    OnlineData,
    PreparedData,
    ProgressCallback,
    TrainingData,
    check_tokenizer,
    check_vocabulary,
    open_prepared,
    open_validation_sets,
    prepare_recipe_data,
    prepare_validation_sets,
    readings,
)
from hlat.runtime.distributed.join import Runtime, check_consistent
from hlat.runtime.progress import enter_stage
from hlat.training.batches import BatchSource, OnlineBatchSource, PreparedBatchSource
from hlat.training.stages import check_later_stages, check_later_texts
from hlat.training.validation.evaluation import Evaluation, open_evaluation

DataProgress = Callable[[], AbstractContextManager[ProgressCallback | None]]
"""Opens a progress display while text is prepared; yields a ``hlat.data.prepare.corpus.ProgressCallback``, or None."""


def open_data(
    recipe: Recipe, runtime: Runtime, data_progress: DataProgress
) -> tuple[PreparedData, BatchSource, dict[str, PreparedData], Evaluation]:
    """Prepare and open all data of the run. Collective."""
    enter_stage("preparing data")
    prepared = _prepare_data(recipe, runtime, data_progress)
    training_data = _open_training_data(recipe, runtime, prepared)
    sets = _open_sets(recipe, runtime, prepared)
    return prepared, training_data, sets, _open_evaluation(recipe, runtime, prepared, sets)


def _prepare_data(recipe: Recipe, runtime: Runtime, data_progress: DataProgress) -> PreparedData:
    """Prepare the data on rank 0, and again on each machine that does not see rank 0's files. Collective."""
    made: list[PreparedData] = []

    def make() -> None:
        with data_progress() as progress:
            made.append(prepare_recipe_data(recipe, progress=progress))

    # Preparing text may take long: what can be refused is refused before.
    weights = runtime.ranks.run_on_rank0(lambda: _check_inputs(recipe))
    runtime.ranks.run_on_rank0(make)
    # Machines without a shared file system prepare the text themselves.
    runtime.ranks.run_on_all(lambda: make() if runtime.local_rank == 0 and runtime.rank > 0 else None)
    prepared = runtime.ranks.run_on_all(lambda: made[0] if made else open_prepared(recipe.prepared_dir))
    runtime.ranks.run_on_all(lambda: prepared.check_before_training() if runtime.local_rank == 0 else None)
    if recipe.data.mode == "online":  # the manifest may name other paths of the same text
        prepared = prepared.with_sources(runtime.ranks.run_on_rank0(lambda: made[0].manifest.sources))
    check_consistent(runtime.ranks, {"data": {"content of the prepared tokens": prepared.fingerprint}})
    check_vocabulary(prepared, recipe.model.vocab_size)
    if weights is not None:
        check_same_tokenizer(weights, prepared)
    return prepared.for_run(recipe.run_dir)


def _open_training_data(recipe: Recipe, runtime: Runtime, prepared: PreparedData) -> BatchSource:
    """Open the training samples. Rank 0 is first, since it writes index files that other ranks read. Collective."""
    data, batches, seed = recipe.data, recipe.batches, recipe.training.seed
    if data.mode == "online":
        online = OnlineData(prepared, data, seed, batches, recipe.data_parallel(runtime.world))
        return OnlineBatchSource(online, runtime.ranks)

    place = recipe.place
    first, stop = (0, recipe.total_steps) if place is None else (place.first, place.stop)
    begin = batches.first_of(first)
    total = batches.first_of(stop) - begin

    def make() -> TrainingData:
        return TrainingData(prepared, data, seed, readings(recipe), begin)

    def check() -> None:
        make().refuse_too_short(total)
        check_later_stages(recipe, prepared)

    runtime.ranks.run_on_rank0(check)
    of = "run" if place is None else "stage"
    return PreparedBatchSource(runtime.ranks.run_on_all(make), batches, total, of)


def _open_sets(recipe: Recipe, runtime: Runtime, prepared: PreparedData) -> dict[str, PreparedData]:
    """Open further sets that the run is evaluated on, prepared as the run's data is. Collective."""
    ranks, is_first_here = runtime.ranks, runtime.local_rank == 0
    if recipe.evaluation.sets:
        ranks.run_on_rank0(lambda: prepare_validation_sets(recipe, prepared))
        ranks.run_on_all(
            lambda: prepare_validation_sets(recipe, prepared) if is_first_here and runtime.rank > 0 else None
        )
    return ranks.run_on_all(lambda: open_validation_sets(recipe, compare=is_first_here))


def _open_evaluation(
    recipe: Recipe, runtime: Runtime, prepared: PreparedData, sets: dict[str, PreparedData]
) -> Evaluation:
    """Open what the run is evaluated on. Collective."""
    evaluation = runtime.ranks.run_on_all(lambda: open_evaluation(recipe, prepared, sets))
    check_consistent(runtime.ranks, {"evaluation": evaluation.identity})
    return evaluation


def _check_inputs(recipe: Recipe) -> Path | None:
    """Check input files before the text is prepared; return the folder of the weights to start from, if any."""
    check_tokenizer(recipe.data, recipe.model.vocab_size)
    check_later_texts(recipe)
    init_from = recipe.checkpoint.init_from
    return find_weights(init_from, recipe.model) if init_from is not None else None
