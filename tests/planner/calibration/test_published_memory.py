"""Memory of published runs: which instrument a source read, and what it shows of other programs' tensors."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hlat.planner.calibration.accuracy import prediction_errors
from hlat.planner.calibration.memory_instrument import read_instrument
from hlat.planner.calibration.program_memory import profile_of, program_bytes
from hlat.planner.calibration.published_memory import predicted_gib
from hlat.planner.calibration.published_runs import PublishedRun, read_published_runs
from hlat.rehearsal.memory import MemoryTracker
from hlat.rehearsal.operations import OperationObserver
from tests.planner.calibration.test_published_runs import GOOD, HEADER, write


def row(framework: str, kind: str = "", changes: tuple[tuple[str, str], ...] = ()) -> str:
    text = GOOD.replace(",FSDP,9000,,,", f",{framework},9000,40,{kind},")
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


def read(tmp_path: Path, *rows: str) -> list[PublishedRun]:
    runs, skipped = read_published_runs(write(tmp_path, *rows))
    assert not skipped
    return runs


@pytest.mark.parametrize(
    ("kind", "framework", "instrument"),
    [
        ("torch max allocated, MB / 1024", "anything", "allocated"),
        ("peak_memory_allocated_gb", "NeMo", "allocated"),
        ("largest over the stages of max reserved / 1024", "Megatron-LM", "reserved"),
        ("torch peak as torchtitan prints it, GiB", "torchtitan FSDP2", "reserved"),
        ("peak memory, GB as published", "torchtitan FSDP2", "reserved"),
        ("nvidia-smi, GB", "DeepSpeed", "device"),
        ("used / total as published, GiB", "Megatron-Core", "device"),
        ("params + activations (analytic in the paper)", "Megatron-LM", "computed"),
        ("GB as published", "Megatron-LM", None),
        ("", "DeepSpeed", None),
        ("HBM usage as published", "AXLearn (JAX), XLA", None),
        ("nvidia-smi with preallocation of 90 %", "MaxText", None),
        ("peak memory reserved", "PyTorch FSDP with CPU offload", None),
    ],
)
def test_the_instrument_is_read_or_the_reading_is_not_compared(kind: str, framework: str, instrument: str) -> None:
    reading = read_instrument(kind, {"framework": framework})
    assert reading.instrument == instrument
    assert reading.reason


def test_readings_without_an_instrument_are_listed_with_the_reason(tmp_path: Path) -> None:
    memory = prediction_errors(write(tmp_path, row("FSDP"), row("torchtitan", "max reserved")))["memory"]
    assert memory["overall"]["n"] == 1 and memory["rows"][0]["instrument"] == "reserved"
    (other,) = memory["not_comparable"]
    assert other["reason"] == "the instrument is not stated"


def test_neither_source_nor_measurement_changes_a_prediction(tmp_path: Path) -> None:
    said = row("torchtitan", "max reserved")
    runs = read(tmp_path, said, said.replace("a,s,m,", "b,another,m,"), said.replace(",9000,40,", ",9000,70,"))
    assert len(set(predicted_gib(runs))) == 1


def test_a_table_without_a_column_for_recomputation_is_predicted(tmp_path: Path) -> None:
    header, text = (
        HEADER.replace("activation_ckpt,", ""),
        row("torchtitan", "max reserved").replace(",none,bf16", ",bf16"),
    )
    (run,), skipped = read_published_runs(write(tmp_path, text, header=header))
    assert not skipped and predicted_gib([run])[0] > 0


def test_torchtitans_operator_policy_keeps_less_than_all_and_more_than_inputs(tmp_path: Path) -> None:
    policies = ("full", "selective", "none")
    rows = (row("torchtitan", "max allocated", ((",1,none,bf16", f",1,{policy},bf16"),)) for policy in policies)
    full, operators, everything = predicted_gib(read(tmp_path, *rows))
    assert full < operators < everything


def test_a_device_holds_more_than_is_reserved_and_that_more_than_is_allocated(tmp_path: Path) -> None:
    kinds = ("max allocated", "max reserved", "nvidia-smi")
    for framework in ("torchtitan", "Megatron-LM", "DeepSpeed", "nanotron", "KempnerForge"):
        allocated, reserved, device = predicted_gib(read(tmp_path, *(row(framework, kind) for kind in kinds)))
        assert allocated < reserved < device


@pytest.mark.parametrize(("framework", "per_weight"), [("torchtitan", 12), ("Megatron-LM", 6 + 12 / 8)])
def test_state_is_that_of_the_programs_mixed_precision(tmp_path: Path, framework: str, per_weight: float) -> None:
    """8.03 billion weights of Llama-3 8B (here with 32,000 tokens: 7.24) on 8 devices; one micro-batch per step."""
    changes = ((",4096,256,1,H100", ",4096,8,1,H100"),) + (((",8,3,1,none", ",8,1,1,none"),) * (framework[0] == "M"))
    (run,) = read(tmp_path, row(framework, "max allocated", changes))
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 2 * 32000 * 4096
    shards = 8 if framework == "torchtitan" else 1
    assert program_bytes(run).state == pytest.approx(weights * per_weight / shards, rel=0.001)


@pytest.mark.parametrize(("framework", "widened"), [("PyTorch FSDP", True), ("KempnerForge", False)])
def test_bytes_of_a_loss_are_those_of_real_tensors(tmp_path: Path, framework: str, widened: bool) -> None:
    """Torch's loss, forward and backward: 14 bytes per logit if they are widened to fp32, else 8."""
    tokens, vocabulary = 64, 4096
    logits = torch.randn(tokens, vocabulary, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    tracker = MemoryTracker(dict)
    tracker.assign(logits, "other")
    tracker.assign(labels, "other")
    with OperationObserver(tracker.observe):
        F.cross_entropy(logits.float() if widened else logits, labels).backward()
    (run,) = read(tmp_path, row(framework, "max allocated"))
    assert tracker.peak / logits.numel() == pytest.approx(profile_of(run).logits, abs=0.1)
