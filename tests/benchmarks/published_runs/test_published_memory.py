"""Memory of published runs: which instrument a source read, and what it shows of other programs' tensors."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hlat.rehearsal.observers import MemoryTracker, OperationObserver
from published_runs import program_memory
from published_runs.accuracy import prediction_errors
from published_runs.memory_instrument import read_instrument
from published_runs.program_memory import program_bytes
from published_runs.program_profiles import profile_of
from published_runs.published_memory import predicted_gib
from published_runs.runs import PublishedRun, read_published_runs
from tests.benchmarks.published_runs.test_published_runs import GOOD, HEADER, write

pytestmark = pytest.mark.slow  # memory of other programs, which no plan predicts

WEIGHTS = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 2 * 32000 * 4096


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
    shards = 8 if framework == "torchtitan" else 1
    assert program_bytes(run).state == pytest.approx(WEIGHTS * per_weight / shards, rel=0.001)


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


def test_nanotrons_loss_has_the_bytes_of_its_operations(tmp_path: Path) -> None:
    """Logits widened to fp32, the largest subtracted into new memory, exponentials there in place."""
    tokens, vocabulary = 64, 4096
    logits = torch.randn(tokens, vocabulary)
    tracker = MemoryTracker(dict)
    tracker.assign(logits, "other")
    with OperationObserver(tracker.observe):
        shifted = logits - logits.max(dim=-1)[0].unsqueeze(dim=-1)
        torch.exp(shifted, out=shifted)
        shifted.div_(shifted.sum(dim=-1).unsqueeze(dim=-1))
    (run,) = read(tmp_path, row("nanotron", "max reserved"))
    assert tracker.peak / logits.numel() == pytest.approx(profile_of(run).logits, abs=0.1)


@pytest.mark.parametrize(("pipeline", "layers"), [(2, 14), (4, 7), (8, 4), (16, 2)])
def test_nanotrons_first_stage_takes_layers_until_it_has_more_than_its_share(
    tmp_path: Path, pipeline: int, layers: int
) -> None:
    """A model of 24 layers and 50,257 tokens, as nanotron's benchmark has; the loop is that of its ``build_model``."""
    layer, head = 4 * 2048**2 + 3 * 2048 * 4096, 50257 * 2048
    costs = [0, *[layer] * 24, 0, head]  # embedding, layers, norm, head
    blocks = total = 0
    for cost in costs:
        blocks, total = blocks + 1, total + cost
        if total > sum(costs) / pipeline:
            break
    assert blocks == layers + 1, "the embedding is a block too"
    changes = (
        (",32,4096,32,8,128,14336,1,32000,", ",24,2048,32,32,64,4096,1,50257,"),
        (",8,1,1,0,1,1,8,3,1,none", f",{pipeline},1,1,0,{pipeline},1,1,1,1,none"),
    )
    (run,) = read(tmp_path, row("nanotron", "max reserved", changes))
    assert program_bytes(run).state == pytest.approx((layers * layer + head) * (2 + 6 + 12), rel=0.001)


def test_nanotrons_first_stage_has_no_more_layers_than_the_model(tmp_path: Path) -> None:
    """With a large head the loop reaches its end before the first of two stages has its share."""
    layer, head = 4 * 2048**2 + 3 * 2048 * 4096, 50257 * 2048
    assert 2 * layer < (2 * layer + head) / 2
    changes = (
        (",32,4096,32,8,128,14336,1,32000,", ",2,2048,32,32,64,4096,1,50257,"),
        (",8,1,1,0,1,1,8,3,1,none", ",2,1,1,0,2,1,1,1,1,none"),
    )
    (run,) = read(tmp_path, row("nanotron", "max reserved", changes))
    assert program_bytes(run).state == pytest.approx((2 * layer + head) * (2 + 6 + 12), rel=0.001)


@pytest.mark.parametrize(("month", "keeps"), [("2024-07", True), ("2024-08", False), ("2025-03", False), ("", False)])
def test_tensor_ranks_of_nanotron_kept_what_they_gather_until_august_2024(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, month: str, keeps: bool
) -> None:
    """Two inputs of each layer's products, of which 7 of 8 parts are those of other ranks."""
    changes = ((",8,1,1,0,1,1,8,3,1,none", ",8,1,8,1,1,1,1,1,1,none"),)
    (run,) = read(tmp_path, row("nanotron", "max reserved", changes) + month)
    kept = program_bytes(run).transient
    monkeypatch.setattr(program_memory, "profile_of", lambda run: replace(profile_of(run), gathers=0))
    layers, tokens, hidden = 32, 4096, 4096
    assert kept - program_bytes(run).transient == keeps * layers * 2 * tokens * 2 * hidden * 7 / 8


@pytest.mark.parametrize("sequences", [1, 2])
def test_nanotron_keeps_attentions_output_twice_where_it_transposes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    """A transposed (batch, sequence, width) is copied when a product makes it two-dimensional; not for a batch of 1."""
    attended = torch.randn(sequences, 6, 4).transpose(0, 1)
    copied = attended.reshape(-1, 4).data_ptr() != attended.data_ptr()
    (run,) = read(tmp_path, row("nanotron", "max reserved", ((",256,1,H100", f",256,{sequences},H100"),)))
    kept = program_bytes(run).transient
    monkeypatch.setattr(program_memory, "profile_of", lambda run: replace(profile_of(run), copies_attention=False))
    layers, tokens, hidden = 32, sequences * 4096, 4096
    assert kept - program_bytes(run).transient == copied * layers * 2 * tokens * hidden


TRAINER = "HF Trainer + FSDP (fms-hf-tuning)"


def test_a_trainer_on_16_bit_weights_needs_most_in_the_optimizers_step(tmp_path: Path) -> None:
    """Torch's AdamW over bf16 weights, many tensors at a time as on GPUs: weights, gradients, moments, temporaries."""
    weights = [torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(50)]
    optimizer = torch.optim.AdamW(weights, foreach=True)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    tracker = MemoryTracker(dict)
    moments = (state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    for tensor in (*weights, *(weight.grad for weight in weights), *moments):
        assert tensor is not None
        tracker.assign(tensor, "other")
    with OperationObserver(tracker.observe):
        optimizer.step()
    per_weight = tracker.peak / sum(weight.numel() for weight in weights)
    alone = ((",8,1,1,0,1,1,8,3,1,none", ",1,1,1,0,1,1,1,0,1,full"), (",256,1,H100", ",1,1,H100"))
    (run,) = read(tmp_path, row(TRAINER, "max allocated", alone))
    found = program_bytes(run)
    assert (found.state + found.transient) / WEIGHTS == pytest.approx(per_weight, rel=0.02)


@pytest.mark.parametrize(("notes", "per_weight"), [("", 6), ("weights in bfloat16 with --bf16", 12)])
def test_accelerate_widens_shards_where_precision_is_mixed(tmp_path: Path, notes: str, per_weight: int) -> None:
    """Weights and two moments in 16 or in 32 bits; gradients do not exist before the only backward pass."""
    changes = ((",4096,256,1,H100", ",4096,8,1,H100"),)
    (run,) = read(tmp_path, row(TRAINER, "max allocated", changes) + notes)
    assert program_bytes(run).state == pytest.approx(WEIGHTS * per_weight / 8, rel=0.001)


def test_losses_of_fused_kernels_take_less(tmp_path: Path) -> None:
    whole, foak, liger = (
        program_bytes(run).transient
        for run in read(
            tmp_path,
            *(
                row(TRAINER, "max allocated", ((",4096,256,1,H100", ",4096,8,1,H100"),)) + notes
                for notes in ("", "fused Triton kernels (foak-fast-kernels)", "fused Triton kernels with Liger")
            ),
        )
    )
    assert whole - foak == pytest.approx((14 - 8) * 4096 * 32000)
    tokens, hidden, vocabulary = 4096, 4096, 32000
    assert foak - liger == 8 * tokens * vocabulary - liger_bytes(tokens, hidden, vocabulary)


def liger_bytes(tokens: int, hidden: int, vocabulary: int) -> int:
    """Gradients of hidden states and head, and 16-bit and fp32 logits of one part (fused_linear_cross_entropy.py)."""
    return 2 * tokens * hidden + 2 * vocabulary * hidden + (2 + 4) * tokens * hidden


def test_ligers_loss_has_the_bytes_of_its_operations() -> None:
    """Logits of as many parts of the tokens as the vocabulary is times as wide as the hidden states, one by one."""
    tokens, width, vocabulary = 256, 64, 512
    hidden, head = (torch.randn(rows, width, dtype=torch.bfloat16) for rows in (tokens, vocabulary))
    tracker = MemoryTracker(dict)
    for tensor in (hidden, head):
        tracker.assign(tensor, "other")
    with OperationObserver(tracker.observe):
        of_hidden, of_head = torch.zeros_like(hidden), torch.zeros_like(head)
        for part, gradient in zip(hidden.chunk(vocabulary // width), of_hidden.chunk(vocabulary // width), strict=True):
            logits = part @ head.t()
            wide = logits.float()
            wide.exp_()
            wide.div_(wide.sum(dim=-1, keepdim=True))
            logits.copy_(wide)
            torch.mm(logits, head, out=gradient)
            torch.addmm(of_head, logits.t(), part, out=of_head)
            del logits, wide
    own = tracker.peak - hidden.nbytes - head.nbytes
    assert own == pytest.approx(liger_bytes(tokens, width, vocabulary), rel=0.02)


@pytest.mark.parametrize(
    ("framework", "notes", "is_chunked"),
    [
        (TRAINER, "fused Triton kernels with Liger", True),
        ("PyTorch FSDP", "Liger kernels", True),
        (TRAINER, "without Liger", False),
        (TRAINER, "fused kernels without foak and Liger", False),
        (TRAINER, "not compiled; Liger", True),
        (TRAINER, "no recomputation but Liger", True),
    ],
)
def test_an_option_counts_for_every_program_unless_it_is_denied(
    tmp_path: Path, framework: str, notes: str, is_chunked: bool
) -> None:
    (run,) = read(tmp_path, row(framework, "max allocated") + notes)
    assert profile_of(run).chunked_loss == is_chunked


@pytest.mark.parametrize("notes", ["without --bf16", "without fused kernels (foak)"])
def test_a_denied_option_is_that_of_no_option(tmp_path: Path, notes: str) -> None:
    denied, plain = read(tmp_path, row(TRAINER, "max allocated") + notes, row(TRAINER, "max allocated"))
    assert profile_of(denied) == profile_of(plain)


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    text = row("Megatron-LM", "max allocated", ((",8,1,1,0,1,1,8,3,1,none", ",1,1,1,0,1,1,1,0,1,none"),))
    states = []
    for tied in ("0", "1"):
        (run,), _ = read_published_runs(write(tmp_path, f"{text},{tied}", header=f"{HEADER},tied_embeddings"))
        states.append(program_bytes(run).state)
    vocabulary = 32000
    assert states[0] - states[1] == vocabulary * 4096 * 18


def test_zero_3_gathers_one_matrix_of_the_head_tied_or_not(tmp_path: Path) -> None:
    found = []
    for tied in ("0", "1"):
        table = write(tmp_path, f"{row('torchtitan', 'max allocated')},{tied}", header=f"{HEADER},tied_embeddings")
        (run,), _ = read_published_runs(table)
        assert run.workload.layout.zero == 3 and run.workload.layout.pipeline == 1
        found.append(program_bytes(run))
    assert found[0].transient == found[1].transient
    assert found[0].state > found[1].state


def test_a_word_that_is_no_switch_skips_the_row(tmp_path: Path) -> None:
    table = write(tmp_path, f"{row('torchtitan', 'max allocated')},ture", header=f"{HEADER},tied_embeddings")
    runs, (skipped,) = read_published_runs(table)
    assert not runs and skipped.reason == "tied_embeddings not understood: ture"


@pytest.mark.parametrize(("month", "per_logit"), [("2025-01", 4), ("2025-03", 14), ("2025-06", 4), ("", 4)])
def test_torchtitans_loss_was_not_compiled_for_some_weeks(tmp_path: Path, month: str, per_logit: int) -> None:
    text = row("torchtitan + torch.compile", "max reserved") + month
    (run,) = read(tmp_path, text)
    assert profile_of(run).logits == per_logit
