"""Published runs: the rules for missing fields, and the promised accuracy."""

from pathlib import Path

import pytest

from hlat.hardware import load_catalog
from hlat.runtime.errors import PlanError
from published_runs import prediction_errors
from published_runs.runs import read_published_runs

HEADER = (
    "id,source,model,family,layers,hidden,heads,kv_heads,head_dim,ffn,gated_mlp,vocab,seq_len,global_batch,micro_batch,"
    "chip,n_chips,devices_per_chip,tp,sp,pp,cp,dp,zero_stage,vpp,activation_ckpt,precision,interconnect,framework,"
    "tok_s_chip_norm,memory_per_chip_gib,mem_kind,notes"
)
GOOD = "a,s,m,dense,32,4096,32,8,128,14336,1,32000,4096,256,1,H100-SXM-80GB,8,1,1,0,1,1,8,3,1,none,bf16,,FSDP,9000,,,"


def write(tmp_path: Path, *rows: str, header: str = HEADER) -> Path:
    file = tmp_path / "runs.csv"
    file.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
    return file


def test_a_prediction_does_not_depend_on_the_measured_value(tmp_path: Path) -> None:
    one, two = (prediction_errors(write(tmp_path, GOOD.replace("9000", speed)))["rows"][0] for speed in ("9000", "1"))
    assert one["predicted"] == two["predicted"]
    assert one["error"] == pytest.approx(one["predicted"] / 9000 - 1)


def test_a_prediction_does_not_depend_on_the_source(tmp_path: Path) -> None:
    one, two = (
        prediction_errors(write(tmp_path, GOOD.replace(",s,", f",{name},")))["rows"][0] for name in ("s", "MosaicML")
    )
    assert one["predicted"] == two["predicted"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("dense", "moe", "not a dense decoder"),
        ("H100-SXM-80GB", "Z900", "chip not in the catalog"),
        (",bf16,", ",nvfp4,", "precision not modelled"),
        (",256,1,H100", ",,1,H100", "not stated: global_batch"),
        (",256,1,H100", ",4,1,H100", "more data-parallel ranks"),
        (",9000,", ",,", "no throughput published"),
    ],
)
def test_rows_that_cannot_be_predicted_are_listed_with_the_reason(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    assert GOOD.count(old) == 1
    result = prediction_errors(write(tmp_path, GOOD, GOOD.replace(old, new)))
    assert result["overall"]["n"] == 1
    assert result["skipped"]["count"] == 1
    assert result["skipped"]["rows"][0]["reason"].startswith(reason)


def test_missing_fields_are_filled_in_and_reported(tmp_path: Path) -> None:
    row = GOOD.replace(",256,1,H100", ",256,,H100").replace(",3,1,none,", ",3,,,")
    (run,), _ = read_published_runs(write(tmp_path, row))
    # A layer keeps about 34 x 4,096 bytes per token (Korthikanti et al. 2022): 37e9 for two sequences in 32 layers and
    # 73e9 for four, beside a state of 16e9; the device has 80 GiB.
    assert run.workload.layout.micro_batch == 2
    fitting = "micro-batch 2, the largest that fits into the memory"
    assert run.assumed == (fitting, "no activation checkpointing", "FlashAttention 2")
    (complete,), _ = read_published_runs(write(tmp_path, GOOD))
    assert run.spread > complete.spread
    said = {reading.column: reading.sure for reading in run.readings}
    assert said["n_chips"] == said["zero_stage"] == "stated"


@pytest.mark.parametrize(
    ("old", "new", "policy", "passes"),
    [
        (",256,1,", ",256,1,", "none", 32),  # as stated
        (",256,1,", ",256,,", "none", 16),  # without a pipeline few micro-batches, as large as fits into the memory
        (",256,1,", ",96,,", "none", 6),
        (",256,1,", ",256,,", "full", 4),  # and of up to 8 sequences
        (",256,1,", ",96,,", "full", 2),
        (",FSDP,", ",torchtitan,", "none", 1),  # processes the batch of a rank at once
        (",FSDP,", ",MaxText,", "none", 1),  # ignores the stated micro-batch
    ],
)
def test_micro_batches_per_step(tmp_path: Path, old: str, new: str, policy: str, passes: int) -> None:
    row = GOOD if "FSDP" not in old or "MaxText" in new else GOOD.replace(",256,1,", ",256,,")
    row = row.replace(",3,1,none,", f",3,1,{policy},")
    (run,), _ = read_published_runs(write(tmp_path, row.replace(old, new)))
    assert run.workload.layout.global_batch / run.workload.layout.data / run.workload.layout.micro_batch == passes


def test_blocks_compiled_by_torch_overlap_like_eager_ones(tmp_path: Path) -> None:
    eager, blocks, xla = (
        read_published_runs(write(tmp_path, GOOD.replace(",FSDP,", f",{name},")))[0][0].workload.software
        for name in ("FSDP", "FSDP + torch.compile", "MaxText")
    )
    assert eager.eager and not blocks.eager and not xla.eager
    assert eager.overlaps_data and blocks.overlaps_data and xla.overlaps_data
    assert eager.overlaps_sums and blocks.overlaps_sums and not xla.overlaps_sums
    assert eager.attention == blocks.attention != xla.attention


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="columns"):
        prediction_errors(write(tmp_path, "1,2", header="a,b"))
    with pytest.raises(PlanError, match="gone"):
        prediction_errors(tmp_path / "gone.csv")


def test_accuracy_on_measured_runs(shared: Path) -> None:
    """Goals of docs/notebook/planner.md, with the shipped constants, which were fitted on these runs."""
    file = shared / "data" / "published_runs.csv"
    if not file.is_file():
        pytest.skip("the table of measured runs is not here")
    result = prediction_errors(file)
    gpus = [abs(row["error"]) for row in result["rows"] if row["chip"].startswith(("A100", "H100", "H200"))
            and "single node" not in row["source"]]  # fmt: skip
    assert len(gpus) > 500
    assert sum(gpus) / len(gpus) < 0.10
    assert sorted(gpus)[len(gpus) // 2] < 0.08
    trainium = [abs(row["error"]) for row in result["rows"] if row["chip"].startswith("Trainium")]
    assert sum(trainium) / len(trainium) < 0.10
    assert result["skipped"]["count"] + result["overall"]["n"] == 1049
    memory = result["memory"]["groups"]
    assert {group["n"]: group["mean"] < 0.10 for group in memory.values()} == {69: True, 4: True}


def test_memory_of_a_published_run_is_the_count_plus_one_constant(tmp_path: Path) -> None:
    """Korthikanti et al. 2022, figure 1 and table 5: GPT-3 on 64 devices, 45.56 GiB of state + 12.35 of activations.

    These are means over all ranks; the first also has the embedding, 18 bytes for each of 51200 x 12288 / 8 weights.
    """
    gpt = "a,s,m,dense,96,12288,96,96,128,49152,0,51200,2048,64,1,A100-SXM-80GB,64,1,8,1,8,1,1,0,3,selective,fp16,,"
    run = gpt + "Megatron-LM no FlashAttention,140,59.5,analytic in the paper,"
    (row,) = prediction_errors(write(tmp_path, run))["memory"]["rows"]
    embedding = 18 * 51200 * 12288 / 8 / 2**30
    assert row["constant_gib"] == 0 and row["predicted_gib"] == pytest.approx(45.56 + 12.35 + embedding, rel=0.005)
    (other,) = prediction_errors(write(tmp_path, run.replace(",59.5,", ",1.0,")))["memory"]["rows"]
    assert other["predicted_gib"] == row["predicted_gib"]


def test_megatron_core_interleaves_by_default(tmp_path: Path) -> None:
    row = GOOD.replace(",FSDP,", ",Megatron-Core,").replace("dense,32,", "dense,48,")
    row = row.replace(",1,1,0,1,1,8,3,1,", ",1,1,0,4,1,2,1,,")
    (run,), _ = read_published_runs(write(tmp_path, row))
    assert (run.workload.layout.pipeline, run.workload.layout.virtual) == (4, 6)
    assert "6 stages per pipeline rank" in run.assumed


def test_the_stated_interconnect_sets_the_network_rate(tmp_path: Path) -> None:
    (run,), _ = read_published_runs(write(tmp_path, GOOD.replace(",bf16,,", ",bf16,4x Omni-Path,")))
    assert run.workload.device.network_rate == 17e9


def test_statistics_are_of_absolute_errors(tmp_path: Path) -> None:
    """Rows that differ only in the measured value m: errors p / m - 1 of one prediction p."""
    predicted = prediction_errors(write(tmp_path, GOOD))["rows"][0]["predicted"]
    speeds = [predicted / (1 + error) for error in (-0.5, 0.1, 0.2, 0.3, 0.4)]
    overall = prediction_errors(write(tmp_path, *(GOOD.replace(",9000,", f",{speed!r},") for speed in speeds)))[
        "overall"
    ]
    assert overall == {"n": 5, "mean": pytest.approx(0.3), "median": pytest.approx(0.3), "p90": pytest.approx(0.46)}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (",none,bf16,", ",xyzzy,bf16,", "activation checkpointing not understood"),
        (",bf16,,", ",quux,,", "precision not understood"),
        (",8,3,1,none", ",8,maybe,1,none", "sharding not understood"),
        ("dense,32,", "dense,30-34,", "layers not one number"),
        (",9000,", ",fast,", "tok_s_chip_norm not one number"),
        (",bf16,,", ",fp8,,", None),
        ("H100-SXM-80GB", "A100-SXM-80GB", None),
    ],
)
def test_texts_that_are_not_understood_are_refused(tmp_path: Path, old: str, new: str, reason: str | None) -> None:
    assert GOOD.count(old) == 1
    runs, skipped = read_published_runs(write(tmp_path, GOOD.replace(old, new)))
    assert [row.reason.startswith(reason) for row in skipped] == [True] if reason else len(runs) == 1
    both = GOOD.replace("H100-SXM-80GB", "A100-SXM-80GB").replace(",bf16,,", ",fp8,,")
    assert "no 8-bit" in read_published_runs(write(tmp_path, both))[1][0].reason


def test_an_unknown_network_widens_the_interval_of_several_machines_only(tmp_path: Path) -> None:
    several = GOOD.replace("H100-SXM-80GB,8,", "H100-SXM-80GB,64,").replace("1,1,8,3", "1,1,64,3")
    (stated,), _ = read_published_runs(write(tmp_path, several.replace(",bf16,,", ",bf16,8x NDR per node,")))
    for text in ("", "very fast"):
        (unknown,), _ = read_published_runs(write(tmp_path, several.replace(",bf16,,", f",bf16,{text},")))
        (single,), _ = read_published_runs(write(tmp_path, GOOD.replace(",bf16,,", f",bf16,{text},")))
        assert single.spread < stated.spread < unknown.spread
        assert any("the catalog's network" in reason for reason in unknown.assumed)


def test_a_chip_of_the_users_catalog_is_read(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "sources: {me: measured}\n"
        "chips: [{name: Z900, names: [ACME Z900], family: hopper, memory: {gib: 80, gb_per_second: 3000, source: me},"
        " tflops: {bfloat16: {dense: 500, source: me}}}]\n"
        "instances: [{name: z-box, chip: Z900, chips: 4, domain: 4, link: 100, network: 50, source: me,"
        " failures: {per_day: 0.01, source: me}}]\n",
        encoding="utf-8",
    )
    catalog = load_catalog(str(mine))
    for name in ("Z900", "z-box", "acme z900"):
        (run,), _ = read_published_runs(write(tmp_path, GOOD.replace("H100-SXM-80GB", name)), catalog)
        device = run.workload.device
        assert (device.per_instance, device.link_rate, device.peak) == (4, 100e9, 500e12)


def test_devices_of_another_number_per_chip_have_the_same_total(tmp_path: Path) -> None:
    """Trainium2 as 8 cores per chip instead of the catalog's 4 devices of two cores: half the rate each."""
    row = GOOD.replace("H100-SXM-80GB,8,1,", "Trainium2,16,4,").replace("1,1,8,3", "1,1,64,3")
    (four,), _ = read_published_runs(write(tmp_path, row))
    (eight,), _ = read_published_runs(
        write(tmp_path, row.replace("Trainium2,16,4,", "Trainium2,16,8,").replace("1,1,64,3", "1,1,128,3"))
    )
    assert eight.workload.device.peak == four.workload.device.peak / 2
    assert eight.workload.device.per_instance == four.workload.device.per_instance * 2
