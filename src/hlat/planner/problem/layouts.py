"""Layouts of a plan: all that are possible, the one that a text names, the one of a recipe.

    PlanRequest --candidates--> degrees that divide the devices -> Candidate, if it passes all layout checks
    "tp=8,pp=4,zero=3", as --layout takes it --parse_layout--> Candidate | PlanError; layout_text writes it again
    recipe, cluster --recipe_step--> PlanRequest, Candidate | PlanError, if the cost model does not cover the recipe
    recipe, chip, world size --recipe_on_chip--> the same, in the catalog's first machine that has such chips

The checks are those of recipes (hlat.config.layout_checks), so that every candidate makes a valid recipe.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Literal, get_args

from hlat.config import (
    CHECKS as LAYOUT_CHECKS,
)
from hlat.config import (
    INTERLEAVED,
    ZERO_BUBBLE,
    ParallelConfig,
    Recipe,
    Schedule,
    Values,
    default_virtual_stages,
    divisors,
    holds,
)
from hlat.hardware import Chip, Cluster, load_catalog
from hlat.parallel import Layout, StepShape
from hlat.planner.problem.request import PlanRequest, has_fast_bf16
from hlat.planner.problem.workload import RECOMPUTE_POLICIES, RecomputePolicy, StepLayout
from hlat.precision import resolve_mode
from hlat.runtime.errors import PlanError

_MAX_CONTEXT = 16
_MIN_CONTEXT_TOKENS = 4096  # per context rank; below, other axes divide the work with less communication
_MAX_VIRTUAL_STAGES = 8
# Families of which no published run shards gradients or weights, or splits backward passes: the time model has nothing
# to be calibrated on there. A layout given with --layout is predicted all the same.
_UNCALIBRATED_FAMILIES = ("trainium",)
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_MAX_DOMAINS_PER_TENSOR_GROUP = 2  # slower than one, but --explain can then say by how much


@dataclass(frozen=True)
class Candidate(Layout):
    """One layout of a step: a recipe's ``parallel`` section, with the other settings that a plan chooses."""

    micro_batch: int  # sequences of a data-parallel rank
    recompute: RecomputePolicy  # activation checkpointing policy

    @property
    def virtual(self) -> int:
        """Stages per pipeline rank."""
        return self.parallel.stages_per_rank

    @property
    def schedule(self) -> Schedule:
        return self.parallel.schedule

    def with_zero(self, zero: Literal[0, 1, 2, 3]) -> "Candidate":
        return replace(self, parallel=self.parallel.model_copy(update={"zero": zero}))

    def step_shape(self, request: PlanRequest) -> StepShape:
        return StepShape(
            request.model,
            self.parallel,
            self.world,
            request.sequence,
            request.global_batch,
            self.micro_batch,
            request.mode,
            self.recompute,
            component_bytes=request.recipe.component_bytes if request.recipe is not None else 0,
            optimizer=request.optimizer,
        )

    def accumulation(self, global_batch: int) -> int:
        """Micro-batches per step of a data-parallel rank."""
        return global_batch // (self.micro_batch * self.data)

    def step_layout(self, request: PlanRequest) -> StepLayout:
        return StepLayout(
            self.tensor,
            self.pipeline,
            self.context,
            self.data,
            self.virtual,
            self.zero,
            self.micro_batch,
            request.global_batch,
            request.sequence,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            split_backward=self.schedule in ZERO_BUBBLE,
            gathers_again=self.parallel.gathers_again,
            replicas=self.replicas,
        )

    def __str__(self) -> str:
        words = [f"tensor {self.tensor}", f"pipeline {self.pipeline}", f"data {self.data}"]
        words += [f"context {self.context}"] * (self.context > 1)
        words += [f"{self.virtual} stages per rank"] * (self.virtual > 1)
        words += [self.schedule] * (self.pipeline > 1 and self.schedule not in ("1f1b", "interleaved-1f1b"))
        words += [f"ZeRO {self.zero}"] + [f"{self.replicas} replicas"] * (self.replicas > 1)
        words += [f"micro-batch {self.micro_batch}", f"recompute {self.recompute}"]
        words += ["gather again"] * (self.parallel.gathers_again and self.recompute != "full")
        return ", ".join(words)


# Validating a section takes as long as counting the bytes of its layout.
@lru_cache(maxsize=65536)
def parallel_section(
    tensor: int,
    pipeline: int,
    context: int,
    virtual: int,
    schedule: Schedule,
    zero: Literal[0, 1, 2, 3],
    replicas: int = 1,
    gather_again: Literal["auto", "never"] = "auto",
) -> ParallelConfig:
    """Build a recipe's section from the degrees and settings of a layout."""
    return ParallelConfig(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        virtual_stages=virtual if virtual > 1 else None,
        schedule=schedule,
        zero=zero,
        replicas=replicas,
        gather_again=gather_again,
    )


def candidates(request: PlanRequest) -> Iterator[Candidate]:
    """Yield every valid layout: all degrees, schedules, ZeRO stages, micro-batches and recomputation policies.

    Of a recipe's run, only its micro-batch and policy, unless the question asks to search.
    """
    for tensor, pipeline, context in _degrees(request):
        data = request.cluster.devices // (tensor * pipeline * context)
        if request.global_batch % data:
            continue
        sequences_per_rank = request.global_batch // data
        sharding = [(zero, 1) for zero in _zero_stages(request, pipeline, data * context)]
        if pipeline == 1 and data > 1:
            sharding += [(3, count) for count in _replicas(request, tensor * context, data)]
        sizes = _MICRO_BATCHES if request.micro_batch is None else (request.micro_batch,)
        micros = [micro for micro in sizes if sequences_per_rank % micro == 0]
        for (virtual, schedule), (zero, count) in product(_schedules(request, pipeline), sharding):
            parallel = parallel_section(tensor, pipeline, context, virtual, schedule, zero, count)
            found = [Candidate(parallel, data, micro, "none") for micro in micros]
            passing = [candidate for candidate in found if _is_valid(request, candidate)]
            if not passing:
                continue
            keeping = None
            if parallel.gathers_again:
                keeping = parallel_section(tensor, pipeline, context, virtual, schedule, zero, count, "never")
            for candidate in passing:
                yield from _kept_activations(candidate, keeping, request.recompute)


def _kept_activations(
    candidate: Candidate, keeping: ParallelConfig | None, policies: Sequence[RecomputePolicy]
) -> Iterator[Candidate]:
    """Yield a layout with every choice of what is kept for backward; ``keeping`` keeps gathered inputs."""
    parallel, data, micro = candidate.parallel, candidate.data, candidate.micro_batch
    # Gathered inputs are kept only where everything is: gathering them again frees more memory in less time than
    # recomputing attention.
    if keeping is not None and candidate.recompute in policies:
        yield Candidate(keeping, data, micro, candidate.recompute)
    for recompute in policies:
        yield Candidate(parallel, data, micro, recompute)


def _is_valid(request: PlanRequest, candidate: Candidate) -> bool:
    values = _values(request, candidate)
    return all(holds(check, values) for check in LAYOUT_CHECKS)


def layout_violations(request: PlanRequest, candidate: Candidate) -> list[str]:
    """Failed checks of a layout, as messages; empty for a valid layout."""
    values = _values(request, candidate)
    failing = [check for check in LAYOUT_CHECKS if not holds(check, values)]
    return [f"{check.__name__.replace('_', ' ')}: {reason}" for check in failing for reason in check(values)]


def _values(request: PlanRequest, candidate: Candidate) -> Values:
    model = request.model
    return Values(
        {
            "world": candidate.world,
            "model.heads": model.heads,
            "model.kv_heads": model.kv_heads,
            "model.intermediate_size": model.intermediate_size,
            "model.vocab_size": model.vocab_size,
            "model.layers": model.layers,
            "data.sequence_length": request.sequence,
            "batch.global_batch": request.global_batch,
            "batch.micro_batch": candidate.micro_batch,
            "batch.ramp": request.ramp,
            **_parallel_values(candidate.parallel),
        }
    )


@lru_cache(maxsize=1024)
def _parallel_values(parallel: ParallelConfig) -> dict[str, Any]:
    return {f"parallel.{name}": getattr(parallel, name) for name in ParallelConfig.model_fields}


def _degrees(request: PlanRequest) -> Iterator[tuple[int, int, int]]:
    devices, domain = request.cluster.devices, request.cluster.domain
    groups = request.cluster.instance.groups
    most = _MAX_DOMAINS_PER_TENSOR_GROUP * domain
    tensors = (t for t in divisors(request.model.heads) if t <= most and devices % t == 0)
    for tensor in (t for t in tensors if not groups or t in groups):
        for pipeline in (p for p in divisors(devices // tensor) if p <= request.model.layers):
            rest = devices // tensor // pipeline
            for context in (c for c in divisors(rest) if c <= _MAX_CONTEXT):
                if context == 1 or request.sequence // context >= _MIN_CONTEXT_TOKENS:
                    yield tensor, pipeline, context


def _schedules(request: PlanRequest, pipeline: int) -> list[tuple[int, Schedule]]:
    """Stages per pipeline rank, with a schedule that supports that number."""
    if pipeline == 1:
        return [(1, "1f1b")]
    layers_per_rank = request.model.layers // pipeline
    limit = min(_MAX_VIRTUAL_STAGES, layers_per_rank)
    several = [count for count in range(2, limit + 1) if layers_per_rank % count == 0]
    if request.cluster.chip.family in _UNCALIBRATED_FAMILIES:
        return [(1, "1f1b"), *((count, "interleaved-1f1b") for count in several)]
    schedules: list[tuple[int, Schedule]] = [(1, "1f1b"), *product(several, INTERLEAVED)]
    return schedules + ([(2, "zbv")] if 2 in several else [])


def _zero_stages(request: PlanRequest, pipeline: int, shards: int) -> list[Literal[0, 1, 2, 3]]:
    if shards == 1:
        return [0]
    if request.cluster.chip.family in _UNCALIBRATED_FAMILIES:
        return [0, 1]
    return [0, 1, 2, 3] if pipeline == 1 else [0, 1, 3]


def parallel_zero_stages(request: PlanRequest, layout: Candidate) -> list[Literal[0, 1, 2, 3]]:
    """ZeRO stages to choose from for a layout whose degrees are given: of one shard the layout's own."""
    shards = layout.shards
    return [layout.parallel.zero] if shards == 1 else [s for s in _zero_stages(request, layout.pipeline, shards) if s]


def _replicas(request: PlanRequest, model_ranks: int, data: int) -> list[int]:
    """Numbers of replicas for hybrid sharding: each of 1, 2, 4, ... whole domains of fast links."""
    if request.cluster.chip.family in _UNCALIBRATED_FAMILIES:
        return []
    # Weights are then gathered over few hops for every micro-batch, and only sums of gradients go to other replicas.
    # Replicas smaller than a domain would only need more memory.
    ranks = request.cluster.domain
    found = []
    while ranks < model_ranks * data:
        shards, rest = divmod(ranks, model_ranks)
        if not rest and data % shards == 0:
            found.append(data // shards)
        ranks *= 2
    return found


def layout_text(layout: Candidate) -> str:
    """Write a layout as ``parse_layout`` reads it, without the defaults of a model that is no recipe."""
    words = [f"tp={layout.tensor}"] * (layout.tensor > 1) + [f"pp={layout.pipeline}"] * (layout.pipeline > 1)
    words += [f"cp={layout.context}"] * (layout.context > 1) + [f"vpp={layout.virtual}"] * (layout.virtual > 1)
    words += [f"zero={layout.zero}"] * (layout.zero != 1) + [f"rep={layout.replicas}"] * (layout.replicas > 1)
    words += [f"mbs={layout.micro_batch}"] * (layout.micro_batch > 1)
    words += [f"recompute={layout.recompute}"] * (layout.recompute != "none")
    words += ["gather=never"] * (layout.parallel.gather_again == "never")
    implied = "interleaved-1f1b" if layout.virtual > 1 else "1f1b"
    words += [f"schedule={layout.schedule}"] * (layout.pipeline > 1 and layout.schedule != implied)
    return ",".join(words) or "tp=1"


def parse_layout(text: str, request: PlanRequest, option: str = "--layout") -> Candidate:
    """Parse a layout such as ``tp=8,pp=1``; errors name ``option``.

    Defaults: degrees 1, data parallelism over the remaining devices, ZeRO 1, 1F1B, micro-batch and recomputation of the
    recipe, else 1 and none, but inputs that sequence parallelism gathers are gathered again in backward.

    Raises:
        PlanError: malformed text, an unknown name or value, or a layout that fails a check.
    """
    values = _parse_pairs(text, option)
    degrees = (values.get("tensor", 1), values.get("pipeline", 1), values.get("context", 1))
    data, rest = divmod(request.cluster.devices, degrees[0] * degrees[1] * degrees[2])
    stated = values.get("data", data)
    if rest or stated != data:
        raise PlanError(
            f"{option} {text}: tensor {degrees[0]} x pipeline {degrees[1]} x context {degrees[2]} x data {stated} is "
            f"not the number of devices of {request.cluster.name}, {request.cluster.devices}. Give degrees whose "
            f"product divides it, as in tp={_largest_divisor(request.cluster.devices, degrees[0])}"
        )
    recompute: RecomputePolicy = values.get("recompute", request.recompute[0])
    schedule: Schedule = values.get("schedule", "interleaved-1f1b" if values.get("virtual", 1) > 1 else "1f1b")
    virtual, zero = values.get("virtual", default_virtual_stages(schedule)), values.get("zero", 1)
    gather_again = values.get("gather_again", "auto")
    parallel = parallel_section(*degrees, virtual, schedule, zero, values.get("replicas", 1), gather_again)
    candidate = Candidate(parallel, data, values.get("micro_batch", request.micro_batch or 1), recompute)
    return possible(candidate, request, f"{option} {text}")


def possible(candidate: Candidate, request: PlanRequest, words: str) -> Candidate:
    """Return the layout that some words name; PlanError with all reasons if it is not possible."""
    if reasons := layout_violations(request, candidate):
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise PlanError(f"{words}: this layout is not possible:\n{listed}")
    return candidate


_NAMES = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "dp": "data",
    "vpp": "virtual",
    "mbs": "micro_batch",
    "micro": "micro_batch",
    "ckpt": "recompute",
    "rep": "replicas",
    "gather": "gather_again",
}
_FIELDS = (
    "tensor",
    "pipeline",
    "context",
    "data",
    "virtual",
    "zero",
    "replicas",
    "micro_batch",
    "recompute",
    "gather_again",
    "schedule",
)
_SHORT_SCHEDULES = {"interleaved": "interleaved-1f1b", "zero-bubble": "interleaved-zero-bubble"}
_CHOICES: dict[str, tuple[str, ...]] = {
    "recompute": RECOMPUTE_POLICIES,
    "gather_again": ("auto", "never"),
    "schedule": get_args(Schedule),
}


def _largest_divisor(devices: int, most: int) -> int:
    return next(degree for degree in range(min(devices, max(most, 1)), 0, -1) if devices % degree == 0)


def _parse_pairs(text: str, option: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        name, equals, value = pair.partition("=")
        name = _NAMES.get(name.strip(), name.strip())
        if not equals or name not in _FIELDS:
            known = ", ".join((*_NAMES, *_FIELDS))
            raise PlanError(f"{option}: {pair!r} is not NAME=VALUE; the names are {known}")
        if name in _CHOICES:
            value = _SHORT_SCHEDULES.get(value, value)
            if value not in _CHOICES[name]:
                raise PlanError(f"{option}: {pair}: {name} is one of {', '.join(_CHOICES[name])}")
            values[name] = value
        elif (
            not value.strip().isdecimal() or (int(value) < 1 and name != "zero") or (name == "zero" and int(value) > 3)
        ):
            raise PlanError(f"{option}: {pair}: must be an integer of at least 1 (zero: 0 to 3)")
        else:
            values[name] = int(value)
    return values


def recipe_on_chip(recipe: Recipe, chip: Chip, world: int) -> tuple[PlanRequest, Candidate]:
    """Describe the steps of a recipe on ``world`` devices of a chip; PlanError: as for both functions below."""
    return recipe_step(recipe, machines_with(chip, world), world)


def machines_with(chip: Chip, world: int) -> Cluster:
    """Return the catalog's first kind of machine with a chip, as many as have ``world`` devices.

    PlanError: the catalog has no machine or no figures of the chip.
    """
    instance = next((one for one in load_catalog().instances if one.chip == chip.name), None)
    if instance is None or not chip.can_be_planned:
        raise PlanError(f"the catalog has no machine with {chip.name}, or not its memory and rates")
    chips = -(-world // chip.devices)
    part = instance.with_chips(min(chips, instance.chips))
    return Cluster(part, chip, -(-chips // part.chips))


def recipe_step(recipe: Recipe, cluster: Cluster, world: int | None = None) -> tuple[PlanRequest, Candidate]:
    """Describe the steps of a recipe on a cluster, in the precision mode that ``auto`` is there.

    Args:
        recipe: valid for as many processes.
        cluster: may have more devices than there are processes.
        world: number of processes; None for all devices of the cluster.

    Raises:
        PlanError: the recipe keeps activations by a memory budget, which plans do not predict.
    """
    recipe = recipe.in_mode(resolve_mode(recipe.precision.mode, has_fast_bf16(cluster.chip)))
    policies = {policy: policy for policy in RECOMPUTE_POLICIES}
    policy = recipe.memory.activation_checkpointing
    if policy not in policies:
        raise PlanError(f"memory.activation_checkpointing={policy} is not predicted; {', '.join(policies)} are")
    request = PlanRequest(
        recipe.run.name,
        recipe.model,
        cluster,
        recipe.stage_tokens,
        recipe.data.sequence_length,
        recipe.batch.global_batch,
        recipe.precision.mode,
        recipe=recipe,
        optimizer=recipe.optimizer,
        ramp=tuple(recipe.batch.ramp),
        deterministic=recipe.run.determinism,
    )
    data = (world or cluster.devices) // recipe.parallel.model_ranks
    return request, Candidate(recipe.parallel, data, recipe.batch.micro_batch, policies[policy])
