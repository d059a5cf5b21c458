"""Settings that rows state in columns of their own: replicas, schedules, parameters, what recomputation keeps."""

import csv
from dataclasses import replace

import pytest

from hlat.hardware import load_catalog
from hlat.planner.cost.calibration import load_constants
from hlat.planner.cost.compute_time import compute_times
from hlat.planner.problem.workload import FUSED_LOSS_BYTES, WorkloadColumns
from published_runs.program import COMPOSED_LOSS_BYTES, run_steps
from published_runs.reader import (
    Recomputation,
    UnreadableError,
    find_framework,
    read_recompute,
    read_schedule,
)
from published_runs.row import read_run

pytestmark = pytest.mark.slow  # no plan reads tables of runs: for who works on the reader

ROW = {
    "chip": "H100-SXM-80GB", "n_chips": "64", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
    "head_dim": "128", "ffn": "14336", "gated_mlp": "1", "vocab": "128256", "seq_len": "4096", "global_batch": "256",
    "micro_batch": "1", "tp": "1", "pp": "1", "dp": "64", "zero_stage": "3", "framework": "PyTorch FSDP",
    "activation_ckpt": "full", "precision": "bf16", "interconnect": "8x400 Gb/s per node",
}  # fmt: skip
PIPELINE = {"pp": "8", "dp": "8", "zero_stage": "1", "framework": "Megatron-LM", "vpp": "1"}


def read(**changes):
    return read_run(ROW | changes, load_catalog())


def seconds(*runs):
    return run_steps(WorkloadColumns([run.workload for run in runs])).step


def test_hybrid_sharding_gathers_weights_inside_its_replicas_only():
    whole, hybrid = read(), read(replicas="8")
    assert hybrid.workload.layout.replicas == 8
    slow = {"interconnect": "1x25 Gb/s per node"}
    one, eight = seconds(read(**slow), read(**slow, replicas="8"))
    assert eight < one, "over a slow network gathers inside an instance are faster"
    assert whole.workload.layout == replace(hybrid.workload.layout, replicas=1)
    assert read(zero_stage="0", replicas="64").workload.layout.replicas == 1, "nothing is sharded"
    with pytest.raises(UnreadableError, match="do not divide"):
        read(replicas="7")


@pytest.mark.parametrize(
    ("text", "splits", "divides", "balances"),
    [
        ("1F1B", False, False, False),
        ("", False, False, False),
        ("interleaved 1F1B", False, False, False),
        ("1F1B, layers redistributed by compute", False, False, True),
        ("1F1B + vocabulary parallel 2", False, True, False),
        ("interlaced (nnScaler)", False, True, False),
        ("ZB-V", True, False, False),
        ("zero bubble", True, False, False),
    ],
)
def test_words_of_schedules(text, splits, divides, balances):
    words = read_schedule(text).value
    assert (words.splits_backward, words.divides_head, words.balances_stages) == (splits, divides, balances)


def test_schedules_that_are_not_modelled_are_refused():
    with pytest.raises(UnreadableError, match="schedule not modelled"):
        read_schedule("DualPipe")


def test_a_divided_head_delays_no_stage():
    large = PIPELINE | {"vocab": "512000"}
    plain, balanced, divided = seconds(
        read(**large),
        read(**large, pipeline_schedule="1F1B, layers redistributed"),
        read(**large, pipeline_schedule="1F1B + vocabulary parallel"),
    )
    assert divided < balanced < plain


def test_a_vocabulary_follows_from_the_number_of_parameters():
    # 32 layers of 4096 x (2 x 128 x 40 + 3 x 14336), and two matrices of 128,256 x 4,096: 8.03e9, as Llama 3's.
    run = read(vocab="", n_params="8030000000")
    assert run.workload.shape.vocab == pytest.approx(128256, rel=0.01)
    tied = read(vocab="", n_params="7504924672", tied_embeddings="1")
    assert tied.workload.shape.vocab == pytest.approx(128256, rel=0.01)
    assert read(vocab="").workload.shape.vocab == 50304, "nothing states it"
    assert read(vocab="", n_params="7000000000").workload.shape.vocab == 50304, (
        "not enough for one: embeddings left out"
    )


@pytest.mark.parametrize("text", ["save qkvo_proj", "offload qkv_proj and input", "saves attention proj"])
def test_recomputation_that_keeps_the_projections_repeats_the_feed_forward_block(text):
    assert read_recompute(text).value == Recomputation("full", kept="projections")
    every, some, none = (read(activation_ckpt=policy) for policy in ("full", text, "none"))
    # gate and up of the three matrices, beside attention's 2 x 128 x 40 columns
    assert some.workload.layout.recomputed_products == pytest.approx(2 * 14336 / (3 * 14336 + 2 * 128 * 40))
    one, two, three = seconds(every, some, none)
    assert one > two > three


def test_pax_words_for_recomputing_everything():
    assert read_recompute("SAVE_NOTHING").value == Recomputation("full")


def test_gradients_in_sixteen_bits_and_fused_kernels():
    plain, halved = read(), read(precision="bf16 (main gradients bf16)")
    assert (plain.workload.software.gradient_bytes, halved.workload.software.gradient_bytes) == (4, 2)
    plain, engine = (read(framework=f"Megatron-LM{words}") for words in ("", ", Transformer Engine"))
    assert plain.workload.software.composed and not engine.workload.software.composed


def test_eager_code_composes_norms_and_rotations():
    names = ("PyTorch FSDP (transformers)", "PyTorch FSDP + torch.compile", "Megatron-LM", "PaddlePaddle (PaddleNLP)")
    eager, compiled, megatron, paddle = (read(framework=name).workload.software.composed for name in names)
    assert eager and paddle and megatron and not compiled
    assert not read(gated_mlp="0").workload.software.composed, "blocks of GPT have torch's layer norm, one kernel"


def test_losses_and_sums_of_gradients_follow_the_framework():
    def software(**changes):
        return read(**PIPELINE | changes).workload.software

    assert software(framework="Megatron-DeepSpeed").adds_apart
    before, since = (software(framework="Megatron-LM", notes=date).adds_apart for date in ("2021-04", "2022-05"))
    assert before and not since and not software().adds_apart, "apex has the kernel since March 2022"
    fused = {"LLM Foundry": True, "Megatron-LM": False, "nanotron": False, "Megatron-Core 0.8": True}
    found = {name: software(framework=name).loss_bytes for name in fused}
    assert found == {name: FUSED_LOSS_BYTES if one else COMPOSED_LOSS_BYTES for name, one in fused.items()}
    assert software(framework="MaxText").loss_bytes == FUSED_LOSS_BYTES, "XLA fuses it"


def test_checkpoints_and_sums_of_programs():
    """Defaults of programs: recomputation of a block to its end, and hidden sums of gradients."""

    def software(framework):
        return read(**PIPELINE | {"framework": framework}).workload.software

    names = ("Megatron-LM", "Megatron-DeepSpeed", "DeepSpeed", "NeMo 24.05", "PyTorch FSDP", "MaxText")
    found = {name: (software(name).recomputes_sums, software(name).overlaps_sums) for name in names}
    assert found == {
        "Megatron-LM": (True, False),
        "Megatron-DeepSpeed": (True, False),
        "DeepSpeed": (True, False),
        "NeMo 24.05": (True, True),
        "PyTorch FSDP": (False, True),
        "MaxText": (False, False),
    }
    assert software("Megatron-LM overlap-grad-reduce").overlaps_sums
    waits, hides = seconds(
        *(
            read(pp="1", dp="64", zero_stage="1", framework=f"Megatron-LM FlashAttention-2{words}")
            for words in ("", " overlap-grad-reduce")
        )
    )
    assert hides < waits


def test_programs_with_transformer_engine_gather_in_fp8():
    def gathers(framework, precision="fp8"):
        return read(**PIPELINE | {"framework": framework, "precision": precision}).workload.software.transformer_engine

    assert gathers("NeMo 25.02.01") and gathers("Megatron-LM") and gathers("Megatron-Bridge", "mxfp8")
    assert not gathers("NeMo 25.02.01", "bf16") and not gathers("torchtitan FSDP2") and not gathers("MaxText GPU")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("OneFlow (Megatron layout)", "OneFlow"),
        ("NeuronX Distributed / neuronx-nemo-megatron", "NxDT"),
        ("Meta internal (FSDP+TP+CP+PP)", "Meta"),
        ("DeepSpeed+Megatron", "Megatron-DeepSpeed"),
        ("FlagScale (Megatron-LM)", "Megatron-LM"),
    ],
)
def test_a_framework_that_mentions_another_is_itself(text, name):
    assert find_framework(text).name == name


def test_megatron_pads_the_vocabulary_on_every_tensor_rank():
    def vocabulary(**changes):
        return read(**PIPELINE | {"vocab": "50257", "tp": "2", "dp": "4"} | changes).workload.shape.vocab

    assert vocabulary() == 50432 and vocabulary() % 256 == 0
    assert vocabulary(framework="nanotron") == 50257


def test_composed_norms_cost_their_memory_traffic():
    run = read()
    layout = replace(run.workload.layout, recompute="none")
    composed, fused = (
        compute_times(
            WorkloadColumns(
                [replace(run.workload, layout=layout, software=replace(run.workload.software, composed=one))]
            ),
            load_constants(),
        )
        for one in (True, False)
    )
    # transformers' LlamaRMSNorm reads or writes 36 bytes per element and not 4, twice; rotations 22 and not 4; forward
    # once, backward half as much again.
    extra = 4096 * (2 * 32 * 4096 + 18 * (32 + 8) * 128)
    rate = run.workload.device.memory_rate * load_constants().values["memory", "all"]
    assert composed.pointwise - fused.pointwise == pytest.approx(2.5 * extra / rate)


def test_completed_cells_of_the_new_rows_say_where_they_are_from(published):
    with published.open(encoding="utf-8", newline="") as file:
        completed = [row for row in csv.DictReader(file) if "completed" in row["derived"]]
    assert completed
    assert all(".py" in row["derived"] or ".yaml" in row["derived"] for row in completed)


@pytest.fixture
def published(request):
    return request.config.rootpath / "benchmarks" / "published" / "new_runs.csv"
