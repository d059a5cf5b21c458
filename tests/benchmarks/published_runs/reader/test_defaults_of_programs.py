"""Defaults of programs, where a row says nothing: kernels, overlap, sequence parallelism; stated memories and power."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.hardware import load_catalog
from hlat.planner.cost.calibration import load_constants
from hlat.planner.cost.comm_time import comm_times
from hlat.planner.problem.workload import FLASH_ATTENTION_2, FLASH_ATTENTION_3, WorkloadColumns
from published_runs.program import RUN_PROGRAM, run_steps
from published_runs.reader import UnreadableError, find_framework, read_chip
from published_runs.row import read_run

pytestmark = pytest.mark.slow  # no plan reads tables of runs: for who works on the reader

ROW = {
    "chip": "H100-SXM-80GB", "n_chips": "64", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
    "head_dim": "128", "ffn": "14336", "gated_mlp": "1", "vocab": "128256", "seq_len": "32768", "global_batch": "64",
    "micro_batch": "1", "tp": "1", "pp": "1", "dp": "64", "zero_stage": "3", "framework": "PyTorch FSDP",
    "activation_ckpt": "full", "precision": "bf16", "interconnect": "8x400 Gb/s per node",
}  # fmt: skip


def read(**changes):
    return read_run(ROW | changes, load_catalog()).workload


def times(*workloads):
    return run_steps(WorkloadColumns(list(workloads)))


def test_transformer_engine_took_flash_attention_2_on_hopper_before_may_2024():
    kernels = {
        version: read(framework="NeMo", framework_version=version).software.attention
        for version in ("NeMo 24.03.01 container", "NeMo 24.05", "")
    }
    assert list(kernels.values()) == [FLASH_ATTENTION_2, FLASH_ATTENTION_3, FLASH_ATTENTION_3]
    attention = "cuDNN attention"
    stated = read(framework="NeMo", framework_version="NeMo 24.03", attention_kernel=attention)
    assert stated.software.attention == FLASH_ATTENTION_3, "what a row states is not guessed"


def test_xla_overlaps_gathers_on_gpus_since_its_scheduler_is_set():
    before, since, undated = (read(framework="MaxText", framework_version=date) for date in ("2023-10", "2024-03", ""))
    assert [one.software.overlaps_data for one in (before, since, undated)] == [False, True, True]
    assert times(since).data < times(before).data
    # Sums across replicas come after the loop over the layers, and nothing hides them.
    assert not since.software.overlaps_sums and read().software.overlaps_sums
    hybrid = read(framework="MaxText", replicas="8", interconnect="1x25 Gb/s per node")
    hidden = replace(hybrid, software=replace(hybrid.software, overlaps_sums=True))
    across = comm_times(WorkloadColumns([hybrid]), load_constants(), RUN_PROGRAM).across[0]
    assert times(hybrid).data >= across > 0
    assert times(hidden).data < times(hybrid).data


@pytest.mark.parametrize(
    ("framework", "parallel"),
    [
        ("InternEvo", False),
        ("Colossal-AI", False),
        ("Megatron-DeepSpeed", False),
        ("Megatron-LM", True),
        ("NeMo", True),
    ],
)
def test_sequence_parallelism_that_is_not_stated_is_the_default(framework, parallel):
    columns = {"framework": framework, "tp": "2", "dp": "32", "zero_stage": "1"}
    assert read(**columns).layout.sequence_parallel == parallel
    assert not read(**columns, sp="0").layout.sequence_parallel


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("PyTorch DDP (Lightning, transformers)", "PyTorch DDP"),
        ("DeepSpeed (Lightning, transformers)", "DeepSpeed"),
        ("Colossal-AI (Lightning)", "Colossal-AI"),
        ("PyTorch Lightning + FlashAttention", "litgpt"),
        ("lit-gpt (Lightning Fabric FSDP)", "litgpt"),
        ("llm.c (CUDA C)", "llm.c"),
        ("PyTorch FSDP (FMS Llama, SDPA)", "fms-fsdp"),
        ("fms-fsdp", "fms-fsdp"),
        ("nanotron", "nanotron"),
    ],
)
def test_a_trainer_around_a_program_does_not_name_it(text, name):
    assert find_framework(text).name == name


def test_programs_in_c_lose_no_time_between_kernels():
    small = {"seq_len": "256", "activation_ckpt": "none", "zero_stage": "0"}
    eager, compiled = read(framework="nanoGPT", **small), read(framework="llm.c (CUDA C)", **small)
    assert eager.software.eager and not compiled.software.eager
    assert times(compiled).host == 0 < times(eager).host
    fused = times(read(framework="nanotron", **small)).host
    assert times(eager).host > fused > 0, "norms and rotations of eager Llama blocks are more kernels"


@pytest.mark.parametrize("memory", ["96GB HBM2e, 2.4 TB/s", "96 GB, 2400 GB/s", "96GB at 2.4TB/s (500 W)"])
def test_a_memory_with_its_rate_needs_no_catalog(memory):
    chip = read_chip("H100 SXM", load_catalog(), 8, memory=memory).value
    assert chip.chip.memory.gib == pytest.approx(96 / 1.073741824)
    assert chip.chip.memory.gb_per_second == pytest.approx(2400)
    assert (chip.speed < 1) == ("W" in memory)
    with pytest.raises(UnreadableError, match="GiB, not 96"):
        read_chip("H100 SXM", load_catalog(), 8, memory="96GB HBM2e")


def test_a_power_limit_slows_attention_as_it_slows_products():
    """Both run on the tensor cores, whose clock it lowers, by the cube root of 500 / 700."""
    free, limited = read(), read(chip="H100 SXM (500W)")
    slower = (700 / 500) ** (1 / 3)
    assert times(limited).attention / times(free).attention == pytest.approx(slower)
    assert 1 < times(limited).products / times(free).products < slower, "memory traffic is as fast as before"


@pytest.mark.parametrize(
    ("chip", "gigabits"),
    [
        ("h100-80gb-8 (A3)", 800),
        ("H100 SXM (a3-highgpu-8g)", 800),
        ("H100 SXM, A3 Mega", 1600),
        ("H100 SXM (a3-megagpu-8g)", 1600),
        ("H200 (A3 Ultra)", 3200),
        ("B200 (A4)", 3200),
    ],
)
def test_a_cloud_machine_has_its_network(chip, gigabits):
    assert read(chip=chip, interconnect="").device.network_rate == pytest.approx(gigabits * 1e9 / 8)
    stated = read(chip=chip, interconnect="8x100 Gb/s per node").device.network_rate
    assert stated == pytest.approx(100e9), "what a row states comes first"


@given(
    st.text("0123456789abcdef", min_size=7, max_size=12), st.sampled_from(["torchao {}", "torch {} (nightly)", "@{}"])
)
def test_a_commit_names_no_attention_kernel(digits, form):
    """0afa4c1 is no FlashAttention 4."""
    version = form.format(f"0{digits}")
    named = read(framework="torchtitan", framework_version=version, notes="2025-06").software.attention
    assert named == read(framework="torchtitan", notes="2025-06").software.attention
