"""Attention within documents computes what each document alone would; both implementations use the same mask."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hlat.config.sections.model import ModelConfig
from hlat.model import Decoder, DocumentMask, attention_kernel, build
from hlat.model.document_attention import block_mask
from hlat.model.kernels import matmul as products
from hlat.runtime.backend.base import AttentionHeads
from tests.support.storages import limited_memory

B = torch.bfloat16
CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 4, 2, 16
KINDS = {"plain": {}, "normed queries and keys, separate": {"qk_norm": True, "coalesce": False}}
# Document lengths: one per row, one token each, short ones at the ends of a row, others.
ROWS = ([40], [1] * 40, [1, 38, 1], [17, 22, 1], [5, 5, 30])


def positions_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def mask_of(rows: list[list[int]]) -> DocumentMask:
    """Build the mask of complete rows."""
    return DocumentMask.from_positions(positions_of(rows), ((0, sum(rows[0])),))


def model_of(kind: str, dtype: torch.dtype) -> Decoder:
    size = {"vocab_size": 96, "layers": 2, "hidden_size": 48, "intermediate_size": 112, "heads": 4, "kv_heads": 2}
    return build(ModelConfig(**size, init_std=0.15, **KINDS[kind]), device=CPU, seed=2, dtype=dtype)


def inputs_and_labels(rows: list[list[int]]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 96, (2, len(rows), sum(rows[0])), generator=generator)


def gradients(model: Decoder) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_the_sum_over_single_documents(kind: str) -> None:
    """In float64 the order of summation changes results by about 1e-14; the required tolerance is 1e-9."""
    ids, labels = inputs_and_labels(ROWS)
    together, apart = model_of(kind, torch.float64), model_of(kind, torch.float64)
    loss = together(ids, labels, positions=positions_of(ROWS))
    loss.backward()
    total = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(ROWS):
        for start, stop in pairwise([sum(lengths[:count]) for count in range(len(lengths) + 1)]):
            document_loss = apart(ids[row : row + 1, start:stop], labels[row : row + 1, start:stop])
            document_loss.backward()
            total += document_loss.detach()
    assert abs(loss - total) <= 1e-9 * total
    for ours, theirs in zip(gradients(together), gradients(apart), strict=True):
        assert (ours - theirs).norm() <= 1e-9 * theirs.norm()


WINDOWS = st.integers(1, 60)


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor, offsets: torch.Tensor, window: int
) -> torch.Tensor:
    """Softmax attention with a mask of all scores, as in the definition."""
    keys = torch.arange(k.shape[2])
    seen = (keys <= offsets[:, None]) & (keys > offsets[:, None] - window) & (keys >= first[..., None])
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / WIDTH**0.5
    return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v


@given(window=WINDOWS, cut=st.integers(1, 39), spans=st.sampled_from([((0, 40),), ((5, 17), (28, 40))]))
def test_sliding_windows_within_documents_equal_dense_attention(
    window: int, cut: int, spans: tuple[tuple[int, int], ...]
) -> None:
    """Output and gradients in float64, for one document and two per row, and for the chunks of a context rank."""
    offsets = torch.cat([torch.arange(start, stop) for start, stop in spans])
    first = torch.stack([torch.zeros_like(offsets), torch.where(offsets >= cut, cut, 0)])
    generator = torch.Generator().manual_seed(window)
    shapes = [(2, HEADS, len(offsets), WIDTH), *[(2, KV_HEADS, 40, WIDTH)] * 2]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    ours = DocumentMask.from_positions(offsets - first, spans, window).attend(*inputs)
    wanted = _dense(*inputs, first, offsets, window)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-13)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (ours, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [1, 7, 130, 400])
def test_the_block_mask_of_a_window_is_exact(window: int) -> None:
    """Flex attention's mask: every key of every window, and no other; blocks that it skips have none."""
    positions = torch.stack([torch.cat([torch.arange(300), torch.arange(84)]), torch.arange(384)])
    offsets = torch.arange(384)
    first = offsets - positions
    seen = (offsets <= offsets[:, None]) & (offsets > offsets[:, None] - window) & (offsets >= first[..., None])
    blocks = block_mask(first.maximum(offsets - window + 1), offsets, 384)
    q, k, v = (torch.randn(2, heads, 384, WIDTH, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))
    ours = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    torch.testing.assert_close(ours, _dense(q, k, v, first, offsets, window), rtol=0, atol=1e-12)
    listed = torch.zeros(2, 3, 3, dtype=torch.bool)
    for counts, indices in (
        (blocks.kv_num_blocks, blocks.kv_indices),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices),
    ):
        for row, query in [(row, query) for row in range(2) for query in range(3)]:
            listed[row, query, indices[row, 0, query, : counts[row, 0, query]].long()] = True
    assert torch.equal(listed, seen.unflatten(2, (3, 128)).unflatten(1, (3, 128)).any(-1).any(2))


def test_a_document_that_fills_its_row_gives_the_bits_of_plain_attention() -> None:
    """The same kernel on the same numbers, one row at a time, gives the same bits."""
    rows = [[40]] * 3
    ids, labels = inputs_and_labels(rows)
    found = []
    for positions in (None, positions_of(rows)):
        model = model_of("plain", torch.float32)
        model(ids, labels, positions=positions).backward()
        found.append([model(ids, positions=positions), *gradients(model)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def operands(rows: list[list[int]], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v with the memory layout of a block: position by position."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(len(rows), sum(rows[0]), heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    made = [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]
    return [x.requires_grad_() for x in made]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
    """Reference: attention with an explicit mask."""
    numbers = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    mask = (numbers[:, :, None] == numbers[:, None, :]).tril()[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def weighted(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a fixed weighting of the outputs."""
    weighting = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return list(torch.autograd.grad(out, inputs, weighting.to(out.dtype)))


@pytest.mark.parametrize("widened", [False, True], ids=["native", "widened"])
def test_bf16_error_is_the_rounding_of_probabilities_and_result(widened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bound as for complete rows (test_matmul.py): 2^-9 for each of four roundings."""
    monkeypatch.setattr(products, "_EMULATE_BF16", "cpu" if widened else "")
    ours = operands(ROWS, B)
    exact = [x.detach().double().requires_grad_() for x in ours]
    out, expected = mask_of(ROWS).attend(*ours), reference(*exact, ROWS)
    pairs = zip([out, *weighted(out, ours)], [expected, *weighted(expected, exact)], strict=True)
    for found, right in pairs:
        assert found.dtype == B
        assert (found.double() - right).norm() <= 4 * 2.0**-9 * right.norm()


CHUNKS = ((8, 16), (24, 32))  # of a row of 40, as a rank might have them


@pytest.mark.parametrize("dtype", [torch.float64, B], ids=str)
def test_chunks_of_a_row_attend_to_earlier_tokens_of_their_documents(dtype: torch.dtype) -> None:
    """Two results are combined: in bf16 one more rounding of the results, and of the sums of their gradients."""
    ours = operands(ROWS, dtype)
    exact = [x.detach().double().requires_grad_() for x in ours]
    here = torch.cat([torch.arange(start, stop) for start, stop in CHUNKS])
    out = DocumentMask.from_positions(positions_of(ROWS)[:, here], CHUNKS).attend(ours[0][:, :, here], *ours[1:])
    expected = reference(*exact, ROWS)[:, :, here]
    pairs = zip([out, *weighted(out, ours)], [expected, *weighted(expected, exact)], strict=True)
    within = 1e-9 if dtype == torch.float64 else 6 * 2.0**-9
    for found, right in pairs:
        assert (found.double() - right).norm() <= within * right.norm()


def test_no_mask_of_queries_and_keys_is_built() -> None:
    """A row of 2^17 tokens, and 4 GiB more than there are: a mask of queries x keys would take 16."""
    rows = [[128] * 1024]
    q, k, v = (x.float() for x in operands(rows))
    with limited_memory(4 << 30):
        mask_of(rows).attend(q, k, v)
        blocks = block_mask(torch.arange(1 << 17)[None] - positions_of(rows), torch.arange(1 << 17), 1 << 17)
    assert blocks.kv_num_blocks.sum() == 1024


lengths = st.lists(st.integers(1, 200), min_size=1, max_size=6)


@given(st.lists(lengths, min_size=1, max_size=3))
def test_block_mask_equals_torchs_own(rows: list[list[int]]) -> None:
    """The blocks are those that torch finds by evaluating the mask for every query and key."""
    longest = max(map(sum, rows))
    rows = [[*row, longest - sum(row)] if sum(row) < longest else row for row in rows]
    where = torch.arange(longest)
    first = where - positions_of(rows)
    ours = block_mask(first, where, longest)
    theirs = create_block_mask(ours.mask_mod, len(rows), None, longest, longest, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("spans", [((0, 300),), ((60, 120), (180, 240))], ids=["complete rows", "chunks"])
def test_flex_attention_with_the_block_mask_computes_the_same(spans: tuple[tuple[int, int], ...]) -> None:
    """Uncompiled flex attention on a CPU, forward only, with the arguments that it gets on accelerators."""
    rows = [[300], [1, 130, 169], [70, 1, 1, 228]]
    here = torch.cat([torch.arange(start, stop) for start, stop in spans])
    positions, (q, k, v) = positions_of(rows)[:, here], (x.detach() for x in operands(rows))
    mask = DocumentMask.from_positions(positions, spans)
    keys = spans[-1][1]
    blocks = block_mask(mask.first_Bs, here, keys)
    q = q[:, :, here]
    found = flex_attention(q, k[:, :, :keys], v[:, :, :keys], block_mask=blocks, enable_gqa=True)
    # Softmax of up to 300 terms and products of 16 and 300, in float64.
    torch.testing.assert_close(found, mask.attend(q, k, v), rtol=0, atol=4 * 300 * 2.0**-53 * 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_kernel_of_attention_is_named(dtype: torch.dtype) -> None:
    plain, limited = (
        attention_kernel(AttentionHeads(dtype, 16, grouped=True, limited=value), True, CPU).name
        for value in (False, True)
    )
    assert limited == f"{plain} within documents" and "documents" not in plain
    assert dtype != torch.float64 or plain == "flash_attention"
