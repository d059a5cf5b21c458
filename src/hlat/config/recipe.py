"""The recipe: every section together, and the values that one section takes from another."""

from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from hlat.config.batch_schedule import BatchSchedule
from hlat.config.errors import Problem, RecipeError
from hlat.config.sections.base import ComponentSection, Section
from hlat.config.sections.data import DataConfig
from hlat.config.sections.model import ModelConfig
from hlat.config.sections.optimizers import AdamWConfig, AnyOptimizerConfig
from hlat.config.sections.parallel import MemoryConfig, ParallelConfig
from hlat.config.sections.recovery import AnomalyConfig, CheckpointConfig, FaultConfig, IntegrityConfig, RecoveryConfig
from hlat.config.sections.tracking import TrackingConfig
from hlat.config.sections.training import (
    BatchConfig,
    EvaluationConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)
from hlat.runtime.terminal_text import plural


class Recipe(Section):
    """One training run, from raw text to a model."""

    def __new__(cls, *values: Any, **sections: Any) -> Self:
        """Refuse wrong sections of ``Recipe(...)`` with a RecipeError, as ``hlat.load_recipe`` does."""
        if values or sections:
            _refuse_wrong(cls, values, sections)
        return super().__new__(cls)

    run: RunConfig = RunConfig()
    """Name, folder and device of the run."""
    model: ModelConfig
    """The decoder."""
    data: DataConfig
    """Text, tokenizer and samples."""
    batch: BatchConfig = BatchConfig()
    """Sequences per step and per pass."""
    optimizer: AnyOptimizerConfig = AdamWConfig()
    """Optimizer and clipping."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over the steps."""
    training: TrainingConfig
    """Length of the run, seed and logging."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and keeping the state."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Validation during training."""
    precision: PrecisionConfig = PrecisionConfig()
    """Dtypes of weights, products and optimizer state."""
    parallel: ParallelConfig = ParallelConfig()
    """Degrees of parallelism."""
    memory: MemoryConfig = MemoryConfig()
    """Activation checkpointing: computation traded for memory."""
    tracking: TrackingConfig = TrackingConfig()
    """Console, TensorBoard, and services that get the metrics."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Restarts, hangs, deadlines."""
    anomalies: AnomalyConfig = AnomalyConfig()
    """Reaction to losses and gradients that are not finite, and to spikes."""
    integrity: IntegrityConfig = IntegrityConfig()
    """Detection of silent data corruption."""
    faults: tuple[FaultConfig, ...] = ()
    """Faults to inject, to rehearse recovery."""

    @property
    def run_dir(self) -> Path:
        """Folder of everything the run writes."""
        return Path(self.run.dir or f"runs/{self.run.name}")

    @property
    def prepared_dir(self) -> Path:
        """Folder of the prepared token shards."""
        return Path(self.data.prepared_dir or self.run_dir / "data")

    @property
    def batches(self) -> BatchSchedule:
        """Boundaries of the global batches in the sequence of samples."""
        return BatchSchedule.of(self.batch.global_batch, self.batch.ramp, self.data.sequence_length)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes; after the ramp, if the recipe has batch.ramp."""
        return self.batch.global_batch * self.data.sequence_length

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.training.steps is not None:
            return self.training.steps
        assert self.training.tokens is not None, "the rules of a recipe require steps or tokens"
        return self.batches.count(-(-self.training.tokens // self.data.sequence_length))

    @property
    def total_tokens(self) -> int:
        """Tokens that the steps of the whole run consume."""
        return self.batches.first_of(self.total_steps) * self.data.sequence_length

    @property
    def steps_and_tokens(self) -> str:
        """Steps of the run and their tokens, in words, for the user."""
        length, parts = self.data.sequence_length, self.batches.in_steps(self.total_steps)
        if len(parts) == 1:
            return f"{plural(self.total_steps, 'step')} of {parts[0][1] * length:,} tokens"
        return f"{plural(self.total_steps, 'step')}: " + ", then ".join(
            f"{n:,} of {size * length:,} tokens" for n, size in parts
        )

    @property
    def horizon_steps(self) -> int:
        """Step at which the learning-rate schedule ends."""
        return self.schedule.horizon_steps or self.total_steps

    @property
    def component_bytes(self) -> int:
        """Bytes that training components keep for each parameter element, on the rank that stores it."""
        sections = [getattr(self.training, name) for name in type(self.training).model_fields]
        return sum(section.bytes_per_parameter for section in sections if isinstance(section, ComponentSection))

    def in_mode(self, mode: str) -> "Recipe":
        """The same recipe with this ``precision.mode``."""
        precision = PrecisionConfig.model_validate(self.precision.model_dump() | {"mode": mode})
        return self.model_copy(update={"precision": precision})

    def with_determinism(self, deterministic: bool) -> "Recipe":
        """The same recipe with this ``run.deterministic``."""
        return self.model_copy(update={"run": self.run.model_copy(update={"deterministic": deterministic})})

    def data_parallel(self, world: int) -> int:
        """The data-parallel degree on ``world`` processes; the recipe must have been validated for them."""
        degree, rest = divmod(world, self.parallel.model_ranks)
        assert rest == 0 and degree > 0, "the rules of a recipe require it"
        return degree

    def micro_batches(self, world: int = 1) -> int:
        """Micro-batches of a data-parallel rank in a step after the ramp, on ``world`` processes."""
        count, rest = divmod(self.batch.global_batch, self.batch.micro_batch * self.data_parallel(world))
        assert rest == 0, "the rules of a recipe require it"
        return count


def _refuse_wrong(recipe: type[Recipe], values: tuple[Any, ...], sections: dict[str, Any]) -> None:
    """Raise RecipeError with every problem if ``Recipe(*values, **sections)`` is no recipe."""
    remedy = "hlat.load_recipe takes a file, the name of a shipped recipe, or a mapping of sections."
    if values:
        raise RecipeError([Problem("hlat.Recipe", "takes sections by name, as in model={...}.", remedy)], "hlat.Recipe")
    try:
        recipe.model_validate(sections)
    except ValidationError as error:
        from hlat.config.load import parse_recipe  # noqa: PLC0415  (it explains errors in the recipe's own words)

        plain = {name: value.model_dump() if isinstance(value, Section) else value for name, value in sections.items()}
        parse_recipe(plain, "hlat.Recipe")
        reason = "fills in nothing that follows from other fields, such as the numbers of model.preset."
        raise RecipeError([Problem("hlat.Recipe", reason, remedy)], "hlat.Recipe") from error
