"""Bytes counted for a pass of a block, and for head and loss, are those that real tensors take.

The witness runs real modules on a CPU and adds up the storages that are alive after each operation.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hlat.activation_checkpointing.plan import POLICIES
from hlat.activation_checkpointing.recomputation import LastRecomputed, RecomputingForward
from hlat.config.sections.model import ModelConfig
from hlat.config.sections.training import ParallelConfig
from hlat.model import CrossEntropy, head_loss
from hlat.model.kernels.attention import attention_is_used_on
from hlat.model.kernels.library import are_used_on
from hlat.model.layers import DecoderBlock, Rope
from hlat.parallel.layout import StepShape
from hlat.parallel.stages.backward_memory import EndTensors, loss_peak
from hlat.parallel.stages.transient_sizes import EagerKernels, Passed, block_bytes, saved_bytes
from hlat.precision import MODES
from hlat.rehearsal.observers import MemoryTracker, OperationObserver
from tests.support.bf16 import bf16_instructions

ROWS, LENGTH = 2, 64
MODEL = ModelConfig(
    vocab_size=4096,
    layers=1,
    hidden_size=256,
    intermediate_size=704,
    heads=8,
    kv_heads=4,
    max_sequence_length=LENGTH,
)


def tracking(*existing: torch.Tensor) -> MemoryTracker:
    """Bytes of live tensors; these exist already (a view of one would count as new)."""
    tracker = MemoryTracker(dict)
    for tensor in existing:
        tracker.assign(tensor, "other")
    return tracker


class _Rest(torch.autograd.Function):
    """The rest of a model after a block: saves nothing; its backward pass makes a gradient that autograd owns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.randn(ctx.shape, dtype=ctx.dtype)


@pytest.fixture(name="bf16_instructions")
def _bf16_instructions() -> Iterator[None]:
    with bf16_instructions():
        yield


@pytest.mark.usefixtures("bf16_instructions")
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("mode", ["fp32", "mixed", "bf16-sr"])
@pytest.mark.parametrize("coalesce", [True, False])
def test_bytes_of_a_blocks_passes_are_those_of_real_tensors(mode: str, policy: str, coalesce: bool) -> None:
    model = MODEL.model_copy(update={"coalesce": coalesce})
    dtypes = MODES[mode]
    step = StepShape(model, ParallelConfig(), 1, LENGTH, ROWS, ROWS, mode, policy)
    cast = dtypes.weights.itemsize if dtypes.weights != dtypes.compute else 0
    kernels = EagerKernels(fused=are_used_on(torch.device("cpu")), head_sums=attention_is_used_on("cpu"))
    passed = Passed.of(step, (False, False), kernels)
    counted = block_bytes(passed, kernels, cast, kept=dtypes.gradients.itemsize)
    saved = saved_bytes(passed).per_layer

    block = DecoderBlock(model).to(dtypes.weights)
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if POLICIES[policy]:
        block.forward = RecomputingForward(block, POLICIES[policy], LastRecomputed())  # type: ignore[method-assign]
    tables = Rope(model.rope, model.n_head_dim).tables([(0, LENGTH)], torch.device("cpu"))
    x = torch.randn(ROWS, LENGTH, model.hidden_size, dtype=dtypes.compute, requires_grad=True)
    tracker = tracking(*block.parameters(), *tables, x)
    before = tracker.total
    with OperationObserver(tracker.observe):
        rest = _Rest.apply(block(x, tables))  # type: ignore[no-untyped-call]
        forward, tracker.peak = tracker.peak - before, tracker.total
        rest.backward()
    backward = tracker.peak - before
    stream = x.numel() * dtypes.compute.itemsize
    # Not listed, in fp32: log-sum-exps (saved, recomputed and two in the kernel's backward pass), and at most eight
    # numbers per token (scales, sums) and per column (gradients by norms' weights). Less than any listed tensor.
    small = 4 * (4 * ROWS * LENGTH * model.heads + 8 * ROWS * LENGTH + 8 * model.hidden_size)
    assert small < stream / 2
    if not coalesce:  # when autograd frees the terms that it adds, of three products by one input, is not counted
        small += stream
    # The input is not new.
    assert abs(forward - (saved - stream + counted.forward)) < small
    assert abs(backward - (saved - stream + counted.whole.total)) < small


@pytest.mark.usefixtures("bf16_instructions")
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [128, 256, 300, 1024])
def test_bytes_of_head_and_loss_are_those_of_real_tensors(
    weights: torch.dtype, compute: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk of 256 tokens, half of one, one and a short one, and four, whose gradients by the head are added."""
    if weights.itemsize < compute.itemsize:
        pytest.skip("no mode computes in a wider dtype than its weights have")
    monkeypatch.setattr(CrossEntropy, "chunk", lambda _, columns, width: 256)
    width, item = MODEL.hidden_size, compute.itemsize
    weight = torch.randn(MODEL.vocab_size, width, dtype=weights, requires_grad=True)
    labels = torch.randint(MODEL.vocab_size, (tokens,))
    tracker = tracking(weight, labels)
    before = tracker.total
    with OperationObserver(tracker.observe):
        hidden = torch.randn(tokens, width, dtype=compute).requires_grad_()
        head_loss(hidden, weight, labels, CrossEntropy())
    fused = are_used_on(weight.device)
    ends = EndTensors(MODEL, 1, tokens, item, weights.itemsize, gathers=False, reorders=False, rounds=True, fused=fused)
    small = 16 * 8 * 256  # numbers per token of a chunk: labels, rows, sums, losses
    assert abs(tracker.peak - before - loss_peak(ends)) < small
