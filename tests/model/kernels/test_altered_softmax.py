"""Attention with capped scores and sinks equals a plain formula, and its gradients autograd's of that formula."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from hlat.model import AlteredSoftmax, DocumentMask
from hlat.model import document_attention as documents
from hlat.model.document_attention import attend_in_blocks, block_mask, row_offsets
from hlat.model.kernels import altered_softmax
from hlat.model.kernels.altered_softmax import attend_altered_by_mask

LENGTH = 24
SOFTMAX = {
    "cap": AlteredSoftmax(cap=1.5),
    "sinks": AlteredSoftmax(torch.tensor([-1.0, 0.5, 3.0, 7.0], dtype=torch.float64)),
    "both": AlteredSoftmax(torch.tensor([-1.0, 0.5, 3.0, 7.0], dtype=torch.float64), cap=1.5),
}
SPANS = {"complete rows": ((0, LENGTH),), "two chunks": ((3, 8), (17, LENGTH))}


def inputs(spans: tuple[tuple[int, int], ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Queries of four heads in spans, keys and values of two heads."""
    generator, count = torch.Generator().manual_seed(1), sum(stop - start for start, stop in spans)
    shapes = [(2, 4, count, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).to(dtype) for shape in shapes]


def starts() -> torch.Tensor:
    """Row offset of the first token of each token's document, in two rows."""
    return torch.stack([torch.tensor([0] * 9 + [9] * 1 + [10] * 14), torch.zeros(LENGTH, dtype=torch.int64)])


def seen(spans: tuple[tuple[int, int], ...], window: int | None) -> torch.Tensor:
    """Keys that each query attends to: bool (B, 1, s, T)."""
    key = torch.arange(LENGTH)
    distance = key[:, None] - key
    mask = (distance >= 0) & (distance < (window or LENGTH)) & (key >= starts()[:, :, None])
    return mask[:, None, row_offsets(spans, key.device)]


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, softmax: AlteredSoftmax
) -> torch.Tensor:
    """With a sink as the last score of each query, whose weight is dropped, as transformers has it."""
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if softmax.cap is not None:
        scores = softmax.cap * torch.tanh(scores / softmax.cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if softmax.sinks_H is None:
        return scores.softmax(-1) @ v
    sinks = softmax.sinks_H.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1] @ v


def leaves(softmax: AlteredSoftmax, operands: list[torch.Tensor]) -> tuple[AlteredSoftmax, list[torch.Tensor]]:
    """Copies that take gradients: the softmax, and all tensors."""
    sinks = [] if softmax.sinks_H is None else [softmax.sinks_H.clone()]
    tensors = [x.requires_grad_() for x in (*operands, *sinks)]
    return softmax._replace(sinks_H=tensors[3] if sinks else None), tensors


def differentiate(out: torch.Tensor) -> None:
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()


def mask_of(spans: tuple[tuple[int, int], ...], window: int | None) -> DocumentMask:
    offsets = row_offsets(spans, torch.device("cpu"))
    return DocumentMask.from_positions(offsets - starts()[:, offsets], spans, window)


@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("scores", [1, 1 << 22], ids=["blocks of one query", "one block"])
def test_output_and_gradients_are_those_of_the_formula(
    softmax: AlteredSoftmax,
    spans: tuple[tuple[int, int], ...],
    window: int | None,
    scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(altered_softmax, "_BLOCK_SCORES", scores)
    (mine_softmax, ours), (their_softmax, theirs) = (leaves(softmax, inputs(spans)) for _ in range(2))
    out = mask_of(spans, window).attend(*ours[:3], mine_softmax)
    wanted = plain(*theirs[:3], seen(spans, window), their_softmax)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    for each in (out, wanted):
        differentiate(each)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_a_mask_of_all_scores_gives_the_same(softmax: AlteredSoftmax) -> None:
    spans = SPANS["complete rows"]
    wanted = plain(*inputs(spans), seen(spans, 5), softmax)
    found = attend_altered_by_mask(*inputs(spans), seen(spans, 5), softmax)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_bf16_is_rounded_once(softmax: AlteredSoftmax) -> None:
    spans = SPANS["complete rows"]
    narrow = inputs(spans, torch.bfloat16)
    wanted = plain(*(x.double() for x in narrow), seen(spans, None), softmax)
    out = mask_of(spans, None).attend(*narrow, softmax)
    assert out.dtype == torch.bfloat16 and (out - wanted).abs().max() <= 2.0**-8 * wanted.abs().max()


@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_flex_attention_computes_the_same(softmax: AlteredSoftmax, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, on a CPU, where it has no backward pass for windows of keys."""
    monkeypatch.setattr(documents, "_compiled", lambda: flex_attention)
    spans, offsets = SPANS["complete rows"], torch.arange(LENGTH)
    blocks = block_mask(starts().maximum(offsets - 4), offsets, LENGTH)
    operands = [x.float() for x in inputs(spans)]
    found = attend_in_blocks(*operands, blocks, softmax)
    torch.testing.assert_close(found, plain(*operands, seen(spans, 5), softmax), rtol=1e-5, atol=1e-5)
