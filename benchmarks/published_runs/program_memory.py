"""Bytes that other training programs keep on a device, by program: state, activations, logits, gathered weights.

    PublishedRun -> ProgramProfile (its framework's code) -> state + activations + max(logits, a block) -> ProgramBytes

Formulas of activations follow Korthikanti et al. 2022 where a program keeps the inputs of all operations, and its
saved tensors one by one where it does not: compiled blocks, torchtitan's operator policy, whole blocks recomputed.
"""

from dataclasses import dataclass, replace
from math import ceil, floor

from hlat.planner.problem.workload import MATERIALIZED_SCORES, WorkloadColumns, layer_weights
from published_runs.program import RunWorkload
from published_runs.program_profiles import ProgramProfile, profile_of
from published_runs.row import RowColumns
from published_runs.runs import PublishedRun

_FP32 = 4


@dataclass(frozen=True)
class ProgramBytes:
    """Bytes of tensors: between steps, and those that come and go within one."""

    state: float
    transient: float


def program_bytes(run: PublishedRun) -> ProgramBytes:
    """Count the bytes on the device that needs most, without what its allocator and runtime add."""
    profile = profile_of(run)
    work = run.workload
    if profile.operator_policy and work.layout.recompute == "full" and not work.layout.recomputed_attention:
        # Times read the policy of operators as full recomputation that keeps attention and every second product.
        work = replace(work, layout=replace(work.layout, recompute="selective"))
    if profile.distributed_optimizer and not work.layout.zero:
        work = replace(work, layout=replace(work.layout, zero=1))
    ends = (True,) if work.layout.pipeline == 1 else (False,) if profile.logs_first else (False, True)
    tied = RowColumns(run.row).flag("tied_embeddings") or False
    found = [_stage(work, profile, last, tied) for last in ends]
    return max(found, key=lambda each: each.state + each.transient)


def _stage(work: RunWorkload, profile: ProgramProfile, last: bool, tied: bool) -> ProgramBytes:
    """Bytes on a rank of the first or the last stage; of the only one with ``last``.

    Args:
        work: the run.
        profile: its program.
        last: True for the last stage.
        tied: True if the head is the embedding.
    """
    layout, shape = work.layout, work.shape
    alone = layout.pipeline == 1
    matrix = shape.vocab * shape.hidden / layout.tensor
    if work.software.divides_head:
        matrix /= layout.pipeline
    divided = work.software.divides_head and not alone
    block = float(layer_weights(WorkloadColumns([work]))[0])
    layers = _layers(work, profile, last)
    ends = matrix * (2 if (alone and not tied) or divided else 1)
    weights = layers * block + ends
    columns = WorkloadColumns([work])
    passes = float(columns.micro_batches[0])
    shards = float(columns.shards[0])
    kept_state, gradients, gathered = _state(profile, weights, block, matrix, layout.zero, shards, passes)
    if layout.zero == 3 and shards > 1 and not alone:
        # torch's pipelines (pipelining/stage.py, backward_maybe_with_nosync): FSDP keeps gathered weights, and whole
        # gradients in the dtype of their reduction, until the last micro-batch.
        gathered = (2 + 4) * weights
    exist = passes > 1 or not profile.early
    update = (0.0 if exist else gradients) + profile.update * weights / (shards if layout.zero > 0 else 1)
    tokens = float(columns.tokens[0])
    flight = 1.0 if last else min(passes, layout.pipeline)
    if not last and layout.virtual > 1:
        flight *= 1 + (layout.pipeline - 1) / layout.pipeline / layout.virtual
    kept, again = _kept(work, profile), _all_kept(work)
    logits = 0.0
    if last or divided:
        parts = (1 if profile.whole_logits else layout.tensor) * (layout.pipeline if divided else 1)
        logits = profile.logits * tokens * shape.vocab / parts
        if profile.chunked_loss:  # 16-bit and fp32 logits, the gradients of hidden states and head
            logits = (2 + 4 + 2) * tokens * shape.hidden + 2 * matrix
    block_again = again * tokens if layout.recompute == "full" else 0.0
    transient = flight * layers * kept * tokens + max(logits, block_again) + gathered
    return ProgramBytes(kept_state + gradients * exist, max(transient, update))


def _layers(work: RunWorkload, profile: ProgramProfile, last: bool) -> int:
    """Layers of the first or the last stage."""
    shape, stages = work.shape, work.layout.pipeline
    if not profile.front_loaded or last or stages == 1:
        return ceil(shape.layers / stages)
    # As build_model of nanotron counts a layer: with as many kv heads as heads, and a gated feed-forward block.
    layer = shape.hidden * (4 * shape.heads * shape.head_dim + 3 * shape.intermediate)
    return min(floor((shape.layers + shape.vocab * shape.hidden / layer) / stages) + 1, shape.layers)


def _state(
    profile: ProgramProfile, weights: float, block: float, head: float, zero: int, shards: float, passes: float
) -> tuple[float, float, float]:
    """Bytes between steps without gradients, bytes of all gradients, and of weights gathered or cast within a step.

    Args:
        profile: the program.
        weights: elements of a rank's weights before they are sharded.
        block: those of a block.
        head: those of the head, or of the embedding.
        zero: ZeRO stage.
        shards: ranks that state may be sharded over.
        passes: micro-batches of a step.
    """
    if profile.unsynchronized:
        whole = _FP32 * weights if shards > 1 and passes > 1 else 0.0
        return (
            weights * (profile.weights + profile.optimizer) / shards + whole,
            weights * profile.gradients / shards,
            0.0,
        )
    if zero == 3 and shards > 1:
        # Two blocks and the head in 16 bits, and the gradients of a block before they are reduced, in fp32 at most.
        gathered = 2 * (2 * block + head) + min(_FP32, profile.gradients) * block
        return weights * (profile.weights + profile.optimizer) / shards, weights * profile.gradients / shards, gathered
    gradients = weights * profile.gradients / (shards if zero == 2 else 1)
    if profile.weights:
        return weights * (profile.weights + profile.optimizer / (shards if zero > 0 else 1)), gradients, 0.0
    # The fp32 masters are the weights, of which products read 16-bit copies; moments are sharded at most.
    moments = (profile.optimizer - _FP32) / (shards if zero > 0 else 1)
    return weights * (_FP32 + moments), gradients, 2 * weights


def _kept(work: RunWorkload, profile: ProgramProfile) -> float:
    """Bytes per token that a block keeps from forward to backward."""
    layout, shape = work.layout, work.shape
    shards = layout.tensor if layout.sequence_parallel else 1
    entry = 2 * shape.hidden / shards
    if layout.recompute == "full":
        return layout.recomputed_layers * entry + (1 - layout.recomputed_layers) * _all_kept(work)
    if profile.operator_policy and layout.recompute == "selective":
        return _operator_policy(work)
    scores = _scores(work) if layout.recompute == "selective" else 0.0
    return _all_kept(work) + _copies(work, profile) - scores


def _copies(work: RunWorkload, profile: ProgramProfile) -> float:
    """Bytes per token that a block keeps twice, or whole on every tensor rank, because of how a program is written."""
    layout, shape = work.layout, work.shape
    shards = layout.tensor if layout.sequence_parallel else 1
    gathered = profile.gathers * 2 * shape.hidden * (1 - 1 / shards)
    transposed = profile.copies_attention and layout.micro_batch > 1  # one sequence is transposed without a copy
    return gathered + transposed * 2 * shape.heads * shape.head_dim / layout.tensor


def _operator_policy(work: RunWorkload) -> float:
    """Torchtitan's policy: the block's input, attention's output, and of seven products the first, third, ... ."""
    layout, shape = work.layout, work.shape
    shards = layout.tensor if layout.sequence_parallel else 1
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inside = queries + keys + queries + shape.intermediate  # first and third product, attention, fifth product
    return 2 * inside / layout.tensor + 2 * 2 * shape.hidden / shards  # entry, and the last product's output


def _all_kept(work: RunWorkload) -> float:
    """Bytes per token of all that a block keeps without recomputation."""
    layout, shape, software = work.layout, work.shape, work.software
    shards = layout.tensor if layout.sequence_parallel else 1
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if not shape.gated:
        inside = 4 * shape.intermediate + 2 * (2 * queries + 2 * keys)  # dropout is not counted apart
        size = shape.hidden * 10 / shards + inside / layout.tensor
    elif not software.eager:  # compilers recompute norms and activations
        size = 4 * shape.hidden / shards + (4 * queries + 4 * keys + 4 * shape.intermediate) / layout.tensor
    else:
        norms = 20 if software.composed else 8
        inside = 2 * (queries + 2 * keys) + 2 * queries + 8 * shape.intermediate
        size = norms * shape.hidden / shards + inside / layout.tensor
    sums = 4 * shape.heads / layout.tensor * (software.attention != MATERIALIZED_SCORES)
    return size + sums + _scores(work)


def _scores(work: RunWorkload) -> float:
    """Bytes per token of scores in memory: before and after softmax in 16 bits, and a dropout mask."""
    if work.software.attention != MATERIALIZED_SCORES:
        return 0.0
    return 5 * work.shape.heads * work.layout.sequence / work.layout.tensor
