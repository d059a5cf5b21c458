"""The chunked loss equals the plain loss, and its memory does not grow with vocabulary times tokens."""

import multiprocessing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hlat.model import IGNORED, CrossEntropy, loss
from hlat.model.loss import head_loss
from hlat.runtime.backend.device import peak_memory_bytes

CPU = torch.device("cpu")

TOKENS, WIDTH, VOCABULARY = 1000, 48, 97


class InChunks(CrossEntropy):
    """Chunks whose size does not divide the tokens, so that the last one is shorter."""

    def chunk(self, columns: int, width: int) -> int:
        return 256


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows of the head that do not divide the vocabulary, so that the last one is shorter."""
    monkeypatch.setattr(loss, "HEAD_ROWS", 40)


def given(dtype: torch.dtype, weights: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, head and labels. A tenth of the labels is ignored, and a complete chunk."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(4, TOKENS // 4, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    labels = torch.randint(0, VOCABULARY, (4, TOKENS // 4), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.1] = IGNORED
    labels.view(-1)[256:512] = IGNORED
    return hidden.to(dtype).requires_grad_(), head.to(weights).requires_grad_(), labels


def plain(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, head.to(hidden.dtype)).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm()).item()


@pytest.mark.parametrize(
    ("dtype", "weights", "unit"),
    [
        (torch.float64, torch.float64, 2.0**-53),
        (torch.float32, torch.float32, 2.0**-24),
        (torch.bfloat16, torch.float32, 2.0**-9),
        (torch.bfloat16, torch.bfloat16, 2.0**-9),
    ],
    ids=["float64", "float32", "bf16 over fp32 weights", "bf16"],
)
def test_the_chunked_loss_equals_the_plain_loss(dtype: torch.dtype, weights: torch.dtype, unit: float) -> None:
    """Compare with the plain loss in float64 of the same numbers.

    Weight, logits, the gradient by logits, each chunk's product and the result are rounded to ``unit`` one after the
    other. Sums over at most 256 terms in fp32 or wider add the square root of that many units of their dtype. A
    rounding error of a logit of size 4 changes a probability by 4 units.
    """
    hidden, head, labels = given(dtype, weights)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, head)]
    expected = plain(*exact, labels) / 7
    expected.backward()
    found = head_loss(hidden, head, labels, InChunks()) / 7
    found.backward()
    bound = (4 + 5) * unit + 16 * max(2.0**-53, min(unit, 2.0**-24))
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert distance(found, expected) < bound
    for ours, theirs in zip((hidden, head), exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == ours.dtype
        assert distance(ours.grad, theirs.grad) < bound


class Products(TorchDispatchMode):
    """Names of the products of matrices within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        name = function._schema.name
        self.names += [name] if name in ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise") else []
        return function(*arguments, **(options or {}))


def test_products_of_the_head_in_training_are_torchs() -> None:
    """As a plan counts them: oneDNN's need copies of the head, which were measured at its whole size."""
    for dtype in (torch.float32, torch.bfloat16):
        operands = [each.detach().to(dtype).requires_grad_() for each in given(dtype, dtype)[:2]]
        with Products() as training:
            head_loss(*operands, given(dtype, dtype)[2], InChunks())
        assert training.names and set(training.names) <= {"aten::mm", "aten::addmm"}


@pytest.mark.parametrize("factor", [1e-5, 0.1])
def test_the_z_loss_is_in_the_gradient_only(factor: float) -> None:
    """Autograd differentiates the formula in float64; 100 roundings bound the chain of a few hundred additions."""
    hidden, head, labels = given(torch.float64, torch.float64)
    exact = [tensor.detach().clone().requires_grad_() for tensor in (hidden, head)]
    z_N = F.linear(*exact).flatten(0, 1).logsumexp(-1)
    expected = plain(*exact, labels) + factor * (z_N**2)[labels.flatten() != IGNORED].sum()
    expected.backward()
    with_z = InChunks()
    with_z.z_loss = factor
    found = head_loss(hidden, head, labels, with_z)
    found.backward()
    assert distance(found, plain(*exact, labels)) < 100 * 2.0**-53
    for ours, theirs in zip((hidden, head), exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert distance(ours.grad, theirs.grad) < 100 * 2.0**-53


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["fp32 weights", "bf16 weights"])
def test_the_gradient_of_the_head_is_accumulated_over_chunks_in_fp32(weights: torch.dtype) -> None:
    """Repeat the same bf16 chunk 64 times.

    k times a number of 8 bits has at most 14 bits, which fp32 represents exactly. So the sum is exactly 64 times the
    gradient of one chunk. A bf16 accumulator would round most partial sums.
    """
    generator = torch.Generator().manual_seed(4)
    chunk = torch.randn(256, WIDTH, generator=generator).bfloat16()
    labels = torch.randint(0, VOCABULARY, (256,), generator=generator)

    def gradient(times: int) -> torch.Tensor:
        head = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(5)).to(weights).requires_grad_()
        head_loss(chunk.repeat(times, 1), head, labels.repeat(times), InChunks()).backward()
        assert head.grad is not None and head.grad.dtype == weights
        return head.grad

    assert torch.equal(gradient(64), 64 * gradient(1))
    naive = torch.zeros(VOCABULARY, WIDTH, dtype=torch.bfloat16)
    for _ in range(64):
        naive += gradient(1).bfloat16()
    assert (naive != 64 * gradient(1).bfloat16()).float().mean() > 0.5, "the test would detect accumulation in bf16"


def test_without_gradients_only_the_loss_is_computed() -> None:
    hidden, head, labels = given(torch.float64, torch.float64)
    with torch.no_grad():
        found = head_loss(hidden, head, labels, InChunks())
    assert not found.requires_grad
    assert distance(found, plain(hidden, head, labels)) < 100 * 2.0**-53
    frozen = head_loss(hidden.detach(), head, labels, InChunks())
    frozen.backward()
    plain(hidden, head.detach(), labels).backward()
    expected = torch.autograd.grad(plain(hidden.detach(), head, labels), head)[0]
    assert head.grad is not None and distance(head.grad, expected) < 100 * 2.0**-53


def test_loss_and_gradients_are_zero_without_labels() -> None:
    hidden, head, labels = given(torch.float32, torch.float32)
    found = head_loss(hidden, head, torch.full_like(labels, IGNORED), InChunks())
    found.backward()
    assert found.item() == 0
    assert hidden.grad is not None and not hidden.grad.any() and head.grad is not None and not head.grad.any()


def _peak(chunked: bool, tokens: int, vocabulary: int, width: int) -> int:
    """Bytes that forward and backward of a loss add to the peak memory of a fresh process."""
    hidden = torch.randn(1, tokens, width, dtype=torch.float32).requires_grad_()
    head = torch.randn(vocabulary, width).requires_grad_()
    labels = torch.zeros(1, tokens, dtype=torch.int64)
    hidden.grad, head.grad = torch.zeros_like(hidden), torch.zeros_like(head)
    before = peak_memory_bytes(CPU)
    (head_loss(hidden, head, labels, CrossEntropy()) if chunked else plain(hidden, head, labels)).backward()
    return peak_memory_bytes(CPU) - before


@pytest.mark.parametrize(
    ("vocabulary", "width", "tokens"),
    [(8192, 512, 2048), (32_768, 1024, 1024), (131_072, 128, 256), (131_072, 4096, 2048), (16_384, 8192, 2048)],
)
def test_chunks_have_64_mib_of_logits_or_as_many_tokens_as_the_width(vocabulary: int, width: int, tokens: int) -> None:
    assert CrossEntropy().chunk(vocabulary, width) == tokens
    assert CrossEntropy(columns=vocabulary).chunk(vocabulary - 1, width) == tokens, "the same on every process"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tokens() -> None:
    """Peak memory is two chunks of fp32 logits, gradients by hidden and head twice, and 64 MB of slack.

    The logits are modified in place, but the allocator keeps one more chunk. The plain loss needs all logits three
    times.
    """
    vocabulary, width = 32_768, 64
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        few, many, plain_loss = (
            pool.apply(_peak, (chunked, tokens, vocabulary, width))
            for chunked, tokens in ((True, 1024), (True, 4096), (False, 4096))
        )
    logits = 4 * vocabulary * 4096
    assert plain_loss > 1.5 * logits
    assert many - few < 0.05 * logits
    assert many < 2 * loss._CHUNK_BYTES + 2 * 4 * width * (vocabulary + 4096) + 64e6
