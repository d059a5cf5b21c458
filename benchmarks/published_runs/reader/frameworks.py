"""Frameworks: what a training program's name, version and date say about its kernels and its overlap.

    "Megatron-LM v2", "arXiv 2104.04473", hopper -> Framework (style, conventions), date 2021-04 -> RunSoftware

Attention follows, in this order, from words in the row (no FlashAttention, FA2, cuDNN, SDPA), from the framework's
kernel at the row's date, and from the precision: fp16 with loss scaling went out of use before flash attention came in.
"""

import re
from dataclasses import dataclass
from typing import Literal

from hlat.planner.problem.workload import (
    CHIP_FAMILIES,
    FLASH_ATTENTION_1,
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
    MATERIALIZED_SCORES,
)
from published_runs.reader.reading import Reading
from published_runs.reader.texts import has_word, lower

Passes = Literal["replica", "one", "accelerator"]
"""Meaning of a micro-batch: of a data-parallel replica per accumulation step; the replica's batch of a step in one pass
unless an accumulation is stated; all of a device's sequences in one pass of an XLA program."""

Selective = Literal["attention", "operators", "granularity"]
"""Meaning of "selective" recomputation: attention's core, unless layers are named; every second product (torchtitan's
default, train_configs/llama3_8b.toml); Megatron-LM's granularity, which is of modules, never of some layers."""


@dataclass(frozen=True)
class Framework:
    """Properties of a training program.

    Attributes:
        name: canonical name.
        words: pattern of its names, in lower case.
        passes: its micro-batch convention.
        xla: True if XLA compiles the whole step.
        fused: True if pointwise operations run in fused kernels.
        overlaps_tensor: True if tensor-parallel communication overlaps with products by default or in its recipes.
        sixteen_bit_sums: True if gradients are reduced in 16 bits.
        shards: True if it shards weights (ZeRO 3) unless told otherwise.
        interleaves: True if its recipes interleave pipeline stages.
        flash_since: first month, as year x 100 + month, in which it had a flash kernel; 0 for always.
        first_until: month until which that was FlashAttention 1 (or Triton's, or xformers').
        composes: True if its Llama models are eager code whose norms and rotations are separate operations.
        overlaps_sums: True if what is exchanged once per step (sums of gradients, ZeRO 1's weights) overlaps with
            passes unless told otherwise.
        third: True if it takes cuDNN's or a comparable kernel where the hardware has one.
        fused_loss: True if the loss is one kernel, forward and backward, rather than composed of torch's operations.
        products_add_since: first month, as year x 100 + month, in which its products added gradients of weights to the
            sums of the step themselves; 1 for always, 0 for never.
        pads_vocabulary: True if it pads the vocabulary to a multiple of 128 on every tensor rank.
        repeats_blocks: True if it recomputes blocks to their end, the last all-reduce included.
        transformer_engine: True if its fp8 is Transformer Engine's.
        selective: meaning of "selective" recomputation.
        shards_sequence: True if tensor parallelism has sequence parallelism unless told otherwise.
        interpreted: True if Python launches the kernels of eager programs; False for programs in C.
    """

    name: str
    words: str
    passes: Passes = "replica"
    xla: bool = False
    fused: bool = False
    overlaps_tensor: bool = False
    sixteen_bit_sums: bool = False
    shards: bool = False
    interleaves: bool = False
    flash_since: int = 0
    first_until: int = 202307
    composes: bool = False
    overlaps_sums: bool = True
    third: bool = False
    fused_loss: bool = False
    products_add_since: int = 0
    pads_vocabulary: bool = False
    repeats_blocks: bool = False
    transformer_engine: bool = False
    selective: Selective = "attention"
    shards_sequence: bool = True
    interpreted: bool = True

    def adds_apart(self, date: int) -> bool:
        """True if kernels of their own add gradients of weights, at a date (0 if it is unknown: its last state)."""
        return not self.products_add_since or 0 < date < self.products_add_since


# Release dates: FlashAttention 1 2022-06 (arXiv 2205.14135), 2 2023-07 (2307.08691), 3 2024-07 (2407.08608).
# Transformer Engine prefers cuDNN's kernel on Hopper and later, FlashAttention 2 on Ampere (NeMo, pull request 9188).
# Losses and sums of gradients: Megatron-LM's ``vocab_parallel_cross_entropy`` is composed, NVIDIA's recipes of
# Megatron-Core and NeMo set ``cross_entropy_loss_fusion``; MosaicML, lit-gpt and InternEvo take FlashAttention's
# kernel, Paddle and OneFlow have one of their own. ``gradient_accumulation_fusion`` is on in Megatron-LM since apex has
# the kernel (2022-03), off in NeMo Megatron 22 ("only used with pipeline parallelism"), and no option of DeepSpeed.
# Megatron-LM and what is built on it have ``make-vocab-size-divisible-by`` 128. Functions that recompute all of a block
# are ``CheckpointFunction`` of Megatron-LM (tensor_parallel/random.py) and DeepSpeed (activation_checkpointing/
# checkpointing.py), Paddle's ``RecomputeFunction``; torch's own stops early since 2.1.
# fms-fsdp reduces gradients in bf16 (fms_fsdp/policies/mixed_precision.py). Sequence parallelism is off unless asked
# for in InternEvo (docs, parallel.rst: mode "mtp"), Colossal-AI (ShardConfig), Megatron-DeepSpeed (arguments.py).
# Megatron-LM's Llama had RMSNorm and rotations of torch's operations (its fused norm is LayerNorm's; Transformer Engine
# has both), and ``overlap-grad-reduce`` is off unless given; so is DeepSpeed's ``overlap_comm`` below ZeRO 3.
# The first entry that occurs decides: combinations before their parts, and first names that mention another program.
FRAMEWORKS = (
    Framework("Meta", r"meta internal", third=True),
    Framework("OneFlow", r"oneflow\S*|libai", fused=True, flash_since=202212, fused_loss=True),
    Framework("NxDT", r"neuronx?\S*|nxdt?|optimum[- ]neuron|torchneuron", xla=True, fused=True, third=True),
    Framework("Megatron-DeepSpeed", r"megatron[- ]?deepspeed|deepspeed ?\+ ?megatron|gpt-?neox", sixteen_bit_sums=True,
              flash_since=202301, pads_vocabulary=True, repeats_blocks=True, composes=True, overlaps_sums=False,
              selective="granularity", shards_sequence=False),
    Framework("NeMo Megatron", r"nemo[- ]megatron(?:-launcher)?|nemo ?(?:1\.)?2[12]\.\d+\S*", flash_since=202303,
              pads_vocabulary=True, repeats_blocks=True,
              selective="granularity"),
    Framework("Megatron-Core", r"megatron[- ]?(?:core|bridge)|mcore|nemo(?: framework)? ?(?:2[4-9](?:\.\d+)*|2\.\d\S*)|"
              r"megascale|mlperf\S*", fused=True, overlaps_tensor=True, interleaves=True, third=True, fused_loss=True,
              products_add_since=1, pads_vocabulary=True, repeats_blocks=True,
              transformer_engine=True, selective="granularity"),
    Framework("NeMo", r"nemo\S*", fused=True, flash_since=202303, third=True, fused_loss=True,
              products_add_since=1, pads_vocabulary=True, repeats_blocks=True,
              transformer_engine=True, selective="granularity"),
    Framework("Megatron-LM", r"megatron(?:-lm)?", flash_since=202301, products_add_since=202204,
              pads_vocabulary=True, repeats_blocks=True, composes=True, overlaps_sums=False,
              transformer_engine=True, selective="granularity"),
    Framework("MaxText", r"maxtext|jax\S*|pax\S*|praxis|t5x|easylm|levanter|flax|marin|tpu-recipes", "accelerator",
              xla=True, fused=True, shards=True, third=True),
    Framework("PyTorch/XLA", r"torch[- _]?xla|pytorch/xla|torchprime|pytorch-tpu", "accelerator", xla=True, fused=True,
              shards=True, third=True),
    Framework("torchtitan", r"torchtitan", "one", shards=True, composes=True, selective="operators"),
    Framework("fms-fsdp", r"fms|fms-?fsdp|foundation[- ]model[- ]stack", "one", shards=True, flash_since=202303,
              sixteen_bit_sums=True, composes=True),
    Framework("LLM Foundry", r"composer|llm[- ]?foundry|mosaicml\S*|mpt", shards=True, first_until=202401,
              fused_loss=True, transformer_engine=True),
    Framework("OLMo", r"olmo(?:-core)?", shards=True),
    Framework("nanotron", r"nanotron"),
    Framework("picotron", r"picotron"),
    Framework("llm.c", r"llm\.c", fused=True, interpreted=False, third=True, fused_loss=True, products_add_since=1),
    Framework("litgpt", r"lit-?gpt|tinyllama", shards=True, fused_loss=True),
    Framework("InternEvo", r"interne?vo|internlm", flash_since=202306, fused_loss=True, shards_sequence=False),
    Framework("Colossal-AI", r"colossal-?ai|hetu\S*|alpa|galvatron", sixteen_bit_sums=True, flash_since=202303,
              shards_sequence=False),
    Framework("PyTorch FSDP", r"fsdp2?", shards=True, composes=True),
    Framework("PyTorch DDP", r"ddp", composes=True),
    Framework("DeepSpeed", r"deepspeed|accelerate|transformers|axolotl|hf trainer", sixteen_bit_sums=True,
              flash_since=202307, composes=True, repeats_blocks=True, overlaps_sums=False),
    Framework("xformers", r"xformers|fair internal|metaseq", flash_since=202211),
    Framework("litgpt", r"lightning", shards=True, fused_loss=True),
    Framework("PyTorch FSDP", r"pytorch|torch|nanogpt|nanochat", shards=True, composes=True),
    Framework("PaddlePaddle", r"paddle\w*", flash_since=202307, composes=True, fused_loss=True,
              repeats_blocks=True),
    Framework("ATorch", r"atorch", shards=True, composes=True),
    Framework("Primus", r"primus", flash_since=202301, products_add_since=1, pads_vocabulary=True,
              repeats_blocks=True,
              transformer_engine=True, selective="granularity"),
    Framework("Transformer Engine", r"transformer[- ]?engine|te", fused=True, third=True, products_add_since=1,
              transformer_engine=True),
)  # fmt: skip
OTHER = Framework("other", r"(?!)")

_NO_FLASH = (
    r"none \([^)]*flash\S*|no[- ](?:flash[- ]?attention|flash|fa)|without flash\S*|"
    r"(?:naive|standard|materialized|eager) attention"
)
_SWITCH = re.compile(r"use flash[- ]?att(?:entio)?n\s*[=:]?\s*(1|0|true|false|yes|no)(?![\w.])")
_NUMBERED = re.compile(
    r"flash attn ([12])(?=\.\d)|(?<![a-z0-9])(?:flash[- ]?attention|flash[- ]?attn|flash|fa)[- ]?v?([1-4])(?![a-z0-9.])"
)
_FLASH = re.compile(r"(?<![a-z0-9])flash(?:[- ]?att(?:entio)?n)?(?![a-z0-9])")
_XLA_CUDNN = 202408
"""Month of JAX 0.4.31, whose ``jax.nn.dot_product_attention`` can take cuDNN's kernel."""
_ENGINE_CUDNN = 202405
"""Month from which Transformer Engine's users take cuDNN's kernel on Hopper (NeMo, pull request 9188)."""
_FIRST_KERNELS = r"xformers|memory[- ]efficient attention|triton (?:flash )?attention|attn_impl[=: ]*triton"
_THIRD_KERNELS = r"cudnn\S*(?: \w+)* attention|cudnn\S*|fused[- ]attention|splash\S*|transformer[- ]?engine"
_SECOND_KERNELS = r"sdpa|flex-?attention|scaled dot product attention"
_COMPILED = r"torch\.compile|compiled?|inductor"
_UNCOMPILED = r"no[- ]compile|not compiled|without compil\S*|eager"
_ASYNC_TENSOR = r"async[- ]?tp|asynctp|async tensor\S*|tp[- ]?(?:comm[- ]?)?overlap\S*|overlap\S* tp|userbuffers"
_FUSED = r"transformer[- ]?engine|(?:rms|layer) ?norm kernel|fused (?:rms|layer) ?norm"
_ARXIV = re.compile(r"(?<!\d)(2[0-6])(0[1-9]|1[0-2])\.\d{5}(?!\d)")
_MONTH = re.compile(r"(?<!\d)(20[12]\d)[-./](0[1-9]|1[0-2])(?!\d)")
_CALENDAR = re.compile(r"(?:nemo|bridge|pytorch|release|nemo megatron)\D{0,14}?(2[1-9])\.(0[1-9]|1[0-2])(?!\d)")
_YEAR = re.compile(r"(?<!\d)(20(?:1[89]|2\d))(?!\d)")


def find_framework(text: str) -> Framework:
    """The framework of a name; ``OTHER`` if none is known."""
    folded = lower(text)
    return next((one for one in FRAMEWORKS if has_word(one.words, folded)), OTHER)


def find_date(*texts: str | None) -> int:
    """Year x 100 + month of a run: the first version, paper or month in the texts; 0 if there is none."""
    for text in texts:
        folded = lower(text)
        for pattern in (_CALENDAR, _ARXIV):
            if (match := pattern.search(folded)) is not None:
                return (2000 + int(match[1])) * 100 + int(match[2])
        if (match := _MONTH.search(folded)) is not None:
            return int(match[1]) * 100 + int(match[2])
    for text in texts:
        if (match := _YEAR.search(lower(text))) is not None:
            return int(match[1]) * 100 + 6
    return 0


def read_attention(framework: Framework, row_text: str, precision: str, date: int, family: str) -> Reading[int]:
    """Find the attention kernel of a run.

    Args:
        framework: its framework.
        row_text: framework column and notes.
        precision: precision column.
        date: year x 100 + month; 0 if unknown.
        family: chip family.
    """
    compiled = framework.xla and CHIP_FAMILIES[family].compiled
    said = _named_kernel(compiled, lower(row_text))
    if said is not None:
        return Reading("attention", row_text, said)
    if framework.xla and not compiled and not _FLASH.search(lower(row_text)) and 0 < date < _XLA_CUDNN:
        reason = f"{framework.name} on a GPU before cuDNN's attention in JAX: scores in memory"
        return Reading("attention", row_text, MATERIALIZED_SCORES, "implied", reason, 0.05)
    if framework.third and not framework.xla and family != "ampere" and 0 < date < _ENGINE_CUDNN:
        reason = f"{framework.name} before Transformer Engine preferred cuDNN: FlashAttention 2"
        return Reading("attention", row_text, FLASH_ATTENTION_2, "implied", reason, 0.03)
    if framework.xla or framework.third:
        newest = FLASH_ATTENTION_2 if family == "ampere" else FLASH_ATTENTION_3
        kernel = FLASH_ATTENTION_3 if framework.xla or framework.overlaps_tensor else newest
        return Reading("attention", row_text, kernel, "implied", f"kernel of {framework.name}")
    before = None if _FLASH.search(lower(row_text)) else _before_flash(framework, row_text, precision, date)
    return before or _flash_by_date(framework, row_text, date)


def _named_kernel(compiled: bool, words: str) -> int | None:
    """The kernel that a row names; None if it names none. A ``compiled`` chip's compiler has its own."""
    switch = _SWITCH.search(words)  # "use_flash_attention 1" is no version
    words = _SWITCH.sub("flash attention", words)
    off = switch is not None and switch[1] in ("0", "false", "no")
    if (off or has_word(_NO_FLASH, words)) and not compiled:
        return MATERIALIZED_SCORES
    if (numbered := _NUMBERED.search(words)) is not None:
        return min(int(numbered[1] or numbered[2]), FLASH_ATTENTION_3)
    kernels = ((_FIRST_KERNELS, FLASH_ATTENTION_1), (_THIRD_KERNELS, FLASH_ATTENTION_3), (_SECOND_KERNELS, 2))
    return next((kernel for pattern, kernel in kernels if has_word(pattern, words)), None)


def _before_flash(framework: Framework, text: str, precision: str, date: int) -> Reading[int] | None:
    """Materialized scores, for runs before flash attention; None for later ones."""
    old_scaling = lower(precision) == "fp16" and not has_word(_COMPILED, lower(text))
    if date:
        reason = f"{framework.name} before flash attention"
        since = max(framework.flash_since, 202206)
        early = date < since or (old_scaling and date < 202301)
        return Reading("attention", text, MATERIALIZED_SCORES, "implied", reason) if early else None
    if old_scaling or 0 < framework.flash_since < 202302:
        reason = f"{framework.name} without a date{', fp16' * old_scaling}: before flash attention"
        return Reading("attention", text, MATERIALIZED_SCORES, "assumed", reason, 0.08)
    return None


def _flash_by_date(framework: Framework, text: str, date: int) -> Reading[int]:
    if framework.first_until > 202307 and not date:
        return Reading(
            "attention", text, FLASH_ATTENTION_1, "implied", f"Triton's kernel, the default of {framework.name}"
        )
    if date:
        kernel = FLASH_ATTENTION_1 if date < framework.first_until else FLASH_ATTENTION_2
        return Reading("attention", text, kernel, "implied", f"flash kernel of {date // 100}-{date % 100:02}")
    return Reading("attention", text, FLASH_ATTENTION_2, "assumed", "FlashAttention 2", 0.03)


def is_compiled(text: str) -> bool:
    """True if torch compiles the blocks."""
    folded = lower(text)
    return has_word(_COMPILED, folded) and not has_word(_UNCOMPILED, folded)


def is_fused(text: str) -> bool:
    """True if pointwise operations are said to run in fused kernels."""
    return has_word(_FUSED, lower(text))


def is_overlapping(text: str) -> bool:
    """True if sums of gradients are said to overlap with passes."""
    return has_word(r"overlap[-_ ](?:grad|param|comm)\S*|overlapped\S*", lower(text))


def is_async_tensor(text: str) -> bool:
    """True if tensor-parallel communication is said to overlap."""
    return has_word(_ASYNC_TENSOR, lower(text))
