"""Frameworks: attention kernels by date and hardware, and the meaning of a micro-batch."""

import pytest

from published_runs.reader import (
    UnreadableError,
    find_date,
    find_framework,
    read_attention,
    read_global_batch,
    read_micro_batch,
    read_recompute,
)

pytestmark = pytest.mark.slow  # no plan reads tables of runs: for who works on the reader


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Megatron-DeepSpeed (PP engine)", "Megatron-DeepSpeed"), ("DeepSpeed+Megatron", "Megatron-DeepSpeed"),
        ("Megatron-LM v2", "Megatron-LM"), ("Megatron-Core r0.8.0", "Megatron-Core"), ("NeMo 25.04", "Megatron-Core"),
        ("NeMo Megatron 22.08/22.09", "NeMo Megatron"), ("MaxText (JAX)", "MaxText"), ("torchtitan", "torchtitan"),
        ("Composer FSDP + FlashAttention", "LLM Foundry"), ("NeuronX Distributed", "NxDT"), ("OLMo-core", "OLMo"),
        ("Levanter FSDP (JAX)", "MaxText"), ("something new", "other"), ("PyTorch FSDP", "PyTorch FSDP"),
        ("PyTorch FSDP (transformers)", "PyTorch FSDP"),
        ("transformers", "DeepSpeed"), ("Composer FSDP", "LLM Foundry"),
    ],
)  # fmt: skip
def test_names_of_frameworks(text, name):
    assert find_framework(text).name == find_framework(text.upper()).name == name


def test_dates_are_those_of_versions_papers_and_months():
    assert find_date("NeMo 24.07") == 202407
    assert find_date("Megatron-LM", "", "arXiv 2104.04473") == 202104
    assert find_date("x", "images/table.png (2024-07)") == 202407
    assert find_date("x", "measured in 2022") == 202206
    assert find_date("llama 2.7B", "tp 16.32") == 0


@pytest.mark.parametrize(
    ("framework", "notes", "precision", "date", "family", "kernel"),
    [
        ("Megatron-LM", "", "bf16", 202104, "ampere", 0),  # before FlashAttention
        ("Megatron-LM", "", "bf16", 202304, "ampere", 1),  # version 1 until 2023-07
        ("Megatron-LM", "", "bf16", 202402, "ampere", 2),
        ("Megatron-LM", "no FlashAttention", "bf16", 202402, "ampere", 0),
        ("Megatron-LM", "FlashAttention-2", "bf16", 0, "hopper", 2),
        ("Megatron-LM", "FA3", "bf16", 202402, "hopper", 3),
        ("Megatron-Core", "", "bf16", 202402, "hopper", 2),
        ("Megatron-Core", "", "bf16", 202405, "hopper", 3),  # cuDNN, preferred since then
        ("torchtitan", "SDPA", "bf16", 0, "hopper", 2),
        ("MaxText", "", "bf16", 0, "tpu", 3),
        ("MaxText", "", "bf16", 202404, "tpu", 3),  # the compiler of the chip has its own
        ("AXLearn (JAX), XLA", "", "bf16", 202404, "hopper", 0),  # XLA has no flash kernel for GPUs
        ("AXLearn (JAX), XLA", "", "bf16", 202501, "hopper", 3),  # cuDNN's, in JAX since 2024-08
        ("Paxml (JAX), XLA + TransformerEngine", "", "BF16", 202310, "hopper", 3),
        ("Paxml (JAX), XLA", "no flash attention", "BF16", 202501, "hopper", 0),
        ("MaxText", "no flash attention", "bf16", 202501, "tpu", 3),
        ("own code", "", "fp16", 0, "ampere", 0),
        ("own code", "use flash attention 1", "bf16", 202404, "ampere", 2),  # a switch, not a version
        ("own code", "use flash attention = false", "bf16", 202404, "ampere", 0),
        ("own code", "cuDNN attention", "bf16", 0, "hopper", 3),
        ("metaseq", "", "fp16", 202205, "ampere", 0),
    ],
)
def test_attention_by_words_date_and_hardware(framework, notes, precision, date, family, kernel):
    text = f"{framework} {notes}"
    assert read_attention(find_framework(framework), text, precision, date, family).value == kernel


def test_a_kernel_that_nothing_names_is_an_assumption():
    reading = read_attention(find_framework("own code"), "own code", "bf16", 0, "hopper")
    assert reading.sure == "assumed" and reading.spread > 0


@pytest.mark.parametrize(
    ("framework", "text", "pipeline", "sequences", "accumulation", "micro"),
    [
        ("Megatron-LM", "2", 4, 16, 0, 2),
        ("Megatron-LM", "", 4, 16, 0, 1),
        ("Megatron-LM", "", 1, 12, 0, 6),  # largest divisor up to 8
        ("LLM Foundry", "", 1, 12, 4, 3),  # batch over accumulation
        ("torchtitan", "", 1, 16, 0, 16),  # one pass
        ("torchtitan", "16", 4, 16, 0, 1),  # a local batch, split for the pipeline
        ("torchtitan", "2", 1, 16, 0, 2),
        ("MaxText", "1", 1, 0.5, 0, 0.5),  # a fraction of a sequence on each device
        ("MaxText", "4", 4, 16, 0, 4),  # as many micro-batches as stages
    ],
)
def test_micro_batch_by_framework_and_layout(framework, text, pipeline, sequences, accumulation, micro):
    reading = read_micro_batch(text, find_framework(framework), pipeline, sequences, accumulation)
    assert reading.value == micro
    assert reading.sure == "stated" or reading.reason


def test_a_micro_batch_larger_than_the_batch_is_refused():
    with pytest.raises(UnreadableError, match="larger"):
        read_micro_batch("8", find_framework("Megatron-LM"), 1, 4, 0)


def test_global_batches():
    megatron, titan, maxtext = (find_framework(name) for name in ("Megatron-LM", "torchtitan", "MaxText"))
    assert read_global_batch("4M tokens", 4096, 0, 8, 0, megatron, 8).value == 977
    assert read_global_batch("1,024 sequences", 4096, 0, 8, 0, megatron, 8).value == 1024
    assert read_global_batch("", 4096, 2, 8, 0, titan, 16).value == 16  # local batch x replicas
    assert read_global_batch("", 4096, 2, 8, 0, maxtext, 16).value == 32  # batch of a device x devices
    assert read_global_batch("", 4096, 2, 8, 4, megatron, 16).value == 64  # with its accumulation
    with pytest.raises(UnreadableError, match="global_batch"):
        read_global_batch("", 4096, 2, 8, 0, megatron, 16)


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        ("none (before flashattention)", 0), ("none (no flash attention)", 0), ("no flash attention", 0),
        ("flash attention 2", 2), ("flash attn 2.5.0", 2), ("flash attn 1.0.9", 1),
    ],
)  # fmt: skip
def test_words_of_a_column_for_the_attention_kernel(words, kernel):
    """They decide before the framework's default of that time; the column's underscores are spaces by then."""
    for framework in ("Megatron-LM", "PaddlePaddle (PaddleNLP)", "nanotron"):
        for text in (words, words.upper(), f"{framework} {words} notes"):
            assert read_attention(find_framework(framework), text, "bf16", 0, "ampere").value == kernel


@pytest.mark.parametrize("words", ["flash attention=true", "use flash attention true", "flash attention, ring"])
def test_a_flash_kernel_without_a_number_is_that_of_its_time(words):
    megatron = find_framework("Megatron-LM")
    kernels = [read_attention(megatron, words, "fp16", date, "ampere").value for date in (202303, 202310)]
    assert kernels == [1, 2]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("PaddlePaddle (PaddleNLP)", "PaddlePaddle"), ("PaddleFleetX (PaddlePaddle)", "PaddlePaddle"),
        ("OneFlow (layout of its own)", "OneFlow"), ("ATorch FSDP2 wrapper", "PyTorch FSDP"), ("ATorch", "ATorch"),
        ("FlagScale (Megatron-LM)", "Megatron-LM"), ("Primus (Megatron-LM)", "Megatron-LM"),
        ("AXLearn (JAX), XLA", "MaxText"), ("Paxml (JAX), XLA", "MaxText"), ("NeuronX Distributed", "NxDT"),
    ],
)  # fmt: skip
def test_names_of_more_frameworks(text, name):
    assert find_framework(text).name == find_framework(text.lower()).name == name


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("SAVE_DOT_WITH_NO_BATCH_DIM", "selective"), ("dots_saveable", "selective"),
        ("offload_dots_saveable", "selective"),
        ("offload qkv_proj and input", "full"), ("offload attention proj", "full"), ("full, offloaded", "full"),
        ("full, activations offloaded", "full"), ("full (uniform, 5 layers, distributed saved activations)", "full"),
    ],
)  # fmt: skip
def test_policies_of_jax_and_of_offloading(text, policy):
    """Inside a name, "no" is not the word for no recomputation."""
    assert read_recompute(text).value.policy == read_recompute(text.lower()).value.policy == policy
