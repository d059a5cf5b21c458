"""The recipe: every section together, and the values that one section takes from another.

    sections --Recipe--> steps, tokens, folders, batches: BatchSchedule
    Recipe --recipe_schema--> the JSON schema of recipe files, for editors

The batch schedule says where every global batch of a run begins in the sequence of samples:

    batch.ramp (stages), batch.global_batch
        samples  0 ......... 8 ......... 16 ................ 32 ................ 48 ...
        batches  |     0     |     1     |         2         |         3         |   4 ...
                 | stage of size 8       | batch.global_batch = 16 ...

Boundaries are in the space of samples: a batch that a run skips still takes its place. So the size of a step's batch
is a function of the position in the data, which is one integer.

A recipe file may leave out more than a resolved recipe: a preset stands for the numbers of a model, and includes stand
for whole sections.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import PrivateAttr, SerializeAsAny, ValidationError

from hlat.config.errors import Problem, RecipeError
from hlat.config.own_parts import TASKS
from hlat.config.sections.base import ComponentSection, OwnPart, Section, forks
from hlat.config.sections.data import DataConfig
from hlat.config.sections.model import HF_NAMES, ModelConfig
from hlat.config.sections.operation import (
    AnomalyConfig,
    CheckpointConfig,
    FaultConfig,
    IntegrityConfig,
    RecoveryConfig,
    TrackingConfig,
)
from hlat.config.sections.training import (
    AdamWConfig,
    AnyOptimizerConfig,
    BatchConfig,
    EvaluationConfig,
    MemoryConfig,
    ParallelConfig,
    PrecisionConfig,
    RampStage,
    RunConfig,
    ScheduleConfig,
    StageConfig,
    TrainingConfig,
)
from hlat.config.stages import StagePlace, stage_recipes
from hlat.runtime.terminal import plural


@dataclass(frozen=True)
class BatchSchedule:
    """Sizes of a run's global batches, in order."""

    size: int  # sequences of each batch after the ramp
    ramp: tuple[tuple[int, int], ...] = ()  # number of batches and their size, of each part before the last
    lengths: tuple[int, ...] = ()  # tokens of a sequence in each part, the last one too

    @classmethod
    def of(cls, global_batch: int, ramp: Sequence[RampStage], sequence_length: int) -> "BatchSchedule":
        # The tokens of a stage are rounded up to whole batches.
        stages = ((-(-stage.tokens // (stage.global_batch * sequence_length)), stage.global_batch) for stage in ramp)
        parts = tuple(stages)
        return cls(global_batch, parts, (sequence_length,) * (len(parts) + 1))

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*(size for _, size in self.ramp), self.size)

    def _stages(self) -> Iterator[tuple[int, int, int]]:
        """Yield number and first sample of each stage's first batch, and its size, from the last stage back."""
        starts, number, sample = [], 0, 0
        for count, size in self.ramp:
            starts.append((number, sample, size))
            number, sample = number + count, sample + count * size
        return reversed([*starts, (number, sample, self.size)])

    def first_of(self, number: int) -> int:
        """Return the first sample of batch ``number``, counted from 0: the samples of all batches before it."""
        return next(sample + (number - start) * size for start, sample, size in self._stages() if number >= start)

    def containing(self, sample: int) -> int:
        return next(start + (sample - first) // size for start, first, size in self._stages() if sample >= first)

    def number_of(self, first: int) -> int:
        """Return the number of the batch that begins with sample ``first``; raises ValueError if none does."""
        number = self.containing(first) if first >= 0 else 0
        if self.first_of(number) != first:
            raise ValueError(f"no global batch begins with sample {first}")
        return number

    def batch(self, number: int) -> range:
        return range(self.first_of(number), self.first_of(number + 1))

    def batch_at(self, first: int) -> range:
        """Return the samples of the batch that begins with sample ``first``; raises ValueError if none does."""
        return self.batch(self.number_of(first))

    def tokens_before(self, number: int) -> int:
        """Return the tokens of all batches before batch ``number``."""
        parts = [(part, size * length) for (part, size), length in zip(self.ramp, self.lengths, strict=False)]
        tokens = 0
        for part, each in parts:
            tokens, number = tokens + min(part, number) * each, max(0, number - part)
        return tokens + number * self.size * self.lengths[-1]

    def tokens_of(self, number: int) -> int:
        return self.tokens_before(number + 1) - self.tokens_before(number)

    def count(self, samples: int) -> int:
        # The last batch may not be full.
        return self.containing(samples - 1) + 1 if samples > 0 else 0

    def in_steps(self, steps: int) -> list[tuple[int, int]]:
        """Return number and size of the first ``steps`` batches, by stage; stages that are not reached are left out."""
        found = []
        for count, size in self.ramp:
            found.append((min(count, steps), size))
            steps -= found[-1][0]
        return [(count, size) for count, size in (*found, (steps, self.size)) if count]


class Recipe(Section):
    """One training run, from raw text to a model."""

    def __new__(cls, *values: Any, **sections: Any) -> Self:
        # Recipe(...) refuses wrong sections with a RecipeError, as hlat.load_recipe does.
        if values or sections:
            _refuse_wrong(cls, values, sections)
        return super().__new__(cls)

    run: RunConfig = RunConfig()
    """Name, folder and device of the run."""
    model: SerializeAsAny[ModelConfig]
    """The decoder."""
    data: DataConfig
    """Text, tokenizer and samples."""
    batch: BatchConfig = BatchConfig()
    """Sequences per step and per pass."""
    optimizer: AnyOptimizerConfig = forks(AdamWConfig())
    """Optimizer and clipping."""
    schedule: SerializeAsAny[ScheduleConfig] = forks(ScheduleConfig())
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
    stages: tuple[StageConfig, ...] = ()
    """Parts of the run, in order, each with its length and what changes in it; instead of training.steps and tokens."""

    _place: StagePlace | None = PrivateAttr(None)
    _stage_defaults: tuple[Mapping[str, Any], ...] = PrivateAttr(())

    @property
    def place(self) -> StagePlace | None:
        """Place of this stage in its run; None if the recipe is of a whole run."""
        return self._place

    def placed(self, place: StagePlace | None) -> "Recipe":
        """Return the recipe as that of a stage at its place."""
        return self._with_private(_place=place)

    @property
    def stage_defaults(self) -> tuple[Mapping[str, Any], ...]:
        """Defaults, by dotted path, that gave way to what a stage gives: of each stage."""
        return self._stage_defaults or ({},) * len(self.stages)

    def with_stage_defaults(self, defaults: Sequence[Mapping[str, Any]]) -> "Recipe":
        return self._with_private(_stage_defaults=tuple(defaults))

    def _with_private(self, **values: Any) -> "Recipe":
        found = self.model_copy()
        object.__setattr__(found, "__pydantic_private__", {**(self.__pydantic_private__ or {}), **values})
        return found

    def each_stage(self) -> list["Recipe"]:
        """Return the recipe of each stage, in order; the recipe itself if it has none."""
        return stage_recipes(self) if self.stages else [self]

    def stage(self, name: str) -> "Recipe":
        """Return the recipe of a stage; RecipeError if none is called so."""
        for stage in self.each_stage():
            if stage.place is not None and stage.place.stage.name == name:
                return stage
        names = ", ".join(stage.name for stage in self.stages)
        known = f"The stages are called {names}." if names else "Leave it out: the recipe has no stages."
        raise RecipeError([Problem("stage", "there is none that is called so.", known, name, True)])

    def each_corpus(self) -> list["Recipe"]:
        """Return the first stage of each folder of prepared data; the recipe itself if it has no stages."""
        found: dict[Path, Recipe] = {}
        for stage in self.each_stage():
            found.setdefault(stage.prepared_dir, stage)
        return list(found.values())

    @property
    def corpus_tokens(self) -> int:
        """Tokens that the run reads of this recipe's prepared data, in all stages that have it."""
        stages = [self] if self._place is None else self._place.run.each_stage()
        return sum(stage.stage_tokens for stage in stages if stage.prepared_dir == self.prepared_dir)

    def by_stage(self, describe: Callable[["Recipe"], str]) -> Iterator[str]:
        """Yield what is to be said of each stage, after the names of those of which it is; without stages, that."""
        found = dict[str, list[str]]()
        for stage in self.each_stage():
            found.setdefault(describe(stage), []).append("" if stage.place is None else stage.place.stage.name)
        for text, names in found.items():
            if text:
                yield f"{', '.join(names)}: {text}" if self.stages else text

    @property
    def _whole(self) -> StagePlace | None:
        return self._place if self._place is not None or not self.stages else stage_recipes(self)[-1].place

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir or f"runs/{self.run.name}")

    @property
    def prepared_dir(self) -> Path:
        return Path(self.data.prepared_dir or self.run_dir / "data")

    @property
    def batches(self) -> BatchSchedule:
        """The global batches of the whole run."""
        if self._whole is not None:
            return self._whole.batches
        return BatchSchedule.of(self.batch.global_batch, self.batch.ramp, self.data.sequence_length)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes; after the ramp, if the recipe has batch.ramp."""
        return self.batch.global_batch * self.data.sequence_length

    @property
    def total_steps(self) -> int:
        if self._whole is not None:
            return self._whole.total
        if self.training.steps is not None:
            return self.training.steps
        assert self.training.tokens is not None, "the rules of a recipe require steps or tokens"
        # Rounded up: a run trains on at least the tokens asked for.
        return self.batches.count(-(-self.training.tokens // self.data.sequence_length))

    @property
    def total_tokens(self) -> int:
        return self.batches.tokens_before(self.total_steps)

    @property
    def stage_tokens(self) -> int:
        """Tokens of this stage; of the run if the recipe is of a whole one."""
        return self.total_tokens if self._place is None else self._place.tokens

    @property
    def steps_and_tokens(self) -> str:
        batches = self.batches
        parts = [
            (count, size * length)
            for (count, size), length in zip(batches.in_steps(self.total_steps), batches.lengths, strict=False)
        ]
        if len(parts) == 1:
            return f"{plural(self.total_steps, 'step')} of {parts[0][1]:,} tokens"
        return f"{plural(self.total_steps, 'step')}: " + ", then ".join(
            f"{n:,} of {each:,} tokens" for n, each in parts
        )

    @property
    def horizon_steps(self) -> int:
        """Steps of the learning-rate schedule, from its beginning."""
        return self.schedule.horizon_steps or self.schedule_steps

    @property
    def schedule_steps(self) -> int:
        """Steps of the run that have this schedule."""
        return self.total_steps if self._place is None else self._place.schedule_steps

    @property
    def component_bytes(self) -> int:
        """Bytes that training components keep for each parameter element, on the rank that stores it."""
        sections = [getattr(self.training, name) for name in type(self.training).model_fields]
        return sum(section.bytes_per_parameter for section in sections if isinstance(section, ComponentSection))

    @property
    def own_parts(self) -> list[str]:
        """Names of the parts of the user's own; imports nothing."""
        sections = (
            (self.model, self.model.architecture),
            (self.optimizer, self.optimizer.kind),
            (self.schedule, self.schedule.kind),
        )
        named = [name for section, name in sections if isinstance(section, OwnPart)]
        tasks = [task for task in self.evaluation.tasks if TASKS.has(task)]
        more = (self.training.loss_terms, self.training.components, tasks, self.data.formats, self.tracking.trackers)
        return [*named, *(name for names in more for name in names)]

    def in_mode(self, mode: str) -> "Recipe":
        # Validated again: model_copy would take any text for a mode.
        precision = PrecisionConfig.model_validate(self.precision.model_dump() | {"mode": mode})
        return self.model_copy(update={"precision": precision})

    def with_determinism(self, deterministic: bool) -> "Recipe":
        return self.model_copy(update={"run": self.run.model_copy(update={"deterministic": deterministic})})

    def gives(self, path: str) -> bool:
        """Return True if a field of a section, as in batch.micro_batch, was given; else it has a default."""
        section, _, name = path.partition(".")
        return section in self.model_fields_set and name in getattr(self, section).model_fields_set

    def having(self, values: Mapping[str, Any], *, given: bool = True) -> "Recipe":
        """Return the recipe with other values of some fields; not ``given``, they stay defaults.

        A field of a stage is called as in stages.1.batch.micro_batch.
        """
        found = self
        for path, value in values.items():
            section, _, name = path.partition(".")
            if section == "stages":
                number, section, name = name.split(".")
                stages = list(found.stages)
                section_values = {**getattr(stages[int(number)], section), name: value}
                stages[int(number)] = stages[int(number)].model_copy(update={section: section_values})
                found = found.model_copy(update={"stages": tuple(stages)})
                continue
            before = getattr(found, section)
            after = before.model_copy(update={name: value})
            if not given:
                object.__setattr__(after, "__pydantic_fields_set__", set(before.model_fields_set))
            fields = set(found.model_fields_set)
            found = found.model_copy(update={section: after})
            object.__setattr__(found, "__pydantic_fields_set__", fields | ({section} if given else set()))
        return found

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


def recipe_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a recipe file."""
    schema = Recipe.model_json_schema()
    schema.pop("required", None)  # an included file may hold any section
    schema["$defs"]["ModelConfig"].pop("required", None)  # a preset or a config.json may hold any number
    for section, name in (("ModelConfig", "architecture"), ("ScheduleConfig", "kind")):
        _allow_own(schema["$defs"][section], name)
    schema["properties"]["include"] = {
        "description": "Recipe file or files, relative to this one, whose sections lie underneath these.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    schema["$defs"]["ModelConfig"]["properties"]["from"] = {
        "description": "Folder of weights to start from, a checkpoint of hlat or a Hugging Face model: stands for its "
        "numbers in this section, for checkpoint.init_from and for data.tokenizer.path.",
        "anyOf": [{"type": "string"}, {"type": "null"}],
    }
    # Names of Hugging Face are accepted, and not proposed.
    schema["$defs"]["ModelConfig"]["patternProperties"] = {f"^({'|'.join(HF_NAMES)})$": {}}
    return schema


def _allow_own(section: dict[str, Any], name: str) -> None:
    """Let a section of the schema name a part of the user's own, whose options are further fields."""
    field = section["properties"][name]
    field["anyOf"] = [{"enum": field.pop("enum")}, {"pattern": ":"}]
    section["if"] = {"properties": {name: {"pattern": ":"}}, "required": [name]}
    section["then"] = {"additionalProperties": True}
    section["unevaluatedProperties"] = section.pop("additionalProperties")
