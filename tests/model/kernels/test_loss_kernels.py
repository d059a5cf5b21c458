"""The loss by fused kernels: value and gradient of cross-entropy, whatever the vocabulary, labels and threads."""

from collections.abc import Iterator

import pytest
import torch

from hlat.model import IGNORED, CrossEntropy
from hlat.model.kernels.library import DTYPES
from tests.support.model.kernel_cases import UNITS, normal, same_bits, torch_only

FP32 = 2.0**-24
TOKENS = 37
VOCABULARIES = (1, 15, 16, 100, 512, 1037)


def labels(vocabulary: int) -> torch.Tensor:
    """Labels, of which some are ignored; the first and the last row of the vocabulary are among them."""
    generator = torch.Generator().manual_seed(vocabulary)
    found = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    found[::5] = IGNORED
    found[1], found[2] = 0, vocabulary - 1
    return found


@pytest.fixture(params=[0.0, 1e-2], ids=["plain", "z-loss"])
def cross_entropy(request: pytest.FixtureRequest) -> Iterator[CrossEntropy]:
    """The loss, with and without z-loss."""
    found = CrossEntropy()
    found.z_loss = request.param
    yield found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_loss_and_gradient_are_those_of_float64(
    vocabulary: int, dtype: torch.dtype, cross_entropy: CrossEntropy
) -> None:
    """Compare with the plain formulas in float64, of the same logits.

    An exponential of x has a relative error of 4 units of fp32 and |x| units by its reduced argument, at most 40 here.
    Sums add 32 units for the terms of a lane, 4 across lanes and one per 512 columns, the rest 10. The terms of the
    gradient are a probability, scaled by the z-loss, and 1 at the label: errors relative to these, and one rounding to
    the dtype. Exponentials below 2^-100 may be rounded to 0.
    """
    logits = normal(TOKENS, vocabulary, dtype=dtype)
    losses, gradient = cross_entropy(logits.clone(), labels(vocabulary), gradient=True)
    with torch_only():
        exact, exact_gradient = cross_entropy(logits.double(), labels(vocabulary), gradient=True)
    spread = float(logits.float().amax() - logits.float().amin())
    steps = (4 + spread + 32 + 4 + vocabulary / 512 + 10) * FP32
    assert losses.dtype == torch.float32 and gradient is not None and exact_gradient is not None
    assert bool((losses.double() - exact).abs().le(steps * (1 + exact.abs())).all())
    at_label = torch.zeros_like(exact_gradient)
    counted = labels(vocabulary) != IGNORED
    at_label[counted, labels(vocabulary)[counted]] = 1
    scale = 1 + 2 * cross_entropy.z_loss * float(exact.abs().amax() + logits.double().abs().amax())
    terms = (exact_gradient + at_label).abs() + at_label
    bound = UNITS[dtype] * exact_gradient.abs() + steps * scale * terms + 2.0**-100
    assert bool(((gradient.double() - exact_gradient).abs() <= bound).all())
    assert not gradient[::5].any(), "ignored labels have no gradient"


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_only_differences_of_logits_count(vocabulary: int) -> None:
    """Whole numbers, so that the shift is exact: without the peak all exponentials would be 0, or infinite."""
    logits = normal(TOKENS, vocabulary, dtype=torch.float32).round()
    losses, gradient = CrossEntropy()(logits.clone(), labels(vocabulary), gradient=True)
    assert gradient is not None
    for shift in (-200, 200):
        other, other_gradient = CrossEntropy()(logits + shift, labels(vocabulary), gradient=True)
        assert other_gradient is not None and same_bits(other, losses) and same_bits(other_gradient, gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_takes_the_memory_of_the_logits(dtype: torch.dtype) -> None:
    logits = normal(TOKENS, 100, dtype=dtype)
    _, gradient = CrossEntropy()(logits, labels(100), gradient=True)
    assert gradient is logits
    untouched = normal(TOKENS, 100, dtype=dtype)
    losses, nothing = CrossEntropy()(untouched, labels(100), gradient=False)
    assert nothing is None and torch.equal(untouched, normal(TOKENS, 100, dtype=dtype)) and losses[0] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_scores_are_those_of_float64(vocabulary: int, dtype: torch.dtype) -> None:
    """The log-probability is the negative loss, whose bound is above; the most likely token is the first of equals."""
    logits = normal(TOKENS, vocabulary, dtype=dtype).round()  # whole numbers: many are equal
    tokens = labels(vocabulary).clamp(min=0)
    tokens[7:20] = logits[7:20].float().argmax(1)
    found, is_best = CrossEntropy().score(logits.clone(), tokens)
    exact = logits.double().log_softmax(1).gather(1, tokens[:, None])[:, 0]
    spread = float(logits.float().amax() - logits.float().amin())
    steps = (4 + spread + 32 + 4 + vocabulary / 512 + 10) * FP32
    assert found.dtype == torch.float32
    assert bool((found.double() - exact).abs().le(steps * (1 + exact.abs())).all())
    assert torch.equal(is_best, torch.from_numpy(logits.float().numpy().argmax(1)) == tokens)
    with torch_only():
        plain, plain_best = CrossEntropy().score(logits.clone(), tokens)
    assert bool((plain.double() - exact).abs().le(steps * (1 + exact.abs())).all())
    assert torch.equal(plain_best, is_best)


def test_the_first_equal_logit_is_found_or_none() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [torch.nan, 2.0, 2.0], [0.0, -torch.inf, 5.0], [0.0, -0.0, 1.0]])
    values = torch.tensor([3.0, 2.0, 4.0, -0.0])
    assert torch.ops.hlat.first_equal(logits, values).tolist() == [1, 1, 3, 0]
    assert torch.ops.hlat.first_equal(torch.zeros(2, 0), torch.zeros(2)).tolist() == [0, 0]


class _Shard(CrossEntropy):
    """A shard of the vocabulary that knows what the other shards have computed."""

    def __init__(
        self, first: int, peaks: torch.Tensor, sums: torch.Tensor | None, best: torch.Tensor | None = None
    ) -> None:
        super().__init__(first)
        self._peaks, self._sums, self._best = peaks, sums, best

    def reduce_min(self, rows_N: torch.Tensor) -> torch.Tensor:
        self.own_best = rows_N
        return rows_N if self._best is None else torch.minimum(rows_N, self._best)

    def reduce_max(self, peak_N: torch.Tensor) -> torch.Tensor:
        return torch.maximum(peak_N, self._peaks)

    def reduce_sum(self, sums_2N: torch.Tensor) -> torch.Tensor:
        self.own = sums_2N
        return sums_2N if self._sums is None else sums_2N + self._sums


def test_a_sharded_vocabulary_gives_the_same_loss_and_gradient() -> None:
    """Two shards, one with much smaller logits and one of them -infinity only in some rows."""
    logits = normal(TOKENS, 100, dtype=torch.float32)
    logits[:, 60:] -= 50
    logits[3:6, 60:] = -torch.inf
    chosen = labels(60)
    whole, gradient = CrossEntropy()(logits.clone(), chosen, gradient=True)
    parts = [logits[:, :60].contiguous(), logits[:, 60:].contiguous()]
    peaks = [part.amax(-1) for part in parts]
    own = []
    for part, first, other in zip(parts, (0, 60), reversed(peaks), strict=True):
        shard = _Shard(first, other, None)
        shard(part.clone(), chosen, gradient=False)
        own.append(shard.own)
    for index, first in enumerate((0, 60)):
        shard = _Shard(first, peaks[1 - index], own[1 - index])
        losses, part = shard(parts[index].clone(), chosen, gradient=True)
        # the sums of both are those of other orders: 32 + 4 + 10 roundings each
        torch.testing.assert_close(losses, whole, rtol=100 * FP32, atol=100 * FP32)
        assert gradient is not None
        torch.testing.assert_close(part, gradient[:, first : first + part.shape[1]], rtol=100 * FP32, atol=100 * FP32)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_a_sharded_vocabulary_gives_the_same_scores(dtype: torch.dtype) -> None:
    logits = normal(TOKENS, 100, dtype=dtype).round()
    tokens = labels(100).clamp(min=0)
    tokens[7:20] = logits[7:20].float().argmax(1)
    whole, is_best = CrossEntropy().score(logits.clone(), tokens)
    parts = [logits[:, :60].contiguous(), logits[:, 60:].contiguous()]
    peaks = [part.amax(-1).to(torch.promote_types(dtype, torch.float32)) for part in parts]
    own = []
    for part, first, other in zip(parts, (0, 60), reversed(peaks), strict=True):
        shard = _Shard(first, other, None)
        shard.score(part.clone(), tokens)
        own.append((shard.own, shard.own_best))
    for index, first in enumerate((0, 60)):
        shard = _Shard(first, peaks[1 - index], *own[1 - index])
        found, found_best = shard.score(parts[index].clone(), tokens)
        torch.testing.assert_close(found, whole, rtol=100 * FP32, atol=100 * FP32)  # as for losses, above
        assert torch.equal(found_best, is_best) and found_best[7:20].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spreads_as_in_torch(value: float, dtype: torch.dtype) -> None:
    """Single logits, and a complete row."""
    logits = normal(TOKENS, 100, dtype=dtype)
    logits[1, 7], logits[2, 99], logits[6] = value, value, value
    found = CrossEntropy()(logits.clone(), labels(100), gradient=True)
    with torch_only():
        expected = CrossEntropy()(logits.clone(), labels(100), gradient=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None and theirs is not None
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(ours), kind(theirs)), kind


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, chosen = normal(200, 1037, dtype=torch.bfloat16), labels(1037).repeat(6)[:200]
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        results.append(CrossEntropy()(logits.clone(), chosen, gradient=True))
    for losses, gradient in results[1:]:
        assert same_bits(losses, results[0][0]) and same_bits(gradient, results[0][1])


def test_no_tokens_have_no_loss() -> None:
    losses, gradient = CrossEntropy()(torch.empty(0, 10), torch.empty(0, dtype=torch.int64), gradient=True)
    assert losses.shape == (0,) and gradient is not None and gradient.shape == (0, 10)
