"""A document that sees only itself is as if it were alone; both ways to compute it see the same."""

import time
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hlat.config.sections import ModelConfig
from hlat.model import Decoder, DocumentMask, attention_backend, build
from hlat.model import matmul as products
from hlat.model.document_mask import block_mask

B = torch.bfloat16
CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 4, 2, 16
KINDS = {"plain": {}, "normed queries and keys, separate": {"qk_norm": True, "coalesce": False}}
# A document per row; of one token each; at the ends of a row; and others in every row.
ROWS = ([40], [1] * 40, [1, 38, 1], [17, 22, 1], [5, 5, 30])


def places(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def of(rows: list[list[int]]) -> DocumentMask:
    """On whole rows."""
    return DocumentMask.from_positions(places(rows), ((0, sum(rows[0])),))


def model_of(kind: str, dtype: torch.dtype) -> Decoder:
    size = {"vocab_size": 96, "layers": 2, "hidden_size": 48, "intermediate_size": 112, "heads": 4, "kv_heads": 2}
    return build(ModelConfig(**size, init_std=0.15, **KINDS[kind]), device=CPU, seed=2, dtype=dtype)


def inputs_and_labels(rows: list[list[int]]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 96, (2, len(rows), sum(rows[0])), generator=generator)


def gradients(model: Decoder) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_each_document_alone(kind: str) -> None:
    """In float64 the order of additions is some 1e-14 of them; 1e-9 is what the law asks for."""
    ids, labels = inputs_and_labels(ROWS)
    together, apart = model_of(kind, torch.float64), model_of(kind, torch.float64)
    loss = together(ids, labels, positions=places(ROWS))
    loss.backward()
    total = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(ROWS):
        for start, stop in pairwise([sum(lengths[:count]) for count in range(len(lengths) + 1)]):
            one = apart(ids[row : row + 1, start:stop], labels[row : row + 1, start:stop])
            one.backward()
            total += one.detach()
    assert abs(loss - total) <= 1e-9 * total
    for ours, theirs in zip(gradients(together), gradients(apart), strict=True):
        assert (ours - theirs).norm() <= 1e-9 * theirs.norm()


def test_a_document_that_fills_its_row_is_the_row() -> None:
    """The same kernel on the same numbers, one row at a time: the same bits."""
    rows = [[40]] * 3
    ids, labels = inputs_and_labels(rows)
    found = []
    for positions in (None, places(rows)):
        model = model_of("plain", torch.float32)
        model(ids, labels, positions=positions).backward()
        found.append([model(ids, positions=positions), *gradients(model)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def operands(rows: list[list[int]], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v as a block lays them out, position by position."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(len(rows), sum(rows[0]), heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    made = [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]
    return [x.requires_grad_() for x in made]


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
    """With the mask that nobody should make."""
    numbers = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    mask = (numbers[:, :, None] == numbers[:, None, :]).tril()[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def weighted(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a fixed weighting of the outputs."""
    weighting = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return list(torch.autograd.grad(out, inputs, weighting.to(out.dtype)))


@pytest.mark.parametrize("widened", [False, True], ids=["native", "widened"])
def test_bf16_errs_by_the_rounding_of_probabilities_and_result(widened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As attention to whole rows does (test_products.py): 2^-9 for each of four roundings."""
    monkeypatch.setattr(products, "_CPU_BF16_IS_SLOW", widened)
    ours = operands(ROWS, B)
    exact = [x.detach().double().requires_grad_() for x in ours]
    out, expected = of(ROWS).attend(*ours), textbook(*exact, ROWS)
    pairs = zip([out, *weighted(out, ours)], [expected, *weighted(expected, exact)], strict=True)
    for found, right in pairs:
        assert found.dtype == B
        assert (found.double() - right).norm() <= 4 * 2.0**-9 * right.norm()


CHUNKS = ((8, 16), (24, 32))  # of a row of 40, as a rank might have them


@pytest.mark.parametrize("dtype", [torch.float64, B], ids=str)
def test_some_chunks_of_a_row_see_what_is_before_them(dtype: torch.dtype) -> None:
    """Two results put together: in bf16 one more rounding of the parts, and of the sums of their gradients."""
    ours = operands(ROWS, dtype)
    exact = [x.detach().double().requires_grad_() for x in ours]
    here = torch.cat([torch.arange(start, stop) for start, stop in CHUNKS])
    out = DocumentMask.from_positions(places(ROWS)[:, here], CHUNKS).attend(ours[0][:, :, here], *ours[1:])
    expected = textbook(*exact, ROWS)[:, :, here]
    pairs = zip([out, *weighted(out, ours)], [expected, *weighted(expected, exact)], strict=True)
    within = 1e-9 if dtype == torch.float64 else 6 * 2.0**-9
    for found, right in pairs:
        assert (found.double() - right).norm() <= within * right.norm()


def test_no_mask_is_made() -> None:
    """A row of 2^17 tokens: a mask of queries x keys would take 16 GiB, its scores minutes."""
    rows = [[128] * 1024]
    q, k, v = (x.float() for x in operands(rows))
    began = time.monotonic()
    of(rows).attend(q, k, v)
    blocks = block_mask(torch.arange(1 << 17)[None] - places(rows), torch.arange(1 << 17), 1 << 17)
    assert blocks.kv_num_blocks.sum() == 1024
    assert time.monotonic() - began < 60


lengths = st.lists(st.integers(1, 200), min_size=1, max_size=6)


@given(st.lists(lengths, min_size=1, max_size=3))
def test_flex_attention_is_told_the_same(rows: list[list[int]]) -> None:
    """Which blocks it looks at are those that torch finds by looking at every query and key."""
    longest = max(map(sum, rows))
    rows = [[*row, longest - sum(row)] if sum(row) < longest else row for row in rows]
    where = torch.arange(longest)
    first = where - places(rows)
    ours = block_mask(first, where, longest)
    theirs = create_block_mask(ours.mask_mod, len(rows), None, longest, longest, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("spans", [((0, 300),), ((60, 120), (180, 240))], ids=["whole rows", "chunks"])
def test_flex_attention_computes_the_same(spans: tuple[tuple[int, int], ...]) -> None:
    """Its plain form, on a CPU and forward, given what it is given on accelerators."""
    rows = [[300], [1, 130, 169], [70, 1, 1, 228]]
    here = torch.cat([torch.arange(start, stop) for start, stop in spans])
    positions, (q, k, v) = places(rows)[:, here], (x.detach() for x in operands(rows))
    documents = DocumentMask.from_positions(positions, spans)
    keys = spans[-1][1]
    blocks = block_mask(documents.first_Bs, here, keys)
    q = q[:, :, here]
    found = flex_attention(q, k[:, :, :keys], v[:, :, :keys], block_mask=blocks, enable_gqa=True)
    # Softmax of up to 300 terms and products of 16 and 300, in float64.
    torch.testing.assert_close(found, documents.attend(q, k, v), rtol=0, atol=4 * 300 * 2.0**-53 * 4)


def test_what_computes_it_is_said() -> None:
    assert "flash" in attention_backend(4, 2, 16, torch.float32, CPU, isolated=True)
    assert "documents" in attention_backend(4, 2, 16, torch.float32, CPU, isolated=True)
    assert "documents" not in attention_backend(4, 2, 16, torch.float32, CPU)
