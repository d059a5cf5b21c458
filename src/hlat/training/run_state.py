"""Everything a run consists of, built in one visible order, by all its processes together.

processes agree on recipe and code -> data -> newest checkpoint, precision -> this rank's share of the model, optimizer
    -> that checkpoint loaded into both
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from hlat.checkpoint import (
    RecipeChange,
    check_resume,
    check_same_tokenizer,
    collect,
    load_weights,
    read_saved_run,
    restore,
    software_versions,
    tokenizer_files,
)
from hlat.checkpoint.protocol import CheckpointContent, CheckpointStore, resolve
from hlat.checkpoint.tiers import RunId, Tiers
from hlat.config import Recipe
from hlat.data import prepare_recipe_data
from hlat.data.online import OnlineData
from hlat.data.prepare import ProgressCallback
from hlat.data.prepared import PreparedData, check_tokenizer, check_vocabulary, open_prepared
from hlat.data.samples import Batch, TrainingData, ValidationData
from hlat.hardware import PeakFlops, peak_flops
from hlat.model.derived import flops_per_token
from hlat.optim import build_optimizer
from hlat.parallel import ParallelModel, build_parallel
from hlat.precision import MODES
from hlat.resilience import AnomalyPolicy
from hlat.runtime import rank_info
from hlat.runtime.distributed import Runtime, check_consistent, code_identity
from hlat.runtime.randomness import seed_generators
from hlat.runtime.storage import EarlierAttempt, RunFolder
from hlat.tracking import expressible, with_non_finite
from hlat.training.batches import OnlineSamples, PreparedSamples, Samples
from hlat.training.faulty_disk import disk_of
from hlat.training.newest_saved import Damage, Saved, refuse_lost
from hlat.training.precision import resolve_precision

DataProgress = Callable[[], AbstractContextManager[ProgressCallback | None]]
"""Opens a progress display while text is prepared; yields a ``hlat.data.prepare.ProgressCallback``, or None."""


def no_progress() -> AbstractContextManager[None]:
    """Prepare without a word."""
    return nullcontext()


@dataclass
class Job:
    """A run, ready for its next step."""

    recipe: Recipe  # its precision.mode resolved
    runtime: Runtime
    prepared: PreparedData
    training_data: Samples
    validation_data: ValidationData | None
    model: ParallelModel  # this rank's share
    optimizer: torch.optim.Optimizer
    folder: RunFolder
    store: CheckpointStore
    tiers: Tiers  # where else its state is kept
    peak: PeakFlops
    step: int  # optimizer steps done so far
    saved: Saved | None  # the newest checkpoint, if there is one
    changes: list[RecipeChange]  # what differs from the recipe of the checkpoint that was loaded
    damaged: list[Damage]  # checkpoints that were found damaged and set aside
    anomalies: AnomalyPolicy
    precision: str | None  # what precision.mode=auto has come to, in words; None where the recipe names a mode
    numbers: dict[str, Any] | None = None  # of the step just done, for its line of metrics, until that is written
    batch: Batch | None = None  # this rank's sequences of the last step

    @property
    def samples(self) -> int:
        """Sequences consumed so far, those that were left out among them: the position in the data."""
        return self.anomalies.skipped.after(self.step)

    @property
    def tokens(self) -> int:
        """Tokens of the steps done so far. Those of samples that were left out are not among them."""
        return self.step * self.recipe.tokens_per_step

    def utilization(self, tokens_per_second: float, convention: Literal["causal", "full"]) -> float:
        """Model FLOP/s utilization: the FLOP/s that the model needs as a share of what all devices can do."""
        flops = flops_per_token(self.recipe.model, self.recipe.data.sequence_length, convention)
        return flops * tokens_per_second / (self.peak.value * self.runtime.world)

    def check_folder(self) -> None:
        """See that the run's folder is there, for every rank. Collective.

        Raises:
            LostError: it is gone.
        """
        self.runtime.ranks.run_on_all(self.folder.check)

    def content(self) -> CheckpointContent:
        """Everything that defines the run at this step; tensors as they are until the next one. Collective."""
        meta = {
            "step": self.step,
            "samples": self.samples,
            "tokens": self.tokens,
            "anomalies": self.anomalies.state(),
            "recipe": self.recipe.model_dump(mode="json"),
            "data_fingerprint": self.prepared.fingerprint,
            "metrics": expressible(self.numbers),
            "versions": software_versions(),
        }
        files = tokenizer_files(self.prepared.tokenizer_dir) if self.runtime.ranks.is_first else {}
        blocks = [*collect(self.recipe.model, self.model.held, self.optimizer), *self.training_data.state()]
        return CheckpointContent(self.step, blocks, meta, files)


def _data(recipe: Recipe, runtime: Runtime, data_progress: DataProgress) -> PreparedData:
    """The prepared data: made by the first rank, and once more on each machine that does not see what that one made."""
    made: list[PreparedData] = []

    def make() -> None:
        with data_progress() as progress:
            made.append(prepare_recipe_data(recipe, progress=progress))

    weights = runtime.ranks.run_on_rank0(lambda: _check_inputs(recipe))
    runtime.ranks.run_on_rank0(make)
    runtime.ranks.run_on_all(lambda: make() if runtime.local_rank == 0 and runtime.rank > 0 else None)
    prepared = runtime.ranks.run_on_all(lambda: made[0] if made else open_prepared(recipe.prepared_dir))
    if recipe.data.mode == "online":  # the manifest may be of another run, which read the same text elsewhere
        prepared = prepared.with_sources(runtime.ranks.run_on_rank0(lambda: made[0].manifest.sources))
    check_consistent(runtime.ranks, {"data": {"content of the prepared tokens": prepared.fingerprint}})
    check_vocabulary(prepared, recipe.model.vocab_size)
    if weights is not None:
        check_same_tokenizer(weights, prepared)
    return prepared


def _training_data(recipe: Recipe, runtime: Runtime, prepared: PreparedData) -> Samples:
    """The samples; what has to be planned for them is planned by the first rank, for those that see its files."""
    data, batch, seed = recipe.data, recipe.batch.global_batch, recipe.training.seed
    if data.mode == "online":
        online = OnlineData(prepared, data, seed, batch, recipe.data_parallel(runtime.world))
        return OnlineSamples(online, runtime.ranks)

    def make() -> TrainingData:
        return TrainingData(prepared, data, seed)

    total = recipe.total_steps * batch
    runtime.ranks.run_on_rank0(lambda: make().refuse_too_short(total))
    return PreparedSamples(runtime.ranks.run_on_all(make), total)


def _check_inputs(recipe: Recipe) -> Path | None:
    """What can be known to be wrong before the work of preparing the text is said before.

    Returns:
        The checkpoint whose weights the run starts from, if the recipe names one.
    """
    check_tokenizer(recipe.data, recipe.model.vocab_size)
    init_from = recipe.checkpoint.init_from
    return resolve(Path(init_from)) if init_from is not None else None


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted fields."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        fields |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return fields


def build_job(
    recipe: Recipe,
    runtime: Runtime,
    folder: RunFolder,
    data_progress: DataProgress = no_progress,
    require_step: int | None = None,
    earlier: EarlierAttempt | None = None,
) -> Job:
    """Build a run and bring it to where its newest valid checkpoint left off. Collective.

    Args:
        recipe: of the run.
        runtime: this process of it.
        folder: of the run, held.
        data_progress: opens a display for the time that text is prepared.
        require_step: the step that the newest valid checkpoint has to be of; None takes what there is.
        earlier: what the attempt before this one left; None in the first one.

    Raises:
        HlatError: of any kind; each names what is wrong and what would work.
    """
    check_consistent(runtime.ranks, {"recipe": _flat(recipe.model_dump(mode="json")), "code": code_identity()})
    seed_generators(recipe.training.seed)
    prepared = _data(recipe, runtime, data_progress)
    length, seed = recipe.data.sequence_length, recipe.training.seed
    training_data = _training_data(recipe, runtime, prepared)
    validation_data = None
    if prepared.validation_tokens:
        validation_data = ValidationData(prepared, length, recipe.evaluation.sequences, recipe.data.isolate)
    damaged: list[Damage] = []
    store, tiers = _kept_states(recipe, runtime, folder, damaged)
    anomalies = AnomalyPolicy(recipe.anomalies, recipe.batch.global_batch, recipe.tokens_per_step)
    newest, changes = tiers.newest(require_step), []
    refuse_lost(runtime.ranks, folder.path, newest.step if newest is not None else None, earlier, damaged)
    recipe, precision = resolve_precision(recipe, runtime, read_saved_run(newest)[0] if newest is not None else None)
    if newest is not None:
        changes = check_resume(*read_saved_run(newest), recipe, prepared.fingerprint)
    fresh = newest is None and recipe.checkpoint.init_from is None
    model = build_parallel(recipe, runtime, seed if fresh else None)
    optimizer = build_optimizer(model.held, recipe.optimizer, recipe.precision.mode, seed)
    if newest is not None:
        runtime.ranks.run_on_all(lambda: restore(newest, recipe.model, model.held, optimizer))
        runtime.ranks.run_on_all(lambda: training_data.restore(newest))
        anomalies.restore(newest.meta.get("anomalies"))
    elif recipe.checkpoint.init_from is not None:
        load_weights(Path(recipe.checkpoint.init_from), recipe.model, model.held, runtime.ranks)
    return Job(
        recipe=recipe,
        runtime=runtime,
        prepared=prepared,
        training_data=training_data,
        validation_data=validation_data,
        model=model,
        optimizer=optimizer,
        folder=folder,
        store=store,
        tiers=tiers,
        peak=runtime.ranks.run_on_rank0(lambda: peak_flops(runtime.device, MODES[recipe.precision.mode].compute)),
        step=newest.step if newest is not None else 0,
        saved=Saved(newest.step, newest.path) if newest is not None else None,
        changes=changes,
        damaged=damaged,
        anomalies=anomalies,
        precision=precision,
        numbers=_numbers(newest.meta) if newest is not None else None,
    )


def _kept_states(
    recipe: Recipe, runtime: Runtime, folder: RunFolder, damaged: list[Damage]
) -> tuple[CheckpointStore, Tiers]:
    """Open the run's checkpoints and the other places that keep its state. Collective.

    Args:
        recipe: of the run.
        runtime: this process of it.
        folder: of the run; gets the run's number.
        damaged: gets what is found damaged, now and later.
    """
    disk = disk_of(recipe, runtime.rank)
    store = CheckpointStore(
        recipe.run_dir / "checkpoints",
        recipe.checkpoint.keep_last,
        recipe.checkpoint.keep_every_steps,
        on_damage=lambda path, problems: damaged.append(Damage(path, problems)),
        disk=disk,
        ranks=runtime.ranks,
        folder=folder,
    )
    run_id = RunId(recipe.run_dir, recipe.run.name)
    tiers = Tiers(
        recipe.checkpoint,
        store,
        run_id,
        rank_info().node,
        runtime.ranks,
        on_damage=lambda path, problems: damaged.append(Damage(path, problems)),
        disk=disk,
    )
    folder.run_id = runtime.ranks.run_on_rank0(
        run_id.ensure
    )  # not before: a prefix of an object store may give it its own
    return store, tiers


def _numbers(meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read a checkpoint's step metrics; None where the step is not logged or was saved without."""
    numbers = with_non_finite(meta.get("metrics"))
    return numbers if isinstance(numbers, dict) and numbers.get("step") == meta.get("step") else None
