"""The values that a recipe leaves open, chosen by the size of its model and by the device: one function for each.

    recipe file --load_run_recipe--> Recipe; open values of a run that has begun are those of its own recipe.yaml
    Recipe, processes, machines --resolve_defaults--> Recipe with every value, Choices: fields, values, reason
        machines are not known --> the defaults of the sections (``hlat.config.layout_rules``)

What a recipe gives is never changed. `hlat init` writes values of the same functions into its drafts, and a plan
searches the same layouts. Sources: batch and learning rate by compute, DeepSeek LLM (arXiv 2401.02954), equation 1,
fitted from 1e17 to 2e19 FLOPs and used outside of that range here; rates are limited to those that small models are
known to bear, and by Step Law (arXiv 2503.04715), which is lower for large models, as published runs of them are, and
for little text. Interval of checkpoints: Daly 2006, as plans have it.

A resumed run never changes. Torch is imported only for accelerators, whose memory is planned; a supervisor, which does
without, leaves that to the process that checks the start.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from os import sysconf
from typing import TYPE_CHECKING, Any, Literal

import yaml

from hlat.config import CHECKS, Recipe, Values, holds, load_recipe
from hlat.hardware import Cluster, installed_chip, load_catalog
from hlat.model import count_parameters, flops_per_token
from hlat.runtime.backend.table import absent_device, expects_accelerator
from hlat.runtime.errors import PlanError
from hlat.runtime.storage.run_folder import RECIPE_NAME, is_foreign_recipe

if TYPE_CHECKING:
    from hlat.planner.search import LayoutPrediction

_LARGEST_RATE = 3e-3
_CONTINUED = 0.1  # of the rate: a model that is trained already continues at a tenth of it
LEAST_STEPS = 200  # that a choice of batch leaves of a number of tokens
_WARMUP, _MOST_WARMUP = 0.02, 2000
_SAVE_SECONDS = 600.0
_RAREST_SAVE = 3600.0  # plans count failures of machines; runs end for other reasons too
_HOST_RATE = 1e11  # FLOP/s that steps of a CPU surely reach: what they do reach takes seconds to measure
_HOST_TOKENS = 4096  # of a micro-batch: caches of a CPU are small
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_FINALISTS = 4

LAYOUT = ("batch.micro_batch", "memory.activation_checkpointing", "parallel.zero")
CHOSEN = ("batch.global_batch", *LAYOUT, "schedule.warmup_steps", "optimizer.lr", "checkpoint.every_steps")
"""Fields that are chosen where a recipe does not give them, in this order: later ones depend on earlier ones."""


@dataclass(frozen=True)
class Choice:
    """Values chosen for some fields, and why."""

    values: Mapping[str, Any]
    reason: str

    def __str__(self) -> str:
        return f"{', '.join(f'{path}={value}' for path, value in self.values.items())}: {self.reason}"

    @property
    def overrides(self) -> list[str]:
        return _words(self.values)


def _words(values: Mapping[str, Any]) -> list[str]:
    return [f"{path}={json.dumps(value)}" for path, value in values.items()]


def load_run_recipe(path: str, overrides: Sequence[str] = (), *, world: int | None = None) -> Recipe:
    """Load a recipe for ``world`` processes; what it leaves open is as its run began, if that has a checkpoint.

    RecipeError: as ``load_recipe``, with every problem.
    """
    recipe = load_recipe(path, overrides, world=world)
    begun = _begun_values(recipe, world)
    return load_recipe(path, [*overrides, *_words(begun)], world=world) if begun else recipe


def compute_batch(flops: float) -> float:
    """Tokens per step that are best for an amount of compute."""
    return 0.2920 * float(flops**0.3271)


def peak_rate(flops: float, tokens: float, *, trained: bool) -> float:
    """Peak rate of a model, ``trained`` already or new, for an amount of compute that is spent on so many tokens."""
    # 8B on 160B tokens: 5.7e-4 and 4.4e-4; 70B on 1.4T: 3.3e-4 and 1.8e-4. LLaMA 3 took 3e-4 and 1.5e-4.
    by_compute, by_size = 0.3118 * flops**-0.125, 1.79 * (flops / tokens / 6) ** -0.713 * tokens**0.307
    rate = min(_LARGEST_RATE, by_compute, by_size) * (_CONTINUED if trained else 1.0)
    return float(f"{rate:.1e}")  # two digits, for people: the law is no more exact


def warmup_steps(steps: int) -> int:
    """Steps of warm-up for a run of ``steps``."""
    return min(_MOST_WARMUP, round(_WARMUP * steps))


def save_every(steps: int, step_seconds: float) -> int:
    """Steps between checkpoints that are about ten minutes apart; at most the steps of the run."""
    return max(1, min(steps, round(_SAVE_SECONDS / step_seconds)))


def held_tokens(memory: float, parameters: int, *, is_host: bool) -> float:
    """Tokens of a micro-batch whose activations a fifth of a memory holds."""
    # A sample keeps about 34 bytes per token, layer and unit of width (Korthikanti et al. 2022, equation 2, without the
    # scores of attention). Layers times width is 1.6 times the root of the parameters in LLaMA 7B, and below 3.5 for
    # the shapes that are drafted: 5 errs on the safe side.
    tokens = memory / 5 / (34 * 5 * sqrt(parameters))
    return min(tokens, _HOST_TOKENS) if is_host else tokens


def resolve_defaults(
    recipe: Recipe, world: int | None = None, on: Cluster | None = None, *, here: bool = True
) -> tuple[Recipe, list[Choice]]:
    """Choose the values that a recipe leaves open; return it with them, as if they had been given, and the choices.

    Args:
        recipe: valid for as many processes.
        world: number of processes; None for one copy of the model.
        on: machines of the run; None for this one.
        here: False if it starts on machines that are not known.
    """
    choices = list[Choice]()
    opened = _open_paths(recipe)
    if "batch.global_batch" in opened[0]:
        first = recipe.each_stage()[0]
        size = _global_batch(first, max(world or 1, first.parallel.model_ranks))
        reason = "samples per step, best for this much compute (arXiv 2401.02954)"
        choices.append(Choice({"batch.global_batch": size}, reason))
        recipe = recipe.having(choices[0].values)
    for number, paths in enumerate(opened):
        # The first stage decides for the whole run. Each of them has a layout of its own.
        stage = recipe.each_stage()[number]
        if number:  # defaults that gave way become values of the stage
            left = {path: value for path, value in recipe.stage_defaults[number].items() if not stage.gives(path)}
            recipe = recipe.having(_of_stage(number, left))
        for choice in _choices(stage, paths, max(world or 1, stage.parallel.model_ranks), on, here=here):
            choices.append(replace(choice, values=_of_stage(number, choice.values)))
            recipe = recipe.having(choices[-1].values)
    return recipe, choices


def _open_paths(recipe: Recipe) -> list[list[str]]:
    """Return the fields that are to be chosen: of the recipe, and of each of its stages after the first."""
    later = [
        (*LAYOUT, *(["schedule.warmup_steps"] if stage.schedule else [])) for stage in recipe.stages[1:]
    ]  # a stage that names a schedule begins it
    return [
        [path for path in fields if not stage.gives(path)]
        for stage, fields in zip(recipe.each_stage(), [CHOSEN, *later], strict=True)
    ]


def _of_stage(number: int, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"stages.{number}.{path}" if number else path: value for path, value in values.items()}


def _begun_values(recipe: Recipe, world: int | None) -> dict[str, Any]:
    """Values, in the recipe of a run that has begun, of fields that its recipe now leaves open."""
    folder, stages, opened = recipe.run_dir, recipe.each_stage(), _open_paths(recipe)
    # A folder that cannot be read has an error of its own.
    with suppress(OSError, ValueError, yaml.YAMLError, AttributeError):
        # Without a checkpoint a run starts again, perhaps with another model.
        if not any(opened) or is_foreign_recipe(folder) or not any(folder.glob("checkpoints/step-*")):
            return {}
        content = yaml.safe_load((folder / RECIPE_NAME).read_text(encoding="utf-8"))
        by_name = {stage["name"]: stage for stage in content.get("stages") or ()}
        found = dict[str, Any]()
        for number, (stage, paths) in enumerate(zip(stages, opened, strict=True)):
            begun = by_name.get(recipe.stages[number].name, {}) if number else content
            values = {
                f"{section}.{name}": begun[section][name]
                for section, name in (path.split(".") for path in paths)
                if name in begun.get(section, {})
            }
            # On fewer processes than before it may not divide the batch any more: then it is chosen again.
            ranks = 1 if world is None else stage.data_parallel(world)
            if values.get("batch.global_batch", stage.batch.global_batch) % (
                values.get("batch.micro_batch", 1) * ranks
            ):
                values.pop("batch.micro_batch", None)
            found |= _of_stage(number, values)
        return found
    return {}


def _choices(recipe: Recipe, paths: list[str], world: int, on: Cluster | None, *, here: bool) -> Iterator[Choice]:
    """Yield the choices for some fields but the batch, each after the earlier ones have been made."""
    layout = {path for path in LAYOUT if path in paths}
    cluster = on if on is not None or not here else _machines_here(recipe, world)
    is_host = here and on is None and not expects_accelerator(recipe.run.device)
    planned = None
    with suppress(PlanError):  # a memory budget, or a cluster that fails too often: the cost model has no answer
        planned = None if cluster is None else _planned(recipe, layout, cluster, world)
    if layout and planned is not None and cluster is not None:
        yield _planned_layout(planned, layout, cluster)
    elif "batch.micro_batch" in layout and is_host:
        yield _host_layout(recipe, world)
    flops = float(flops_per_token(recipe.model, recipe.data.sequence_length)) * recipe.total_tokens
    trained = recipe.checkpoint.init_from is not None
    if "schedule.warmup_steps" in paths:
        goes_on = recipe.place is not None and recipe.place.from_current
        reason = f"{_WARMUP:.0%} of the steps, at most {_MOST_WARMUP:,}"
        warmup = Choice({"schedule.warmup_steps": _warmup(recipe)}, reason)
        yield Choice({"schedule.warmup_steps": 0}, "goes on from the rate before") if goes_on else warmup
    if "optimizer.lr" in paths:
        best = "a tenth of what is best" if trained else "peak rate, best"
        reason = f"{best} by the lower of two laws, at most {_LARGEST_RATE:g} (arXiv 2401.02954, 2503.04715)"
        yield Choice({"optimizer.lr": peak_rate(flops, recipe.total_tokens, trained=trained)}, reason)
    if "checkpoint.every_steps" in paths and (planned is not None or is_host):
        yield _saving(recipe, flops / recipe.total_steps / world, planned)


def _global_batch(recipe: Recipe, world: int) -> int:
    """Samples per step: the best for the run's compute in a power of two for each data-parallel rank."""
    length = recipe.data.sequence_length
    per_token = float(flops_per_token(recipe.model, length))
    tokens, steps = recipe.training.tokens, recipe.training.steps
    if recipe.place is not None and all(stage.tokens for stage in recipe.place.run.stages):
        tokens = sum(stage.tokens or 0 for stage in recipe.place.run.stages)
    if tokens is not None:
        wanted = min(compute_batch(per_token * tokens), tokens / LEAST_STEPS) / length
    else:
        # B = a (c B)^b, since the compute of a number of steps depends on the batch: B = (a c^b)^(1 / (1 - b)).
        wanted = compute_batch(per_token * (steps or 1)) ** (1 / (1 - 0.3271)) / length
    # Whole micro-batches for every rank of a pipeline, where they are given.
    micro = recipe.batch.micro_batch if recipe.gives("batch.micro_batch") else 1
    size = max(1, world // recipe.parallel.model_ranks) * micro * recipe.parallel.pipeline
    while 2 * size <= wanted:
        size *= 2
    return size


def _sizes(recipe: Recipe, world: int) -> list[int]:
    """Micro-batches that are possible in the run's layout, the smallest first."""
    sections = ("model", "data", "batch", "parallel")
    fields = {f"{name}.{field}": value for name in sections for field, value in getattr(recipe, name)}
    values = Values({**fields, "world": world})
    possible = (values.having("batch.micro_batch", size) for size in _MICRO_BATCHES)
    found = [one("batch.micro_batch") for one in possible if all(holds(check, one) for check in CHECKS)]
    return found or [recipe.batch.micro_batch]


def _host_layout(recipe: Recipe, world: int) -> Choice:
    memory = sysconf("SC_PAGE_SIZE") * sysconf("SC_PHYS_PAGES") / world
    tokens = held_tokens(memory, count_parameters(recipe.model).total, is_host=True)
    fitting = [size for size in _sizes(recipe, world) if size * recipe.data.sequence_length <= tokens]
    return Choice({"batch.micro_batch": max(fitting, default=1)}, f"at most {_HOST_TOKENS:,} tokens at a time on a CPU")


def _machines_here(recipe: Recipe, world: int) -> Cluster | None:
    """Machines as this one, by what its driver says without being started; None if the catalog has no such chip."""
    if not expects_accelerator(recipe.run.device) or absent_device(recipe.run.device):
        return None
    chip = installed_chip(load_catalog())
    if chip is None:
        return None
    from hlat.planner.problem.layouts import machines_with  # noqa: PLC0415 - imports torch

    try:
        return machines_with(chip, world)
    except PlanError:
        return None


# Of the nominal memory: some cards have 8 % less, and a start compares with what they really have.
_ROOM = 0.88


def _planned(recipe: Recipe, layout: set[str], cluster: Cluster, world: int) -> "LayoutPrediction | None":
    """Predict the fastest layout that fits, of those that are open, or the one that needs least; None without any.

    PlanError: the recipe is not planned.
    """
    from hlat.planner.cost.step_time import step_times  # noqa: PLC0415
    from hlat.planner.memory import estimated_ranks  # noqa: PLC0415 - imports torch
    from hlat.planner.problem.layouts import (  # noqa: PLC0415
        Candidate,
        layout_violations,
        parallel_zero_stages,
        recipe_step,
    )
    from hlat.planner.problem.workload import RECOMPUTE_POLICIES  # noqa: PLC0415
    from hlat.planner.search import break_tie, predict_layout, workload_columns  # noqa: PLC0415

    request, written = recipe_step(recipe, cluster, world)
    sizes = _sizes(recipe, world) if "batch.micro_batch" in layout else [written.micro_batch]
    policies = RECOMPUTE_POLICIES if "memory.activation_checkpointing" in layout else (written.recompute,)
    stages: list[Literal[0, 1, 2, 3]] = [written.parallel.zero]
    if "parallel.zero" in layout:
        stages = parallel_zero_stages(request, written)
    tried = [
        Candidate(written.with_zero(zero).parallel, written.data, size, policy)
        for size, policy, zero in product(sizes, policies, stages)
    ]
    tried = [one for one in tried if not layout_violations(request, one)]
    if not tried:
        return None
    limit = _ROOM * cluster.memory_bytes
    times = step_times(workload_columns(request, tried)).step
    fitting = []
    for index in sorted(range(len(tried)), key=lambda index: float(times[index])):
        if max(estimated_ranks(request, tried[index], limit)) <= limit:
            found = predict_layout(request, tried[index])
            if found.peak_memory <= limit:
                fitting.append(found)
        if len(fitting) == _FINALISTS:
            break
    if fitting:
        return break_tie(request, sorted(fitting, key=lambda one: one.step_seconds))
    return predict_layout(request, min(tried, key=lambda one: max(estimated_ranks(request, one))))


def _planned_layout(planned: "LayoutPrediction", layout: set[str], cluster: Cluster) -> Choice:
    candidate = planned.candidate
    found = dict(zip(LAYOUT, (candidate.micro_batch, candidate.recompute, candidate.zero), strict=True))
    gib = 2**30
    memory = (
        f"{planned.peak_memory / gib:.0f} of {cluster.memory_bytes / gib:.0f} GiB; MFU {planned.mfu:.0%} by the plan"
    )
    best = "the fastest that fits" if planned.peak_memory <= _ROOM * cluster.memory_bytes else "what needs least"
    return Choice(
        {path: value for path, value in found.items() if path in layout}, f"{best} on {cluster.name}: {memory}"
    )


def _warmup(recipe: Recipe) -> int:
    end = recipe.horizon_steps
    steps = recipe.total_steps if recipe.place is None else end
    decay = round(recipe.schedule.decay_fraction * end) if recipe.schedule.kind == "wsd" else 0
    return max(0, min(warmup_steps(steps), end - decay - 1))


def _saving(recipe: Recipe, step_flops: float, planned: "LayoutPrediction | None") -> Choice:
    """Choose the interval of a plan, or that of a CPU of ``_HOST_RATE`` for its share of a step's FLOPs."""
    steps = recipe.total_steps
    if planned is None:
        every = save_every(steps, step_flops / _HOST_RATE)
        return Choice({"checkpoint.every_steps": every}, "about every ten minutes, or rarer")
    interval = min(_RAREST_SAVE, planned.reliability.interval)
    every = max(1, min(steps, round(interval / planned.step_seconds)))
    why = "for the least time lost" if interval < _RAREST_SAVE else "though failures of machines are rarer"
    return Choice({"checkpoint.every_steps": every}, f"every {interval / 60:.0f} minutes, {why}")
