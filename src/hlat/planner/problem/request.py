"""The request of a plan: model, cluster, training budget and precision.

    PlanQuestion (preset | config.json | recipe | "llama-class-5.1b", numbers), cluster
        -> PlanRequest, every default resolved | PlanError, RecipeError

The last kind of name is for sizes that no preset has (shapes.py).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from hlat.config import (
    PRESETS,
    AdamWConfig,
    BatchSchedule,
    ModelConfig,
    OptimizerConfig,
    RampStage,
    Recipe,
    RecipeError,
    load_recipe,
    model_section,
    near_presets,
    preset_called,
    short,
)
from hlat.hardware import Chip, Cluster, PriceKind, Site, load_catalog
from hlat.model import count_parameters
from hlat.planner.problem.loss_law import PlannedLoss
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.shapes import llama_class
from hlat.planner.problem.workload import RECOMPUTE_POLICIES, RecomputePolicy, borrowed_constants
from hlat.precision import AUTO, MODES, resolve_mode
from hlat.runtime.errors import HardwareError, PlanError
from hlat.runtime.quantities import short_count

_ADAMW = AdamWConfig()
_SITE = Site()
_NOT_ASKED = PlanQuestion()
_TOKENS_PER_PARAMETER = 20  # default budget: Hoffmann et al. 2022, table 3
_DEFAULT_TOKENS_PER_STEP = 4 << 20  # as in HLAT and LLaMA


@dataclass(frozen=True)
class PlanRequest:
    """A run to be planned."""

    name: str  # of the model, as the user gave it
    model: ModelConfig
    cluster: Cluster
    tokens: int  # of the whole run
    sequence: int  # tokens
    global_batch: int  # sequences per step
    mode: str = "mixed"  # precision mode, one of MODES
    price: PriceKind | None = None  # None for the first kind in the catalog
    recipe: Recipe | None = None  # of the model, if it came from one
    assumed: tuple[str, ...] = ()  # defaults that were filled in, a sentence each
    optimizer: OptimizerConfig = _ADAMW  # AdamW without a recipe
    ramp: tuple[RampStage, ...] = ()  # stages with smaller batches at the beginning
    site: Site = _SITE  # file system and power overhead
    tokens_assumed: bool = False  # neither options nor a recipe say how many tokens
    deterministic: bool | None = None  # run.deterministic; None for auto
    asked: PlanQuestion = _NOT_ASKED  # the question that it answers, if it came from one

    @property
    def micro_batch(self) -> int | None:
        """Sequences of a data-parallel rank, as the recipe has them; None if they are searched."""
        is_open = self.recipe is None or self.asked.search or not self.recipe.gives("batch.micro_batch")
        return None if is_open or self.recipe is None else self.recipe.batch.micro_batch

    @property
    def recompute(self) -> tuple[RecomputePolicy, ...]:
        """Policies of activation checkpointing: the recipe's, or all that are searched."""
        field = "memory.activation_checkpointing"
        is_open = self.recipe is None or self.asked.search or not self.recipe.gives(field)
        written = None if is_open or self.recipe is None else self.recipe.memory.activation_checkpointing
        # A memory budget is not predicted: a plan takes one of the policies instead.
        return tuple(policy for policy in RECOMPUTE_POLICIES if policy == written) or RECOMPUTE_POLICIES

    @property
    def network_is_assumed(self) -> bool:
        """True if the rate between several instances is the catalog's, and nobody stated it."""
        if self.cluster.count == 1 or self.asked.network is not None:
            return False
        known = load_catalog().instance(self.cluster.instance.name)
        return self.asked.hardware is None or (known is not None and known.network == self.cluster.instance.network)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a global batch; after the ramp, if there is one."""
        return self.global_batch * self.sequence

    @cached_property
    def loss(self) -> PlannedLoss | None:
        """Loss at the end of the run, by a ladder; None without one. PlanError: the ladder says too little."""
        try:
            planned = self._planned_recipe
            return self.asked.law.forecast(self.model, self.sequence, self.tokens, self.tokens_per_step, planned)
        except PlanError as error:
            raise PlanError(f"{self.name}, {short_count(self.tokens)} tokens: {error}") from error

    @property
    def _planned_recipe(self) -> Recipe | None:
        """The recipe with what options say instead: its loss is that of the run that is planned."""
        if self.recipe is None:
            return None
        return self.recipe.having(
            {
                "training.steps": None,
                "training.tokens": self.tokens,
                "data.sequence_length": self.sequence,
                "batch.global_batch": self.global_batch,
                "batch.ramp": self.ramp,
                "precision.mode": self.asked.precision or self.recipe.precision.mode,
            }
        )

    @property
    def steps(self) -> int:
        if self.recipe is not None and self.recipe.stages:
            return self.recipe.total_steps
        return self.batches.count(math.ceil(self.tokens / self.sequence))

    @property
    def batches(self) -> BatchSchedule:
        return BatchSchedule.of(self.global_batch, self.ramp, self.sequence)

    @property
    def stages(self) -> dict[str, "PlanRequest"]:
        """Requests of the recipe's stages, by name; empty without stages."""
        if self.recipe is None or not self.recipe.stages:
            return {}
        return {
            stage.name: self._of_stage(one)
            for stage, one in zip(self.recipe.stages, self.recipe.each_stage(), strict=True)
        }

    def _of_stage(self, stage: Recipe) -> "PlanRequest":
        return replace(
            self,
            model=_same_object(stage.model),
            tokens=stage.stage_tokens,
            sequence=stage.data.sequence_length,
            global_batch=stage.batch.global_batch,
            recipe=stage,
            optimizer=stage.optimizer,
            ramp=tuple(stage.batch.ramp),
            # No question leads to a stage alone; a ladder forecasts the end of a run.
            asked=replace(self.asked, model=None, ladder=None),
        )


def resolve_request(question: PlanQuestion, cluster: Cluster, price: PriceKind | None = None) -> PlanRequest:
    """Resolve every field of a request: what the question says, else recipe, else model, else a default.

    Args:
        question: model, numbers, precision and site; what else it asks is left to others.
        cluster: devices to train on.
        price: kind of price; None for the first kind in the catalog.

    Raises:
        PlanError: invalid numbers, an unknown model or an unknown price; lists every problem.
        RecipeError: a recipe or config.json with mistakes.
    """
    model, tokens = str(question.model), question.tokens
    sequence, global_batch = question.sequence, question.global_batch
    problems = _problems(question, cluster, price)
    loaded = None
    try:
        loaded = _load_model(model)
    except PlanError as error:
        problems.append(str(error))
    if problems or loaded is None:
        raise PlanError("\n".join(problems))
    config, recipe = _same_object(loaded[0]), loaded[1]
    if recipe is not None and recipe.stages:
        _check_stages(question)
    assumed = []
    if sequence is None:
        sequence = recipe.data.sequence_length if recipe else min(config.max_sequence_length or 4096, 8192)
        assumed += [] if recipe else [f"sequences of {sequence:,} tokens (--sequence-length)"]
    # The ramp's stages are sizes on the way to the recipe's own batch: another batch has none.
    ramp = recipe.batch.ramp if recipe and global_batch is None else ()
    if global_batch is None:
        global_batch = recipe.batch.global_batch if recipe else _default_batch(sequence, cluster.devices)
        assumed += [] if recipe else [f"steps of {global_batch:,} sequences, about 4 million tokens (--global-batch)"]
    tokens_assumed = tokens is None and recipe is None
    if tokens is None:
        if recipe is not None:
            tokens = recipe.total_tokens
        else:
            tokens = _TOKENS_PER_PARAMETER * count_parameters(config).total
            assumed.append(f"{short_count(tokens)} tokens, 20 per parameter (--tokens)")
    requested = question.precision or (recipe.precision.mode if recipe else AUTO)
    mode = resolve_mode(requested, has_fast_bf16(cluster.chip))
    if requested == AUTO:
        assumed.append(f"precision {mode}, which is what precision.mode=auto is on {cluster.chip.name} (--precision)")
    if borrowed := borrowed_constants(cluster.chip.family or "measured"):
        assumed.append(borrowed)
    if mode == "fp8" and cluster.chip.flops("float8") is None:  # from a recipe; _problems checks the option
        raise PlanError(f"precision.mode fp8: {cluster.chip.name} does not support fp8 products; use --precision mixed")
    if ramp:
        assumed.append(
            f"memory and time of a step with the final batch, {global_batch:,} sequences; days and cost include the "
            "smaller steps of batch.ramp"
        )
    optimizer = recipe.optimizer if recipe is not None else AdamWConfig()
    return PlanRequest(
        model,
        config,
        cluster,
        tokens,
        sequence,
        global_batch,
        mode,
        price,
        recipe,
        tuple(assumed),
        optimizer,
        tuple(ramp),
        question.site,
        tokens_assumed,
        None if recipe is None else recipe.run.determinism,
        question,
    )


@lru_cache(maxsize=64)
def _same_object(model: ModelConfig) -> ModelConfig:
    """Return one object for equal models: sizes are remembered by its identity, for all clusters of a question."""
    return model


def has_fast_bf16(chip: Chip) -> bool:
    """True if the chip multiplies faster in bf16 than in fp32, as runtime/backend/device.py has it."""
    return (chip.flops("bfloat16") or 0.0) > (chip.flops("float32") or 0.0)


def _default_batch(sequence: int, devices: int) -> int:
    """Sequences per step: about 4 million tokens, in a number that data-parallel ranks divide evenly."""
    wanted = max(1, _DEFAULT_TOKENS_PER_STEP // sequence)
    divisor = devices
    while divisor > wanted:
        divisor = divisor // 2 if divisor % 2 == 0 else 1
    return max(divisor, round(wanted / divisor) * divisor)


def names_tokens(model: str) -> bool:
    """Return True if a model comes with a number of tokens, since it is a recipe; PlanError, RecipeError."""
    return _load_model(model)[1] is not None


def has_stages(model: str) -> bool:
    """Return True if a model is a recipe with stages; errors as ``names_tokens``."""
    recipe = _load_model(model)[1]
    return recipe is not None and bool(recipe.stages)


def _check_stages(question: PlanQuestion) -> None:
    """Raise PlanError for options that a recipe with stages does not take."""
    given = [name for name, value in _numbers(question) if value is not None]
    model, problems = question.model, []
    if given:
        problems.append(f"{', '.join(given)}: each stage of {model} says its own; leave it out, or change the recipe")
    if question.ladder is not None:
        problems.append(f"--ladder: the law of a ladder is of runs without stages, and {model} has some; leave it out")
    if problems:
        raise PlanError("\n".join(problems))


def _numbers(question: PlanQuestion) -> list[tuple[str, int | None]]:
    return [
        ("--tokens", question.tokens),
        ("--sequence-length", question.sequence),
        ("--global-batch", question.global_batch),
    ]


def _problems(question: PlanQuestion, cluster: Cluster, price: PriceKind | None) -> list[str]:
    """Mistakes in the options, the model excepted."""
    mode = question.precision
    problems = [
        f"{name} {value}: must be a positive number"
        for name, value in _numbers(question)
        if value is not None and value < 1
    ]
    if mode is not None and mode not in (AUTO, *MODES):
        problems.append(f"--precision {mode}: unknown mode; choose one of {', '.join((AUTO, *MODES))}")
    elif mode == "fp8" and cluster.chip.flops("float8") is None:
        problems.append(f"--precision fp8: {cluster.chip.name} does not support fp8 products; use mixed")
    try:
        cluster.price(price)
    except HardwareError as error:
        problems.append(str(error))
    return problems


def _load_model(name: str) -> tuple[ModelConfig, Recipe | None]:
    if name in PRESETS:
        return ModelConfig.model_validate({**PRESETS[name], "preset": name}), None
    if (section := llama_class(name)) is not None:
        return ModelConfig.model_validate(section), None
    path = Path(name)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        return model_section(str(path)), None
    try:
        recipe = _load_recipe(name)
    except RecipeError as error:
        if (
            path.exists()
            or path.suffix in (".yaml", ".yml")
            or all("no such recipe" not in each.reason for each in error.problems)
        ):
            raise
        if (preset := preset_called(name)) is not None:
            return _load_model(preset)
        near = near_presets(name.rpartition("/")[2])
        others = "a config.json, a recipe, or a size, as in llama-class-5b"
        raise PlanError(f"unknown model {short(name)}. The nearest presets are {near}; or give {others}.") from error
    return recipe.model, recipe


def _load_recipe(name: str) -> Recipe:
    try:
        return load_recipe(name)
    except RecipeError as error:
        if any(problem.path != "data.path" for problem in error.problems):
            raise
        # A plan reads no data.
        return load_recipe(name, ("data.path=none",))
