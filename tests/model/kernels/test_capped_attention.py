"""Attention with capped scores equals a plain formula, and its gradients autograd's of that formula."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from hlat.model import DocumentMask
from hlat.model.document_attention import block_mask, capped_score, row_offsets
from hlat.model.kernels import capped_attention
from hlat.model.kernels.capped_attention import attend_capped_by_mask

CAP, LENGTH = 1.5, 24
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


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = CAP * torch.tanh(q @ k.transpose(2, 3) / q.shape[3] ** 0.5 / CAP)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def mask_of(spans: tuple[tuple[int, int], ...], window: int | None) -> DocumentMask:
    offsets = row_offsets(spans, torch.device("cpu"))
    return DocumentMask.from_positions(offsets - starts()[:, offsets], spans, window)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("scores", [1, 1 << 22], ids=["blocks of one query", "one block"])
def test_output_and_gradients_are_those_of_the_formula(
    spans: tuple[tuple[int, int], ...], window: int | None, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped_attention, "_BLOCK_SCORES", scores)
    ours, theirs = ([x.requires_grad_() for x in inputs(spans)] for _ in range(2))
    out, wanted = mask_of(spans, window).attend(*ours, CAP), plain(*theirs, seen(spans, window))
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    for each in (out, wanted):
        (each * torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view(each.shape)).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-11)


def test_a_mask_of_all_scores_gives_the_same() -> None:
    spans = SPANS["complete rows"]
    wanted = plain(*inputs(spans), seen(spans, 5))
    found = attend_capped_by_mask(*inputs(spans), seen(spans, 5), CAP)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_bf16_is_rounded_once() -> None:
    spans = SPANS["complete rows"]
    narrow = inputs(spans, torch.bfloat16)
    wanted = plain(*(x.double() for x in narrow), seen(spans, None))
    out = mask_of(spans, None).attend(*narrow, CAP)
    assert out.dtype == torch.bfloat16 and (out - wanted).abs().max() <= 2.0**-8 * wanted.abs().max()


def test_flex_attention_caps_scores_likewise() -> None:
    spans, offsets = SPANS["complete rows"], torch.arange(LENGTH)
    first = starts().maximum(offsets - 4)
    operands = [x.float() for x in inputs(spans)]
    blocks = block_mask(first, offsets, LENGTH)
    found = flex_attention(*operands, score_mod=capped_score(CAP), block_mask=blocks, enable_gqa=True)
    torch.testing.assert_close(found, plain(*operands, seen(spans, 5)), rtol=1e-5, atol=1e-5)
