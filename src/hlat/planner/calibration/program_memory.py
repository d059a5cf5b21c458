"""Bytes that other training programs keep on a device, by program: state, activations, logits, gathered weights.

    PublishedRun -> ProgramProfile (its framework's code) -> state + activations + max(logits, a block) -> ProgramBytes

Formulas of activations follow Korthikanti et al. 2022 where a program keeps the inputs of all operations, and its
saved tensors one by one where it does not: compiled blocks, torchtitan's operator policy, whole blocks recomputed.
"""

import re
from dataclasses import dataclass, replace
from math import ceil

from hlat.planner.calibration.published_runs import PublishedRun
from hlat.planner.calibration.reader import find_framework, lower
from hlat.planner.problem import MATERIALIZED_SCORES, Workload, WorkloadColumns, layer_weights

_FP32 = 4


@dataclass(frozen=True)
class ProgramProfile:
    """Bytes per element that a program keeps.

    Attributes:
        weights: weights that products read, as they are kept between steps; 0 if only shards of masters are.
        gradients: gradients of weights.
        optimizer: master weights and moments.
        logits: at the peak of the loss.
        operator_policy: True if "selective" means torchtitan's operators: every second product, attention.
        whole_logits: True if tensor ranks have all logits.
        unsynchronized: True if FSDP adds whole gradients, in fp32, until the last micro-batch.
        early: True if gradients exist only after the first backward pass (set to None, not to zero).
        distributed_optimizer: True if its recipes shard the optimizer's state unless told otherwise.
        logs_first: True if the rank that writes its log is one of the first stage.
    """

    weights: float = 2
    gradients: float = 4
    optimizer: float = 12
    logits: float = 8
    operator_policy: bool = False
    whole_logits: bool = False
    unsynchronized: bool = False
    early: bool = False
    distributed_optimizer: bool = False
    logs_first: bool = False


# Eager losses over fp32 logits: 16-bit logits, their log-softmax, the gradients of both (torch's cross_entropy): 14. A
# compiled loss keeps 16-bit logits and their gradient (4), one over 16-bit logits four tensors of 2 bytes.
_FSDP = ProgramProfile(weights=0, logits=14, early=True)
_PROFILES: tuple[tuple[str, ProgramProfile], ...] = (
    # kempnerforge/distributed/parallel.py: model.to(bfloat16), so that weights, gradients and both moments have 2
    # bytes; training/loss.py: cross_entropy of 16-bit logits, gathered (output_layouts Replicate); training/grad.py:
    # set_requires_gradient_sync(False) until the last micro-batch.
    (r"kempnerforge", ProgramProfile(2, 2, 4, 8, whole_logits=True, unsynchronized=True)),
    # torchtitan/distributed/activation_checkpoint.py; components/loss.py; MixedPrecisionPolicy with fp32 shards.
    (r"torchtitan", replace(_FSDP, operator_policy=True)),
    # nanotron, models/llama.py: logits are cast to fp32 (cast_to_fp32), sharded_cross_entropy keeps their exponentials;
    # optim/gradient_accumulator.py: fp32 sums beside 16-bit gradients; logging/base.py, log_memory: rank 0 writes.
    (r"nanotron", ProgramProfile(gradients=6, logits=14, logs_first=True)),
)
_BY_FRAMEWORK: dict[str, ProgramProfile] = {
    **dict.fromkeys(("PyTorch FSDP", "fms-fsdp", "LLM Foundry", "OLMo", "litgpt", "ATorch"), _FSDP),
    # DeepSpeed, runtime/zero/stage_1_and_2.py: 16-bit gradients; transformers' Llama widens its logits for the loss.
    "DeepSpeed": ProgramProfile(gradients=2, logits=14),
    "Colossal-AI": ProgramProfile(gradients=2, logits=14),
    # NeMo, collections/llm/recipes/optim: distributed_fused_adam with use_distributed_optimizer.
    "NeMo": ProgramProfile(distributed_optimizer=True),
    "NeMo Megatron": ProgramProfile(distributed_optimizer=True),
    # core/tensor_parallel/cross_entropy.py: 16-bit logits, their softmax in fp32, its gradient in 16 bits.
    "Megatron-LM": ProgramProfile(logits=8),
}


@dataclass(frozen=True)
class ProgramBytes:
    """Bytes of tensors: between steps, and those that come and go within one."""

    state: float
    transient: float


def profile_of(run: PublishedRun) -> ProgramProfile:
    """Profile of a run's program; Megatron-LM's mixed precision where it is not known."""
    framework = run.row.get("framework") or ""
    found = next((profile for words, profile in _PROFILES if re.search(words, lower(framework))), None)
    if found is None:
        found = _BY_FRAMEWORK.get(find_framework(framework).name, ProgramProfile())
    precision = lower(run.row.get("precision"))
    if "fp32 grad accumulation" in precision:
        found = replace(found, gradients=6)
    software = run.workload.software
    if _is_transformers(framework) and not run.workload.shape.gated and "amp" not in precision:
        # transformers, models/gpt2/modeling_gpt2.py: a loss over 16-bit logits, of which a copy is shifted; autocast
        # and Llama's widen them.
        found = replace(found, logits=8)
    compiled = not software.eager and found.logits == _FSDP.logits
    return replace(found, logits=4) if compiled else found


def _is_transformers(framework: str) -> bool:
    """True if a program trains models of the transformers library."""
    return re.search(r"transformers|hf trainer|accelerate", lower(framework)) is not None


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
    found = [_stage(work, profile, last) for last in ends]
    return max(found, key=lambda each: each.state + each.transient)


def _stage(work: Workload, profile: ProgramProfile, last: bool) -> ProgramBytes:
    """Bytes on a rank of the first or the last stage; of the only one with ``last``."""
    layout, shape = work.layout, work.shape
    alone = layout.pipeline == 1
    matrix = shape.vocab * shape.hidden / layout.tensor
    if work.software.divides_head:
        matrix /= layout.pipeline
    divided = work.software.divides_head and not alone
    block = float(layer_weights(WorkloadColumns([work]))[0])
    layers = ceil(shape.layers / layout.pipeline)
    ends = matrix * (2 if alone or divided else 1)
    weights = layers * block + ends
    columns = WorkloadColumns([work])
    passes = float(columns.micro_batches[0])
    shards = float(columns.shards[0])
    state, gathered = _state(profile, weights, block, ends, layout.zero, shards, passes)
    if layout.zero == 3 and shards > 1 and not alone:
        # torch's pipelines (pipelining/stage.py, backward_maybe_with_nosync): FSDP keeps gathered weights, and whole
        # gradients in the dtype of their reduction, until the last micro-batch.
        gathered = (2 + 4) * weights
    tokens = float(columns.tokens[0])
    flight = 1.0 if last else min(passes, layout.pipeline)
    if not last and layout.virtual > 1:
        flight *= 1 + (layout.pipeline - 1) / layout.pipeline / layout.virtual
    kept, again = _kept(work, profile), _all_kept(work)
    logits = 0.0
    if last or divided:
        parts = (1 if profile.whole_logits else layout.tensor) * (layout.pipeline if divided else 1)
        logits = profile.logits * tokens * shape.vocab / parts
    block_again = again * tokens if layout.recompute == "full" else 0.0
    transient = flight * layers * kept * tokens + max(logits, block_again) + gathered
    return ProgramBytes(state, transient)


def _state(
    profile: ProgramProfile, weights: float, block: float, ends: float, zero: int, shards: float, passes: float
) -> tuple[float, float]:
    """Bytes between steps (with gradients that exist at the peak), and bytes of weights gathered or cast within one.

    Args:
        profile: the program.
        weights: elements of a rank's weights before they are sharded.
        block: those of a block.
        ends: those of embedding and head.
        zero: ZeRO stage.
        shards: ranks that state may be sharded over.
        passes: micro-batches of a step.
    """
    gradients = profile.gradients if passes > 1 or not profile.early else 0.0
    if profile.unsynchronized:
        whole = _FP32 * weights if shards > 1 and passes > 1 else 0.0
        return weights * (profile.weights + profile.gradients + profile.optimizer) / shards + whole, 0.0
    if zero == 3 and shards > 1:
        # Two blocks and the head in 16 bits, and the gradients of a block in fp32, before they are reduced.
        gathered = 2 * (2 * block + ends / 2) + _FP32 * block
        return weights * (profile.weights + profile.optimizer + gradients) / shards, gathered
    gradients = profile.gradients / (shards if zero == 2 else 1)
    if profile.weights:
        return weights * (profile.weights + gradients + profile.optimizer / (shards if zero > 0 else 1)), 0.0
    # The fp32 masters are the weights, of which products read 16-bit copies; moments are sharded at most.
    moments = (profile.optimizer - _FP32) / (shards if zero > 0 else 1)
    return weights * (_FP32 + gradients + moments), 2 * weights


def _kept(work: Workload, profile: ProgramProfile) -> float:
    """Bytes per token that a block keeps from forward to backward."""
    layout, shape = work.layout, work.shape
    shards = layout.tensor if layout.sequence_parallel else 1
    entry = 2 * shape.hidden / shards
    if layout.recompute == "full":
        return layout.recomputed_layers * entry + (1 - layout.recomputed_layers) * _all_kept(work)
    if profile.operator_policy and layout.recompute == "selective":
        return _operator_policy(work)
    scores = _scores(work) if layout.recompute == "selective" else 0.0
    return _all_kept(work) - scores


def _operator_policy(work: Workload) -> float:
    """Torchtitan's policy: the block's input, attention's output, and of seven products the first, third, ... ."""
    layout, shape = work.layout, work.shape
    shards = layout.tensor if layout.sequence_parallel else 1
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inside = queries + keys + queries + shape.intermediate  # first and third product, attention, fifth product
    return 2 * inside / layout.tensor + 2 * 2 * shape.hidden / shards  # entry, and the last product's output


def _all_kept(work: Workload) -> float:
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


def _scores(work: Workload) -> float:
    """Bytes per token of scores in memory: before and after softmax in 16 bits, and a dropout mask."""
    if work.software.attention != MATERIALIZED_SCORES:
        return 0.0
    return 5 * work.shape.heads * work.layout.sequence / work.layout.tensor
