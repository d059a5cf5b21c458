"""State of a run: everything it consists of, built in one order by all its processes together.

    same recipe and code on all ranks -> data -> newest checkpoint, precision -> this rank's shard of the model,
        optimizer -> checkpoint loaded into both
    newest state found -> check_nothing_lost -> continue; StateLostError if a newer one is known to have been durable

Continuing from an older state is right if the newer one was found damaged: that is reported, and the damaged checkpoint
is set aside. If there is no trace of the newer one, somebody removed it, or another folder is in place of the run's.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hlat.checkpoint import (
    BAD_SUFFIX,
    Checkpoint,
    CheckpointContent,
    CheckpointStore,
    RecipeChange,
    RunId,
    Tiers,
    check_resume,
    collect,
    load_weights,
    read_saved_run,
    software_versions,
    step_of_path,
    tokenizer_files,
)
from hlat.config import Recipe
from hlat.data import (
    Batch,
    PreparedData,
)
from hlat.forecast import ForecastWatch
from hlat.hardware import PeakFlops, peak_again, peak_flops
from hlat.model import flops_per_token
from hlat.optim import Optimizer
from hlat.parallel import ParallelModel, build_parallel
from hlat.precision import AUTO, MODES
from hlat.resilience import AnomalyPolicy
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.join import Runtime, check_consistent, code_identity
from hlat.runtime.errors import StateLostError
from hlat.runtime.process import rank_info
from hlat.runtime.progress import enter_stage
from hlat.runtime.randomness import seed_generators
from hlat.runtime.storage.run_folder import EarlierAttempt, RunFolder
from hlat.tracking import OtherRankTracker, Tracker, flat_fields, from_json_value, read_valid_records, to_json_value
from hlat.training.batches import BatchSource
from hlat.training.components import ComponentList, StateChanges, load_state
from hlat.training.faulty_disk import checkpoint_disk
from hlat.training.numerics import Arithmetic, resolve_determinism, resolve_precision
from hlat.training.optional_components import requested_components, requested_optimizer
from hlat.training.run_data import DataProgress, open_data
from hlat.training.stages import find_stage, stage_record
from hlat.training.validation.evaluation import Evaluation


@dataclass(frozen=True)
class SavedCheckpoint:
    """Newest checkpoint that this process has saved or resumed from."""

    step: int
    path: Path


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint, or a rank's file of a snapshot, that failed verification: its present path and its problems."""

    path: Path | str
    problems: list[str]

    @property
    def step(self) -> int:
        """Step in the checkpoint's name; -1 if there is none."""
        step = step_of_path(Path(self.path))
        return -1 if step is None else step


def report_damaged(damaged: Sequence[DamagedCheckpoint], tracker: Tracker | OtherRankTracker) -> None:
    """Record checkpoints that were found damaged and set aside."""
    for checkpoint in damaged:
        tracker.event("checkpoint_damaged", path=str(checkpoint.path), problems=checkpoint.problems)
        tracker.warn(f"damaged checkpoint set aside: {checkpoint.path}: {'; '.join(checkpoint.problems)}")


def check_nothing_lost(
    ranks: HostGroup,
    run_dir: Path,
    found: int | None,
    earlier: EarlierAttempt | None,
    damaged: Sequence[DamagedCheckpoint],
) -> None:
    """Check that the newest state found is as new as the durable one, or that the newer one is damaged. Collective.

    ``found`` is the step of the newest valid state, ``earlier`` has the step known to be durable; None for no such.
    ``damaged`` are checkpoints just set aside; only rank 0's list is used.

    Raises:
        StateLostError: a durable state is missing.
    """
    if earlier is None or (found or 0) >= earlier.saved:
        return

    def check() -> None:
        # set aside by an earlier attempt
        set_aside = [step_of_path(path) for path in run_dir.glob(f"checkpoints/*{BAD_SUFFIX}*")]
        if any(step is not None and step >= earlier.saved for step in [*set_aside, *(each.step for each in damaged)]):
            return
        newest = "there is none now" if found is None else f"the newest one now is of step {found}"
        raise StateLostError(
            f"run.dir {run_dir}: the state of step {earlier.saved} was durable, but {newest}, although none was found "
            "damaged. It was removed, or another folder is in its place. Restore it. To continue from what is there, "
            "give the same command again."
        )

    ranks.run_on_rank0(check)


_DOUBTFUL = 0.8  # share of a measured peak that no training reaches
_PEAK_TRIES = 3  # further measurements, of a third of a second each


@dataclass
class RunState:
    """State of a run, ready for its next step."""

    recipe: Recipe  # with precision.mode resolved
    runtime: Runtime
    prepared: PreparedData
    sets: Mapping[str, PreparedData]  # of evaluation.sets, by name
    training_data: BatchSource
    evaluation: Evaluation
    model: ParallelModel  # this rank's shard
    optimizer: Optimizer
    folder: RunFolder
    store: CheckpointStore
    tiers: Tiers  # snapshots and object store
    peak: PeakFlops
    recipe_changes: list[RecipeChange]  # differences from the recipe of the loaded checkpoint
    damaged: list[DamagedCheckpoint]  # checkpoints found damaged and set aside
    anomalies: AnomalyPolicy
    components: ComponentList  # those that the recipe asks for; their state is part of every checkpoint
    component_changes: StateChanges  # components without state in the loaded checkpoint, and state without a component
    arithmetic: Arithmetic  # what computes the model
    precision_note: str | None  # explains the choice of precision.mode=auto, or warns of a mode that is slow here
    step: int = 0  # optimizer steps done so far
    saved: SavedCheckpoint | None = None  # newest checkpoint, if there is one
    mode_was_chosen: bool = False  # precision.mode was auto
    begins_stage: bool = False  # the loaded checkpoint is of an earlier stage
    saved_arithmetic: Arithmetic | None = None  # what did when the loaded checkpoint was saved
    unwritten_metrics: dict[str, Any] | None = (
        None  # of the step just done, for its line of metrics, until that is written
    )
    initial_weights: str | None = None  # identity of those of checkpoint.init_from, if this process began with them
    last_batch: Batch | None = None  # this rank's sequences of the last step
    peak_tries: int = 0  # further measurements of the peak
    forecast_watch: ForecastWatch = field(default_factory=ForecastWatch)

    @property
    def samples(self) -> int:
        """Sequences consumed so far, skipped ones included: the position in the data."""
        return self.anomalies.skipped.position_after(self.step)

    @property
    def tokens(self) -> int:
        """Tokens of the steps done so far, without those of skipped samples."""
        return self.anomalies.skipped.tokens_of(self.step)

    @property
    def next_batch(self) -> int:
        """Number of the global batch that the next step reads."""
        return self.anomalies.skipped.next_batch(self.step)

    @property
    def run_recipe(self) -> Recipe:
        """The recipe of the whole run: with its stages, and what is resolved in ``recipe``."""
        place, resolved = self.recipe.place, {"precision": self.recipe.precision, "run": self.recipe.run}
        return self.recipe if place is None else place.run.model_copy(update=resolved)

    @property
    def leaves_stage(self) -> bool:
        """True if the next step belongs to another stage: a later one, or after a rollback an earlier one."""
        place = self.recipe.place
        if place is None:
            return False
        return self.next_batch < place.first or (self.next_batch >= place.stop and not place.is_last)

    def data_notes_at_end(self) -> list[str]:
        """Return notes on checksums compared late; raises DataError if one differs. Collective."""
        # Shards are compared while the model trains, so that it starts at once.
        read = (self.prepared, *self.sets.values())
        return self.runtime.ranks.run_on_rank0(lambda: [note for data in read for note in data.notes_at_end()])

    def utilization(self, tokens_per_second: float) -> dict[str, float]:
        """Return the model FLOP/s utilization, a share of the peak of all devices, by metric; none if that is too low.

        A peak that a step comes near was measured beside another program: rank 0, which records it, measures it again.
        """
        flops = {name: each * tokens_per_second / self.runtime.world for name, each in self._flops_per_token.items()}
        most = max(flops.values())
        if most > _DOUBTFUL * self.peak.value and self.peak_tries < _PEAK_TRIES and self.runtime.ranks.is_first:
            self.peak_tries += 1
            dtype = MODES[self.recipe.precision.mode].compute
            self.peak = peak_again(self.peak, self.runtime.device, dtype)
        return {} if most > self.peak.value else {name: each / self.peak.value for name, each in flops.items()}

    @cached_property
    def _flops_per_token(self) -> dict[str, float]:
        model, length = self.recipe.model, self.recipe.data.sequence_length
        return {"mfu": flops_per_token(model, length, "causal"), "mfu_full": flops_per_token(model, length, "full")}

    def check_folder(self) -> None:
        """Raise StateLostError on every rank if the run's folder is gone. Collective."""
        self.runtime.ranks.run_on_all(self.folder.check)

    def content(self) -> CheckpointContent:
        """Return all that a checkpoint of this step holds. Its tensors are valid until the next step. Collective."""
        meta = {
            "step": self.step,
            "samples": self.samples,
            "tokens": self.tokens,
            "anomalies": self.anomalies.state(),
            "recipe": self.recipe.model_dump(mode="json"),
            "data_fingerprint": self.prepared.fingerprint,
            "evaluation": self.evaluation.identity,
            "metrics": to_json_value(self.unwritten_metrics),
            "versions": software_versions() | self.arithmetic.names(),
            **({} if self.recipe.run.ladder is None else {"forecast_watch": asdict(self.forecast_watch)}),
            **self._of_stage(),
        }
        files = tokenizer_files(self.prepared.tokenizer_dir) if self.runtime.ranks.is_first else {}
        extra = self.components.state()
        blocks = [
            *collect(self.recipe.model, self.model.local_parameters, self.optimizer, extra),
            *self.training_data.state(),
        ]
        return CheckpointContent(self.step, blocks, meta, files)

    def _of_stage(self) -> dict[str, Any]:
        place = self.recipe.place
        # ``recipe`` is that of the stage, which describes these weights; a fork begins with that of the run.
        whole = {} if place is None else {"run_recipe": place.run.model_dump(mode="json")}
        return whole | ({} if place is None else {"stage": stage_record(self.recipe)})


def build_run_state(
    recipe: Recipe,
    runtime: Runtime,
    folder: RunFolder,
    data_progress: DataProgress = nullcontext,
    require_step: int | None = None,
    earlier: EarlierAttempt | None = None,
) -> RunState:
    """Build a run and load its newest valid checkpoint, if there is one. Collective.

    ``require_step`` is the step that this checkpoint must have; None accepts any, or none. ``earlier`` is the durable
    step and run id of the previous attempt. The folder has to be locked.

    Raises:
        HlatError: any subclass; the message says what is wrong and what would work.
    """
    # First: ranks with different recipes or code would hang in some later collective.
    check_consistent(runtime.ranks, {"recipe": flat_fields(recipe.model_dump(mode="json")), "code": code_identity()})
    seed_generators(recipe.training.seed)
    damaged: list[DamagedCheckpoint] = []
    # A run that is refused for its text leaves no checkpoints; with stages, a checkpoint says which text.
    opened = None if recipe.stages else open_data(recipe, runtime, data_progress)
    enter_stage("looking for a checkpoint")
    store, tiers = _open_storage(recipe, runtime, folder, damaged)
    newest = tiers.newest(require_step)
    check_nothing_lost(runtime.ranks, folder.path, newest.step if newest is not None else None, earlier, damaged)
    recipe, saved_by = find_stage(recipe, newest)
    begins_stage = newest is not None and saved_by is not recipe
    prepared, training_data, sets, evaluation = opened or open_data(recipe, runtime, data_progress)
    anomalies = AnomalyPolicy(recipe.anomalies, recipe.batches, recipe.data.sequence_length)
    asked_for = recipe.precision.mode
    recipe, precision_note, arithmetic = _settle_arithmetic(recipe, runtime, newest)
    recipe_changes = _check_resume(newest, saved_by if begins_stage else None, recipe, prepared, evaluation, arithmetic)
    fresh = newest is None and recipe.checkpoint.init_from is None
    enter_stage("building the model")
    # Weights that are loaded below need not be initialised.
    model = build_parallel(recipe, runtime, recipe.training.seed if fresh else None)
    optimizer = requested_optimizer(recipe, model)
    components = requested_components(recipe, model.local_parameters)
    changes, initial_weights = StateChanges(), None
    if newest is not None:
        enter_stage("loading weights")
        changes = runtime.ranks.run_on_all(lambda: load_state(newest, recipe, model, optimizer, components))
        runtime.ranks.run_on_all(lambda: training_data.restore(newest))
        anomalies.restore(newest.meta.get("anomalies"))
        if begins_stage:
            anomalies.begin_stage()
    else:
        initial_weights = _load_initial_weights(recipe, runtime, model)
        components.reset()
    if runtime.ranks.is_first:
        for data in (prepared, *sets.values()):
            data.check_while_training()
    enter_stage("finding the peak speed of the device")
    return RunState(
        recipe=recipe,
        runtime=runtime,
        prepared=prepared,
        sets=sets,
        training_data=training_data,
        evaluation=evaluation,
        model=model,
        optimizer=optimizer,
        folder=folder,
        store=store,
        tiers=tiers,
        peak=runtime.ranks.run_on_rank0(lambda: peak_flops(runtime.device, MODES[recipe.precision.mode].compute)),
        recipe_changes=recipe_changes,
        damaged=damaged,
        anomalies=anomalies,
        components=components,
        component_changes=changes,
        precision_note=precision_note,
        mode_was_chosen=asked_for == AUTO,
        begins_stage=begins_stage,
        arithmetic=arithmetic,
        initial_weights=initial_weights,
        **_of_checkpoint(newest, arithmetic, begins_stage),
    )


def _of_checkpoint(newest: Checkpoint | None, arithmetic: Arithmetic, begins_stage: bool) -> dict[str, Any]:
    """Return the fields of a state that a checkpoint has."""
    if newest is None:
        return {}
    return {
        "step": newest.step,
        "saved": SavedCheckpoint(newest.step, newest.path),
        "saved_arithmetic": None if begins_stage else arithmetic.saved_in(newest.meta.get("versions", {})),
        "unwritten_metrics": _saved_metrics(newest.meta),
        "forecast_watch": ForecastWatch(**newest.meta.get("forecast_watch", {})),
    }


def _check_resume(
    newest: Checkpoint | None,
    stage_before: Recipe | None,
    recipe: Recipe,
    prepared: PreparedData,
    evaluation: Evaluation,
    arithmetic: Arithmetic,
) -> list[RecipeChange]:
    """Return how a run differs from the one that saved a checkpoint; CheckpointError if it cannot go on from there.

    ``stage_before`` is the stage that saved it, if another one begins.
    """
    if newest is None:
        return []
    saved_recipe, fingerprint = read_saved_run(newest)
    if stage_before is not None:
        settled = stage_before.model_copy(update={"precision": recipe.precision, "run": recipe.run})
        return check_resume(saved_recipe, fingerprint, settled, fingerprint, newest.step)
    changes = check_resume(saved_recipe, fingerprint, recipe, prepared.fingerprint, newest.step)
    arithmetic.check_resume(newest.meta.get("versions", {}), recipe, changes)
    return changes + evaluation.changes_since(newest.meta.get("evaluation", {}))


def _settle_arithmetic(
    recipe: Recipe, runtime: Runtime, newest: Checkpoint | None
) -> tuple[Recipe, str | None, Arithmetic]:
    """Resolve precision and determinism as the checkpoint has them; the text explains the choice. Collective."""
    saved_recipe = read_saved_run(newest)[0] if newest is not None else None
    # Before the model is built: the mode decides about the dtype of the weights.
    recipe, note = resolve_precision(recipe, runtime, saved_recipe)
    recipe = resolve_determinism(recipe, runtime, saved_recipe)
    arithmetic = Arithmetic.of(recipe, runtime)
    check_consistent(runtime.ranks, {"kernels": arithmetic.by_subject()})
    return recipe, note, arithmetic


def _load_initial_weights(recipe: Recipe, runtime: Runtime, model: ParallelModel) -> str | None:
    """Load the weights of ``checkpoint.init_from`` and return their identity; None if there are none. Collective."""
    weights = recipe.checkpoint.init_from
    if weights is None:
        return None
    enter_stage("loading weights")
    before = runtime.ranks.run_on_rank0(lambda: _earlier_weights(recipe))
    return load_weights(weights, recipe.model, model.local_parameters, runtime.ranks, before)


def _earlier_weights(recipe: Recipe) -> str | None:
    """Return the identity of the weights that this run began with before; None if unknown or others."""
    # A run that starts anew, before its first checkpoint, must begin with the same weights as before.
    events, _ = read_valid_records(recipe.run_dir / "events.jsonl")
    begun = [event for event in events if event.get("init_from") == recipe.checkpoint.init_from]
    found = begun[-1].get("init_sha256") if begun else None
    return found if isinstance(found, str) else None


def _open_storage(
    recipe: Recipe, runtime: Runtime, folder: RunFolder, damaged: list[DamagedCheckpoint]
) -> tuple[CheckpointStore, Tiers]:
    """Open checkpoint store, snapshots and object store; ``damaged`` receives bad checkpoints. Collective."""
    disk = checkpoint_disk(recipe, runtime.rank)
    store = CheckpointStore(
        recipe.run_dir / "checkpoints",
        recipe.checkpoint.keep_last,
        recipe.checkpoint.keep_every_steps,
        on_damage=lambda path, problems: damaged.append(DamagedCheckpoint(path, problems)),
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
        on_damage=lambda path, problems: damaged.append(DamagedCheckpoint(path, problems)),
        disk=disk,
    )
    folder.run_id = runtime.ranks.run_on_rank0(run_id.ensure)  # last: an object-store prefix may have a run id already
    return store, tiers


def _saved_metrics(meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the step metrics saved in a checkpoint; None if its step is not logged or it has none."""
    metrics = from_json_value(meta.get("metrics"))
    return metrics if isinstance(metrics, dict) and metrics.get("step") == meta.get("step") else None
