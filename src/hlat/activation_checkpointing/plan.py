"""Activation plan: the steps that each block of a rank recomputes, and the bytes that it saves.

    recipe, model shard, world size -> workload of the rank
    schedule, rank, micro-batches --passes_in_flight--> forward passes that wait for their backward pass
    sizes of the rank, step --RecomputeCosts--> FLOPs, or their equivalent in time
    candidate policies, each with bytes saved and cost --cheapest, budget--> a policy for every block -> ActivationPlan

The schedules are those of ``torch.distributed.pipelining``; tests compare the passes in flight with torch's order.

The cost of a step is the FLOPs of its matrix products + bytes of memory traffic x 300 + bytes over links x 2,000. The
factors are the balance of a machine: an H100 has 989 TFLOP/s in bf16, 3.35 TB/s of memory bandwidth and NVLink with
450 GB/s in each direction (NVIDIA's data sheet), hence 295 and 2,200 FLOPs in the time of a byte; an A100 156 and
1,040. They matter only for the order of choices: per byte freed in bf16, a norm or the SwiGLU product costs 600 to 900
FLOPs, a matrix product about the model width, and attention about the sequence length.

All blocks are alike. So the relaxed problem (fractions of blocks) is solved by the lower convex hull of the policies:
all blocks use one of two neighbouring policies on the hull. With an integer number of blocks, at most one block is left
between the two, and gets the cheapest policy that still fits. The cost exceeds the optimum by less than the difference
of the two neighbours. Few different policies are an advantage of their own: each is compiled once.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

from hlat.config import Fix, ModelConfig, ParallelConfig, Problem, Recipe, RecipeError
from hlat.model import (
    RECOMPUTABLE,
    ModelShard,
    RankWorkload,
    activation_bytes,
    attended_positions,
    builds_masks,
    shard_heads,
)
from hlat.precision import MODES


def passes_in_flight(parallel: ParallelConfig, pipeline_rank: int, micro_batches: int) -> int:
    """Return the maximum number of a rank's passes in flight; a split backward ends with its weight gradients."""
    ranks, stages = parallel.pipeline, parallel.stages_per_rank
    total = micro_batches * stages
    # Without a pipeline, each backward pass follows its forward pass.
    if ranks == 1:
        return 1
    if parallel.schedule == "gpipe":
        return total
    if parallel.schedule == "1f1b":
        return min(total, ranks - pipeline_rank)  # Narayanan et al. 2021, section 2.2
    if parallel.schedule == "zbv":
        return min(total, 2 * ranks)  # Qi et al. 2024: the memory of 1f1b; each stage has half of a rank's layers
    # Interleaved schedules run micro-batches in rounds, one stage of the rank after the other.
    per_round = micro_batches // max(1, micro_batches // ranks)
    earlier = (stages - 1) * per_round
    if parallel.schedule == "interleaved-1f1b":
        return min(total, earlier + 2 * (ranks - 1 - pipeline_rank) + 1)
    # interleaved-zero-bubble: fewer passes before the first backward pass, weight gradients `rank` passes later.
    return min(total, earlier + ranks)


_FLOPS_PER_MEMORY_BYTE = 300.0
_FLOPS_PER_LINK_BYTE = 2000.0


@dataclass(frozen=True)
class RecomputeCosts:
    """Recomputation costs of one micro-batch in one block on a rank; see ``activation_bytes`` for the attributes."""

    config: ModelConfig
    batch: int
    sequence_length: int
    mode: str
    workload: RankWorkload

    def by_name(self) -> dict[str, float]:
        """Return the cost of each name of ``hlat.model.spec.RECOMPUTABLE``, in FLOPs or their equivalent."""
        config, shard = self.config, self.workload.shard
        here, inner = shard_heads(config, shard), config.intermediate_size // shard.tensor_count
        width, heads = config.hidden_size, here.queries * config.n_head_dim
        keys_and_values = 2 * here.kvs * config.n_head_dim
        entering = self._pointwise(2 * width) / self._shards + self._link(width if self._shards > 1 else 0)
        gathered = keys_and_values * self.workload.context if self.workload.context > 1 else 0
        attended = attended_positions(config, self.sequence_length)
        attention = 2.0 * self._tokens * heads * 2 * attended + self._link(gathered)
        # An all-reduce sends each element twice, a reduce-scatter once.
        summed = 0 if shard.has_full_layers else width if self.workload.sequence else 2 * width
        adding = self._pointwise(3 * width) / self._shards + self._link(summed)
        return {
            "attention_input": entering,
            "qkv": self._product(width, heads + keys_and_values) + self._pointwise(2 * (heads + keys_and_values)),
            "attention_log_sum": attention,
            "attention_output": attention,
            "residual": self._product(heads, width) + adding,
            "feed_forward_input": entering,
            "gate_up": self._product(width, 2 * inner),
            "inner": self._pointwise(3 * inner),
            "down_weight_copy": self._cast(inner * width),
        }

    @property
    def _tokens(self) -> int:
        return self.batch * self.sequence_length // self.workload.context

    @property
    def _shards(self) -> int:
        return self.workload.shard.tensor_count if self.workload.sequence else 1

    def _product(self, width: int, rows: int) -> float:
        return 2.0 * self._tokens * width * rows + self._cast(width * rows)

    def _cast(self, elements: int) -> float:
        # Weights are cast to the dtype of the activations, unless they are stored in it.
        mode = MODES[self.mode]
        if mode.weights == mode.compute or not self.workload.weight_copies:
            return 0.0
        return _FLOPS_PER_MEMORY_BYTE * elements * (mode.weights.itemsize + mode.compute.itemsize)

    def _pointwise(self, per_token: int) -> float:
        return _FLOPS_PER_MEMORY_BYTE * self._tokens * per_token * MODES[self.mode].compute.itemsize

    def _link(self, per_token: int) -> float:
        return _FLOPS_PER_LINK_BYTE * self._tokens * per_token * MODES[self.mode].compute.itemsize


@dataclass(frozen=True)
class BlockPolicy:
    """A candidate activation checkpointing policy of a block."""

    recomputed: frozenset[str]  # names of ``hlat.model.spec.RECOMPUTABLE``
    saved: int  # bytes of activations saved by the block
    cost: float


def cheapest(policies: Sequence[BlockPolicy], blocks: int, budget: int) -> list[BlockPolicy] | None:
    """Choose a policy for each block within a budget of bytes, those that save least first; None if nothing fits.

    The cost exceeds the minimum by less than the difference of two neighbouring policies on the hull; with one block it
    is the minimum.
    """
    hull = _lower_hull(policies)
    smaller = max(
        (policy for policy in hull if policy.saved * blocks <= budget), key=lambda policy: policy.saved, default=None
    )
    if smaller is None:
        return None
    above = [policy for policy in hull if policy.saved > smaller.saved]
    if not above:
        return [smaller] * blocks
    larger = above[0]
    many = (budget - smaller.saved * blocks) // (larger.saved - smaller.saved)
    remaining = budget - smaller.saved * (blocks - many - 1) - larger.saved * many
    between = min(
        (policy for policy in policies if policy.saved <= remaining), key=lambda policy: (policy.cost, policy.saved)
    )
    # Blocks that save least come first: they recompute when later blocks are freed already.
    return sorted([smaller] * (blocks - many - 1) + [between] + [larger] * many, key=lambda policy: policy.saved)


def _lower_hull(policies: Sequence[BlockPolicy]) -> list[BlockPolicy]:
    """Return the lower convex hull of cost over bytes, from the fewest bytes to the lowest cost."""
    hull: list[BlockPolicy] = []
    for policy in sorted(policies, key=lambda policy: (policy.saved, policy.cost)):
        if hull and policy.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], policy):
            hull.pop()
        hull.append(policy)
    return hull


def _above(left: BlockPolicy, middle: BlockPolicy, right: BlockPolicy) -> bool:
    by_middle = (middle.cost - left.cost) * (right.saved - left.saved)
    return by_middle >= (right.cost - left.cost) * (middle.saved - left.saved)


_GIB = 1 << 30

# A step whose recomputation is included in that of another step.
_INCLUDED_IN = {"attention_log_sum": "attention_output"}

POLICIES: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "selective": frozenset({"attention_log_sum", "inner"}),
    "full": frozenset(RECOMPUTABLE) - set(_INCLUDED_IN),
}
"""Steps that each block recomputes, by policy: names of RECOMPUTABLE. HLAT's ``selective`` recomputes core attention
and the SwiGLU product (section 3.4 of the paper, after Korthikanti et al. 2022, section 5)."""


_GATHERS = frozenset({"attention_input", "feed_forward_input"})
"""Steps that end with a gather of the sequence: recomputing them is to gather again (Korthikanti et al. 2022, section
4.2.2). The norm before the gather runs again too: its result need not be kept, and each rank has a shard of it."""


def recomputed_steps(policy: str, parallel: ParallelConfig) -> frozenset[str]:
    """Return the steps of a policy in ``POLICIES`` that each block recomputes, in a layout that may gather again."""
    return POLICIES[policy] | (_GATHERS if parallel.gathers_again else frozenset())


@dataclass(frozen=True)
class ActivationPlan:
    """Activations that a rank saves and recomputes in one model shard."""

    policy: str
    recomputed: tuple[frozenset[str], ...]  # names of the recomputed steps of each block, in order
    saved: int  # bytes saved per micro-batch, including embedding, head and loss
    in_flight: int  # maximum number of passes waiting for their backward pass
    recomputation: int  # maximum of additional bytes while a block is recomputed

    def __str__(self) -> str:
        flight = f"{self.in_flight} in flight x {_size(self.saved)} = " if self.in_flight > 1 else ""
        total = f"{flight}{_size(self.saved * self.in_flight)}"
        recomputation = (
            f", and up to {_size(self.recomputation)} while a block is recomputed" if self.recomputation else ""
        )
        return f"activation checkpointing {self.policy}: keeps {total}{recomputation}; {self._blocks()}"

    def _blocks(self) -> str:
        kinds = Counter(self.recomputed)
        return ", ".join(f"{_blocks(count)} recompute {_names(names)}" for names, count in kinds.items())


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"


def _names(recomputed: frozenset[str]) -> str:
    if recomputed >= POLICIES["full"] - {"down_weight_copy"}:
        return "everything"
    return " + ".join(name for name in RECOMPUTABLE if name in recomputed) or "nothing"


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / (1 << 20):.1f} MiB"


def plan_activations(
    recipe: Recipe, shard: ModelShard, world: int, pipeline_rank: int, device_type: str
) -> ActivationPlan:
    """Decide what each block recomputes; raises RecipeError, with a budget that fits, if the budget is too small."""
    return _Planner(recipe, shard, world, pipeline_rank, device_type).plan()


@dataclass(frozen=True)
class _Planner:
    recipe: Recipe
    shard: ModelShard
    world: int
    pipeline_rank: int
    device_type: str

    def plan(self) -> ActivationPlan:
        memory = self.recipe.memory
        if memory.activation_checkpointing == "budget":
            recomputed = self._within_budget()
        else:
            names = recomputed_steps(memory.activation_checkpointing, self.recipe.parallel)
            recomputed = (names,) * len(self._layers)
        everything = self._layer(frozenset())
        recomputation = max((everything - self._layer(names) for names in set(recomputed)), default=0)
        # Of each block itself: their attention may differ. Policies are chosen by the mean.
        blocks = (replace(self.shard, layers=range(index, index + 1)) for index in self._layers)
        saved = self._ends + sum(
            self._layer(names, shard=shard) for names, shard in zip(recomputed, blocks, strict=True)
        )
        return ActivationPlan(memory.activation_checkpointing, recomputed, saved, self._in_flight(), recomputation)

    def _within_budget(self) -> tuple[frozenset[str], ...]:
        found = cheapest(list(self._candidates()), len(self._layers), self._room(self._micro_batch))
        if found is None:
            raise RecipeError([self._too_small()])
        return tuple(policy.recomputed for policy in found)

    def _candidates(self) -> Iterator[BlockPolicy]:
        price = RecomputeCosts(self.recipe.model, self._micro_batch, self._length, self._mode, self.workload).by_name()
        subsets = chain.from_iterable(combinations(RECOMPUTABLE, count) for count in range(len(RECOMPUTABLE) + 1))
        always = _GATHERS if self.recipe.parallel.gather_again == "always" else frozenset()
        for names in (always.union(subset) for subset in subsets):
            if not any(inner in names and outer in names for inner, outer in _INCLUDED_IN.items()):
                yield BlockPolicy(names, self._layer(names), sum(price[name] for name in names))

    def _room(self, micro_batch: int) -> int:
        assert self.recipe.memory.budget_gib is not None, "recipe validation checks this"
        return int(self.recipe.memory.budget_gib * _GIB) // self._in_flight(micro_batch) - self._ends_of(micro_batch)

    def _too_small(self) -> Problem:
        path, micro_batch = "memory.budget_gib", self._micro_batch
        saved = self._least(micro_batch) + self._ends
        least = saved * self._in_flight()
        # Round up to hundredths of a GiB; to thousandths below 0.1 GiB.
        step = 100 if least > _GIB // 10 else 1000
        gib = -(-least * step // _GIB) / step
        fixes = [Fix(path, gib), *self._smaller_micro_batches()]
        where = f" on pipeline rank {self.pipeline_rank}" if self.recipe.parallel.pipeline > 1 else ""
        reason = (
            f"with every block recomputed{where}, {_size(least)} are saved: {self._in_flight()} in flight x "
            f"{_size(saved)} for a micro-batch of {micro_batch} x {self._length} tokens."
        )
        smaller = f", batch.micro_batch={fixes[1].value}" if len(fixes) > 1 else ""
        remedy = f"Try {gib}{smaller}, or a larger parallel.tensor (with parallel.sequence) or parallel.context."
        return Problem(path, reason, remedy, self.recipe.memory.budget_gib, True, tuple(fixes))

    def _smaller_micro_batches(self) -> list[Fix]:
        # The largest micro-batch that fits, and divides the present one so that the global batch stays.
        for size in range(self._micro_batch - 1, 0, -1):
            if self._micro_batch % size == 0 and self._least(size) <= self._room(size):
                return [Fix("batch.micro_batch", size)]
        return []

    def _least(self, micro_batch: int) -> int:
        return self._layer(POLICIES["full"], micro_batch) * len(self._layers)

    def _layer(
        self, recomputed: frozenset[str], micro_batch: int | None = None, shard: ModelShard | None = None
    ) -> int:
        size, workload = micro_batch or self._micro_batch, replace(self.workload, shard=shard or self.shard)
        return activation_bytes(self.recipe.model, size, self._length, self._mode, recomputed, workload).per_layer

    @property
    def _ends(self) -> int:
        return self._ends_of(self._micro_batch)

    def _ends_of(self, micro_batch: int) -> int:
        return sum(
            activation_bytes(self.recipe.model, micro_batch, self._length, self._mode, (), self.workload).ends.values()
        )

    def _in_flight(self, micro_batch: int | None = None) -> int:
        # The maximum over the stages of a batch ramp: with fewer micro-batches the rounds may be longer.
        per_micro_batch = (micro_batch or self._micro_batch) * self.recipe.data_parallel(self.world)
        counts = (size // per_micro_batch for size in self.recipe.batches.sizes)
        return max(passes_in_flight(self.recipe.parallel, self.pipeline_rank, count) for count in counts)

    @property
    def workload(self) -> RankWorkload:
        parallel = self.recipe.parallel
        shards = self.recipe.data_parallel(self.world) // parallel.replicas * parallel.context
        return RankWorkload(
            shard=self.shard,
            sequence=parallel.shards_sequences,
            context=parallel.context,
            weight_copies=parallel.zero == 0 or shards == 1,
            materialised_masks=builds_masks(self.device_type),
            isolated=self.recipe.data.isolate,
        )

    @property
    def _layers(self) -> range:
        return self.shard.layer_range(self.recipe.model)

    @property
    def _micro_batch(self) -> int:
        return self.recipe.batch.micro_batch

    @property
    def _length(self) -> int:
        return self.recipe.data.sequence_length

    @property
    def _mode(self) -> str:
        return self.recipe.precision.mode
