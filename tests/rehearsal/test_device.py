"""Rehearsals of devices that are not here: decisions, refusals, and the memory that attention takes there."""

import json
from pathlib import Path
from typing import Any

import pytest

import hlat
from hlat.config import Recipe
from hlat.hardware import load_catalog, parse_cluster
from hlat.rehearsal import RankReport, Rehearsal, SimulatedDevice, decision_lines, parse_device, rehearse, world
from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import HardwareError, LaunchError
from tests.support.bf16 import bf16_instructions
from tests.support.rehearsal.small_recipes import SMALL, recipe_of

CATALOG = load_catalog()


def device(text: str) -> SimulatedDevice:
    """The device of a word on the command line."""
    found = parse_device(text, None, CATALOG)
    assert found is not None
    return found


def gpu(major: int, minor: int, vendor: str = "nvidia") -> SimulatedDevice:
    """A GPU that the catalog does not have."""
    chip = device("cuda:h100").chip.model_copy(update={"capability": (major, minor), "vendor": vendor})
    return SimulatedDevice("cuda", chip)


def choices(rehearsed: Rehearsal) -> dict[str, str]:
    """Choice by decision."""
    return {decision.name: decision.choice for decision in rehearsed.decisions}


def one(recipe: Recipe, on: SimulatedDevice | None, world: int = 1) -> RankReport:
    """Report of the first rank."""
    return rehearse(recipe, world, [0], device=on).ranks[0]


def test_the_cpu_of_this_machine_needs_no_simulation() -> None:
    assert parse_device(None, None, CATALOG) is parse_device("cpu", None, CATALOG) is None
    rehearsed = rehearse(recipe_of(1), 1)
    assert rehearsed.decisions == () and rehearsed.to_dict()["device"] is None
    assert list(decision_lines(rehearsed)) == []


def test_the_decisions_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken before ranks are rehearsed, which others here do."""
    monkeypatch.setattr(world, "_outcomes", lambda *arguments: iter(()))
    monkeypatch.setattr(world, "_judge", lambda *arguments: None)
    found = choices(rehearse(recipe_of(2, precision={"mode": "auto"}), 2, device=device("cuda:h100")))
    assert found["precision"] == "mixed" and found["products"] == "bfloat16"
    assert found["optimizer"] == "torch's AdamW, fused"
    assert found["attention"] == "cudnn_attention" and found["blocks"] == "compiled by inductor"
    assert found["process group"] == "nccl" and found["host memory of batches and saved state"] == "pinned"
    narrow = choices(rehearse(recipe_of(1, precision={"mode": "bf16-sr"}), 1, device=device("cuda:a100-80gb")))
    assert narrow["optimizer"] == "AdamW over bf16 weights, kernel triton"
    strict = rehearse(
        recipe_of(1, precision={"mode": "mixed"}, run={"deterministic": True}), 1, device=device("cuda:h100")
    )
    assert choices(strict)["attention"] == "flash_attention, deterministic backward"
    old = choices(rehearse(recipe_of(1, precision={"mode": "bf16-sr"}), 1, device=gpu(6, 1)))
    assert old["blocks"] == "eager" and old["optimizer"].endswith("kernel torch") and old["attention"] == "math"
    assert choices(rehearse(recipe_of(1, precision={"mode": "auto"}), 1, device=gpu(7, 5)))["precision"] == "fp32"


@pytest.mark.parametrize("name", [pytest.param("cuda:h100", marks=pytest.mark.slow), "neuron"])
def test_the_device_takes_as_many_flops_as_the_cpu_and_keeps_the_same_between_steps(name: str) -> None:
    recipe = recipe_of(2, precision={"mode": "mixed"}, parallel={"zero": 3})
    here, there = one(recipe, None, 2), one(recipe, device(name), 2)
    assert (there.flops, there.messages, there.between_steps) == (here.flops, here.messages, here.between_steps)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_a_recomputed_block_runs_the_attention_of_the_device_again(policy: str) -> None:
    """The FLOPs of the CPU's kernel, in the forward pass, and again in the backward pass."""
    recipe = recipe_of(1, precision={"mode": "mixed"}, memory={"activation_checkpointing": policy})
    with bf16_instructions():
        here = one(recipe, None)
    assert {one(recipe, device(name)).flops for name in ("cuda:h100", "neuron")} == {here.flops}


LONG: dict[str, Any] = {
    "model": {**SMALL["model"], "max_sequence_length": 256},
    "data": {**SMALL["data"], "sequence_length": 256},
    "batch": {"global_batch": 2, "micro_batch": 2},
}


def test_attention_without_a_fused_kernel_keeps_its_scores() -> None:
    """fp32 with grouped heads: torch has no fused kernel on GPUs, which a CPU has.

    Softmax keeps its result for backward, rows x heads x queries x keys fp32 numbers in each of 4 layers. At the peak,
    in backward, one layer has a gradient of that size too, and operands that are as large as one more.
    """
    recipe = recipe_of(1, **LONG)
    scores = 2 * 4 * 256 * 256 * 4
    more = one(recipe, device("cuda:h100")).peak_bytes - one(recipe, None).peak_bytes
    assert choices(rehearse(recipe, 1, device=device("cuda:h100")))["attention"] == "math"
    assert 4 * scores < more < 8 * scores


def test_masks_are_built_where_no_kernel_aligns_them() -> None:
    """Context parallelism of 2: chunks of 64 queries attend to prefixes of 64 to 256 keys.

    Rank 0 has chunks 0 and 3. Chunk 3 takes a mask of 64 x 256 in each of 4 layers, kept for backward in bf16. Flash
    attention keeps the state of a random generator instead, a few numbers.
    """
    recipe = recipe_of(2, **LONG, parallel={"context": 2}, precision={"mode": "mixed"})
    on_gpu, on_neuron = one(recipe, device("cuda:h100"), 2), one(recipe, device("neuron"), 2)
    kept = 4 * 64 * 256 * 2
    more = on_neuron.peak["activations"] - on_gpu.peak["activations"]
    assert abs(more - kept) <= 4 * 64, more
    assert choices(rehearse(recipe, 2, device=device("neuron")))["masks of context parallelism"].startswith("built")
    assert choices(rehearse(recipe, 2, device=device("cuda:h100")))["masks of context parallelism"].startswith("none")


def test_documents_are_attended_to_by_the_kernel_of_the_device() -> None:
    isolated = recipe_of(1, data={**SMALL["data"], "isolate": True}, precision={"mode": "mixed"})
    found = rehearse(isolated, 1, device=device("cuda:h100"))
    assert choices(found)["attention"] == "flex_attention within documents"
    assert found.ranks[0].flops == one(isolated, None).flops


def test_everything_that_a_device_cannot_do_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of hlat's layouts are evenly spaced; here those of four ranks are taken for others."""
    plain = type(backend_of("neuron")).group_refusal
    uneven = lambda self, ranks: plain(self, [0, 1, 3] if len(ranks) == 4 else ranks)  # noqa: E731
    monkeypatch.setattr(type(backend_of("neuron")), "group_refusal", uneven)
    recipe = recipe_of(
        8,
        parallel={"pipeline": 4, "tensor": 1},
        data={**SMALL["data"], "isolate": True},
        precision={"mode": "fp8"},
        optimizer={"kind": "muon"},
    )
    with pytest.raises(LaunchError) as refused:
        rehearse(recipe, 8, device=device("neuron"))
    lines = str(refused.value).splitlines()
    wanted = ("precision.mode=fp8", "data.isolate=true", "parallel.pipeline=4", "optimizer.kind=muon", "evenly spaced")
    assert [sum(word in line for line in lines) for word in wanted] == [1] * len(wanted), lines
    fp8 = recipe_of(1, precision={"mode": "fp8"})
    for chip in (device("cuda:a100-80gb"), gpu(9, 0, vendor="amd")):
        with pytest.raises(LaunchError, match=r"precision\.mode=fp8: .*NVIDIA GPU"):
            rehearse(fp8, 1, device=chip)
    forced = recipe_of(1, run={"compile": "blocks"})
    with pytest.raises(LaunchError, match=r"run\.compile=blocks: Triton needs"):
        rehearse(forced, 1, device=gpu(6, 1))


def test_stochastic_rounding_in_hardware_is_that_of_trainium() -> None:
    recipe = recipe_of(1, precision={"mode": "bf16-sr", "rounding": "hardware"}, run={"deterministic": False})
    assert choices(rehearse(recipe, 1, device=device("neuron")))["rounding"] == "hardware"
    with pytest.raises(LaunchError, match=r"precision\.rounding=hardware: cuda devices"):
        rehearse(recipe, 1, device=device("cuda:h100"))


def test_a_simulation_leaves_nothing_behind() -> None:
    rehearse(recipe_of(1), 1, device=device("neuron"))
    assert backend_of("cpu").device_type == "cpu" and backend_of("cuda").device_type == "cuda"


@pytest.mark.parametrize(
    ("text", "chip"),
    [("cuda:h100", "H100 SXM"), ("cuda:H100-PCIe", "H100 PCIe"), ("cuda:a10", "A10"), ("cuda:rtx4090", "RTX 4090"),
     ("cuda:A100 80GB", "A100 80GB"), ("neuron", "Trainium2"), ("neuron:trainium3", "Trainium3")],
)  # fmt: skip
def test_a_chip_is_named_by_its_first_words(text: str, chip: str) -> None:
    assert device(text).chip.name == chip


@pytest.mark.parametrize(
    ("text", "cluster", "says"),
    [
        ("tpu", None, "no device type 'tpu'; write cpu, cuda, neuron"),
        ("cuda", None, "decisions depend on the chip"),
        ("cuda:h10", None, "no chip 'h10' of type cuda in the catalog; known: A100 40GB"),
        ("neuron:h100", None, "known: Trainium2, Trainium3"),
        ("cuda", "trn2.48xlarge:1", "the chips of trn2.48xlarge:1 are of type neuron"),
        (None, "trn1.32xlarge:4", "no backend for Trainium1"),
    ],
)
def test_a_device_that_is_not_known_is_refused(text: str | None, cluster: str | None, says: str) -> None:
    of_cluster = None if cluster is None else parse_cluster(cluster, CATALOG)
    with pytest.raises(HardwareError, match=says):
        parse_device(text, of_cluster, CATALOG)


def test_a_cluster_gives_the_chip() -> None:
    cluster = parse_cluster("p5.48xlarge:8", CATALOG)
    for text in (None, "cuda"):
        found = parse_device(text, cluster, CATALOG)
        assert found is not None and found.chip.name == "H100 SXM"


def test_programs_get_the_decisions_as_json(recipe_file: Path, corpus: Path, tmp_path: Path, cli) -> None:
    words = ("rehearse", recipe_file, f"data.path={corpus}", "--world", "1", "--device", "neuron")
    trace = tmp_path / "trace.json"
    done = cli(*words, "--json", "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["device"]
    ours = hlat.rehearse(recipe_file, {"data.path": str(corpus)}, world=1, device="neuron").to_dict()["device"]
    assert found == ours and (found["type"], found["chip"], found["memory_bytes"]) == ("neuron", "Trainium2", 24 << 30)
    assert {decision["name"] for decision in found["decisions"]} >= {"attention", "blocks", "optimizer"}
    assert json.loads(trace.read_text())["traceEvents"]
    said = cli(*words).stdout
    assert "simulated: neuron (Trainium2)" in said and "memory: fits. Rank 0" in said and "24.000 GiB" in said
