"""Profiles of other training programs: bytes per element that they keep, as their code and configuration say.

PublishedRun -> its program, found by its name -> ProgramProfile
"""

import re
from dataclasses import dataclass, replace

from published_runs.reader import find_date, find_framework, lower
from published_runs.runs import PublishedRun


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
        update: of temporaries of the optimizer's step, while all gradients exist.
        chunked_loss: True if logits exist for as many tokens at a time as take the place of the hidden states.
        gathers: inputs of products in a block that tensor ranks with sequence parallelism gather, and keep whole.
        copies_attention: True if attention's output is kept a second time, transposed.
        front_loaded: True if a stage takes layers until it exceeds its share of the FLOPs.
        widened: True if 16-bit shards of FSDP are widened to fp32 where the notes say --bf16.
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
    update: float = 0
    chunked_loss: bool = False
    gathers: int = 0
    copies_attention: bool = False
    front_loaded: bool = False
    widened: bool = False


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
    # nanotron (5f82f7a2, July 2024): models/llama.py casts logits to fp32 and transposes attention's output; parallel/
    # tensor_parallel/functional.py: _ShardedCrossEntropy subtracts the maximum into new fp32 memory and goes on there,
    # in place, and column_linear keeps what it gathers (until August 2024, tp_recompute_allgather); models/base.py,
    # build_model: a stage is given a block before their FLOPs are compared with its share; optim/
    # gradient_accumulator.py: fp32 sums beside 16-bit gradients; logging/base.py, log_memory: rank 0 writes.
    (
        r"nanotron",
        ProgramProfile(gradients=6, logits=8, logs_first=True, gathers=2, copies_attention=True, front_loaded=True),
    ),
    # fms-acceleration, scripts/benchmarks: scenarios.yaml has torch_dtype bfloat16 and accelerate.yaml mixed_precision
    # 'no', so that weights, gradients and moments have 2 bytes; the Trainer's AdamW is torch's, whose page on foreach
    # says that it takes as much more as the weights. transformers widens the logits.
    (r"fms-(?:hf-tuning|acceleration)", ProgramProfile(2, 2, 4, 14, early=True, update=2, widened=True)),
)
_FUSED_LOSS = 8  # fused_ops of fms-acceleration: fp32 logits and a shifted copy, which becomes their gradient
# torchtitan: no compiled loss from d1f62be73 (2025-02-20, losses in TrainSpec) to bbb1b616e (2025-04-02).
_LOSS_COMPILED_UNTIL, _LOSS_COMPILED_AGAIN = 202502, 202504
_GATHERS_UNTIL = 202408  # nanotron's tp_recompute_allgather
_NEGATED = re.compile(r"\b(?:without|not?)\b(?:(?!\b(?:with|but)\b)[^;,.])*")  # up to the end of the clause
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


def profile_of(run: PublishedRun) -> ProgramProfile:
    """Profile of a run's program; Megatron-LM's mixed precision where it is not known."""
    framework = run.row.get("framework") or ""
    found = next((profile for words, profile in _PROFILES if re.search(words, lower(framework))), None)
    if found is None:
        found = _BY_FRAMEWORK.get(find_framework(framework).name, ProgramProfile())
    precision, notes = lower(run.row.get("precision")), lower(run.row.get("notes"))
    if "fp32 grad accumulation" in precision:
        found = replace(found, gradients=6)
    software = run.workload.software
    if _is_transformers(framework) and not run.workload.shape.gated and "amp" not in precision:
        # transformers, models/gpt2 and gpt_bigcode: a loss over 16-bit logits, of which a copy is shifted; autocast
        # and Llama's widen them.
        found = replace(found, logits=8)
    if found.gathers and not 0 < _date(run) < _GATHERS_UNTIL:
        found = replace(found, gathers=0)
    found = _with_options(found, _NEGATED.sub("", notes), run.workload.layout.zero)
    compiled = not software.eager and found.logits == _FSDP.logits
    if found.operator_policy and _LOSS_COMPILED_UNTIL < _date(run) < _LOSS_COMPILED_AGAIN:
        compiled = False
    return replace(found, logits=4) if compiled else found


def _date(run: PublishedRun) -> int:
    """Year x 100 + month of a run; 0 if it is not known."""
    return find_date(*(run.row.get(column) for column in ("framework", "notes", "where", "published")))


def _with_options(profile: ProgramProfile, notes: str, zero: int) -> ProgramProfile:
    """Profile with the options that the notes of a row name: mixed precision of 16-bit weights, fused losses."""
    if profile.widened and "--bf16" in notes and zero == 3:
        # accelerate, accelerator.py, prepare_model: with mixed precision the shards of FSDP are widened to fp32.
        profile = replace(profile, weights=0, gradients=4, optimizer=12, update=4)
    if "liger" in notes:
        return replace(profile, chunked_loss=True)
    return replace(profile, logits=_FUSED_LOSS) if "foak" in notes else profile


def _is_transformers(framework: str) -> bool:
    """True if a program trains models of the transformers library."""
    return re.search(r"transformers|hf trainer|accelerate", lower(framework)) is not None
