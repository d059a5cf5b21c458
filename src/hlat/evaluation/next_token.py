"""The next token: computed as fast as this machine can, and chosen from its logits.

    is there a compiled step?  --yes--> one call of C for each token (hlat.model.decoding)
                               --no---> weight --oneDNN, once--> blocks in the order in which its kernels read them
                                            --each product--> x @ weight.T        (where it has no kernels: torch)

    on a GPU:  prompt --> KV cache, first token --> [ token -> hidden states -> logits -> next token ]
                   recorded once, repeated by the device;  some tokens at a time --> host: has the text ended?

    seed, names of the text, position in it -> a number in [0, 1)        logits, number -> token

A token reads every weight once for a few rows, so memory limits it, and the order in which weights are read decides.
``F.linear`` on a CPU with AVX-512 reads at a fifth of the bandwidth of memory, the product by packed weights at two
thirds (docs/notebook/evaluation.md). It sums in another order, in fp32, and rounds once.
On a GPU the host starts 30 operations for each block and token, which takes longer than the device needs for them.
Captured CUDA graphs have not been run on a GPU yet; tests repeat the same step on a CPU.

Sampling is greedy, or its randomness is addressed, not consumed.

Tensor suffixes: N new tokens, V vocabulary, K most likely tokens.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hlat.model import CompiledStep, Decoder, DeviceKVCache, Head, KVCache, Linear, compile_step
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import DataError
from hlat.runtime.random_keys import stream_key
from hlat.runtime.randomness import philox

_CANDIDATES = 512  # tokens to sort first; nearly always they have the probability that top_p asks for


@sendable
@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token.

    Raises:
        DataError: values without a meaning, all at once.
    """

    temperature: float = 0.0  # 0 is greedy: the most likely token
    top_k: int | None = None  # keep only the k most likely tokens
    top_p: float | None = None  # of these, the smallest set of most likely tokens whose total probability reaches p
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = []
        if not 0 <= self.temperature < math.inf:
            wrong.append(f"temperature {self.temperature} must be 0, which is greedy, or above.")
        if self.top_k is not None and self.top_k < 1:
            wrong.append(f"top_k {self.top_k} must be 1 or above.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            wrong.append(f"top_p {self.top_p} must be above 0 and at most 1.")
        if self.seed < 0:
            wrong.append(f"seed {self.seed} must be 0 or above.")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            given = " and ".join(name for name in ("top_k", "top_p") if getattr(self, name) is not None)
            wrong.append(f"{given} has no effect at temperature 0, which is greedy. Give a temperature, such as 0.8.")
        if wrong:
            raise DataError("\n".join(wrong))


def choose_token(logits_V: torch.Tensor, sampling: Sampling, index: int, *names: str | int) -> int:
    """Choose the next token from the logits of the complete vocabulary, (V,).

    ``index`` is its position in the generated text; ``names`` tell apart texts that are sampled with the same seed.
    """
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    # On the CPU: a single token's logits are few, and CUDA has no deterministic cumulative sum of floats.
    scores_V = logits_V.cpu().double() / sampling.temperature
    scores_K, ids_K, below_all = _most_likely(scores_V, sampling)
    probabilities = (scores_K - below_all).exp()
    if sampling.top_p is not None:
        # keep a token while those before it have not reached p; always keep the most likely one
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[: max(1, int((before < sampling.top_p).sum()))]
    below = probabilities.cumsum(0) / probabilities.sum()
    draw = _uniform(sampling.seed, index, names)
    return int(ids_K[min(int((below <= draw).sum()), len(probabilities) - 1)])


def choose_on_device(logits_V: torch.Tensor, sampling: Sampling, draw_1: torch.Tensor) -> torch.Tensor:
    """Choose as ``choose_token``, without waiting for a device that has float64; returns the id (1,), int64."""
    if sampling.temperature == 0.0:
        return logits_V.argmax().view(1)
    scores_V, ids_V = (logits_V.double() / sampling.temperature).sort(descending=True, stable=True)
    scores_K = scores_V[: sampling.top_k]
    probabilities_K = (scores_K - scores_K.logsumexp(0)).exp()
    last = torch.full((1,), len(scores_K) - 1, device=ids_V.device)
    if sampling.top_p is not None:
        kept_K = running_sum(probabilities_K) - probabilities_K < sampling.top_p
        probabilities_K, last = probabilities_K * kept_K, kept_K.sum(0, keepdim=True) - 1
    below_K = running_sum(probabilities_K) / probabilities_K.sum()
    return ids_V[torch.minimum((below_K <= draw_1).sum(0, keepdim=True), last)]


def draws(seed: int, count: int) -> torch.Tensor:
    """Return the numbers in [0, 1) that choose the first tokens of a text: float64 (count,), on the CPU."""
    return philox(stream_key(seed, "sampling"), torch.arange(count))[0].double() / 2.0**32


def running_sum(values_K: torch.Tensor) -> torch.Tensor:
    """Sum each number and all before it by products of matrices: CUDA has no deterministic ``cumsum`` of floats."""
    side = math.isqrt(len(values_K)) + 1
    rows = torch.nn.functional.pad(values_K, (0, side * side - len(values_K))).view(side, side)
    ones = torch.ones_like(rows)
    within = rows @ ones.triu()
    return (within + ones.tril(-1) @ within[:, -1:]).flatten()[: len(values_K)]


def choose_tokens(
    logits_BV: torch.Tensor, sampling: Sampling, index: int, names: Sequence[tuple[str | int, ...]]
) -> list[int]:
    """Choose a token for each of several texts at the same position; see ``choose_token``."""
    if sampling.temperature == 0.0:
        return [int(token) for token in logits_BV.argmax(1).tolist()]
    logits = logits_BV.cpu()  # once: each copy from a device waits for it
    return [choose_token(logits_V, sampling, index, *each) for logits_V, each in zip(logits, names, strict=True)]


def _most_likely(scores_V: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the tokens that may be chosen: their scores and ids, and the logarithm of their total."""
    count = len(scores_V)
    if sampling.top_k is not None or sampling.top_p is not None:
        count = min(count, sampling.top_k or _CANDIDATES)
        # All tokens at least as likely as the last candidate, so that ties have the order of the vocabulary.
        candidates = (scores_V >= scores_V.topk(count).values[-1]).nonzero()[:, 0]
        scores_K, order = scores_V[candidates].sort(descending=True, stable=True)
        total = scores_V.logsumexp(0) if sampling.top_k is None else scores_K[:count].logsumexp(0)
        if sampling.top_k is not None or float((scores_K - total).exp().sum()) >= (sampling.top_p or 0.0):
            most = len(candidates) if sampling.top_k is None else count
            return scores_K[:most], candidates[order][:most], total
    scores_K, ids_K = scores_V.sort(descending=True, stable=True)
    return scores_K, ids_K, scores_V.logsumexp(0)


def _uniform(seed: int, index: int, names: tuple[str | int, ...]) -> float:
    """Return a number in [0, 1) that depends only on seed, names and position."""
    word = philox(stream_key(seed, "sampling", *names), torch.tensor(index))[0]
    return int(word) / 2.0**32


FEWEST_TOKENS = 24
"""Tokens of a text from which packing the weights for it pays: it takes as long as 5 to 15 tokens of one row."""

_LARGEST_SHARE = 0.25  # of the machine's memory, for packed copies beside the weights
_MOST_ROWS = 8192  # of a packed matrix: for one row of x, oneDNN computes a larger one in a single thread
_DTYPES = (torch.float32, torch.bfloat16)


def pack_weights(decoder: Decoder) -> None:
    """Pack the weights of a model for good, if memory allows it; it can no longer be saved or trained."""
    modules = _modules(decoder)
    # Packed matrices may need more memory than they replace: wider ones where products are widened, the head beside a
    # tied embedding.
    if not fits(decoder, _additional_bytes(modules, decoder)):
        return
    # One after the other: each matrix gives up its memory before the next one is packed.
    for module in modules:
        vars(module)["forward"] = _product(module, decoder)  # of this object: hooks are called as before
        for name, matrix in module.named_parameters(recurse=False):  # a tied head has none: the embedding keeps its own
            setattr(module, name, nn.Parameter(matrix.detach().new_empty(0), requires_grad=False))


@contextmanager
def packed_weights(decoder: Decoder, tokens: int) -> Iterator[None]:
    """Compute hidden states and logits with packed copies within the block, if that pays for so many tokens."""
    bytes_of_copies = sum(parameter.numel() for parameter in decoder.parameters()) * torch.float32.itemsize
    modules = _modules(decoder) if tokens >= FEWEST_TOKENS and fits(decoder, bytes_of_copies) else []
    try:
        for module in modules:
            vars(module)["forward"] = _product(module, decoder)
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)


def _modules(decoder: Decoder) -> list[Linear | Head]:
    """Modules whose products can be packed; none where the backend or the dtype has no kernel for it."""
    weight = next(decoder.parameters())
    if not backend_of(weight.device).packs_weights or _compute(decoder) not in _DTYPES:
        return []
    return [module for module in decoder.modules() if isinstance(module, Linear | Head)]


def _compute(decoder: Decoder) -> torch.dtype:
    return decoder.compute or next(decoder.parameters()).dtype


def fits(decoder: Decoder, additional: int) -> bool:
    """Return True if so many bytes leave most of the memory to others; the same in every run on a machine."""
    device = next(decoder.parameters()).device
    # A share of the memory that the machine has, not of what is free now: bits must not depend on other programs.
    return additional <= 0 or additional <= _LARGEST_SHARE * backend_of(device).memory_bytes(device)


def _additional_bytes(modules: list[Linear | Head], decoder: Decoder) -> int:
    additional = 0
    for module in modules:
        weight, bias = _operands(module)
        packed = backend_of(weight.device).product_dtype(_compute(decoder))
        additional += (weight.numel() + (0 if bias is None else bias.numel())) * packed.itemsize
        # What packing replaces is given back.
        additional -= sum(parameter.nbytes for parameter in module.parameters(recurse=False))
    return additional


def _operands(module: Linear | Head) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (module.matrix, None) if isinstance(module, Head) else (module.weight, module.bias)


def _product(module: Linear | Head, decoder: Decoder) -> "PackedProduct":
    product = PackedProduct(*_operands(module), _compute(decoder))
    if isinstance(module, Head):
        product.finish = module.cross_entropy.cap
    return product


class PackedProduct:
    """Product by a packed matrix: (..., in) -> (..., out), in the dtype of its argument.

    The weight is (out, in), the bias (out,). ``compute`` is the dtype of the argument; if its products are widened
    (``Backend.product_dtype``), so is the weight.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, compute: torch.dtype) -> None:
        self.finish: Callable[[torch.Tensor], torch.Tensor] = (
            torch.nn.Identity()
        )  # what the head does with its products
        self._dtype = backend_of(weight.device).product_dtype(compute)
        narrow = weight.detach().to(compute)
        biases = None if bias is None else bias.detach().to(compute).to(self._dtype).split(_MOST_ROWS)
        parts = narrow.split(_MOST_ROWS)
        pack = torch.ops.mkldnn._reorder_linear_weight
        self._parts = [
            (pack(part.to(self._dtype).contiguous()), None if biases is None else biases[index])
            for index, part in enumerate(parts)
        ]

    def __call__(self, x: torch.Tensor, labels: None = None, *, reduction: object = None) -> torch.Tensor:
        # The signature is that of Head.forward, which also computes losses.
        assert labels is None, "a model with packed weights computes hidden states and logits"
        wide = x.to(self._dtype)
        multiply = torch.ops.mkldnn._linear_pointwise
        outs = [multiply(wide, weight, bias, "none", [], "") for weight, bias in self._parts]
        out: torch.Tensor = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
        return self.finish(out.to(x.dtype))


def prepare_to_generate(decoder: Decoder) -> None:
    """Prepare a model that only generates and scores from now on; it can no longer be saved or trained."""
    step = _step(decoder)
    if step is None:
        pack_weights(decoder)
    else:
        _install(decoder, step)


@contextmanager
def fast_decoding(decoder: Decoder, tokens: int) -> Iterator[None]:
    """Decode ``tokens`` tokens as fast as possible within the block; the weights must not change in it."""
    step = _step(decoder)
    if step is None:
        with packed_weights(decoder, tokens):
            yield
        return
    _install(decoder, step)
    try:
        yield
    finally:
        decoder.step = None
        vars(decoder.head).pop("forward", None)


def _step(decoder: Decoder) -> CompiledStep | None:
    """Build the compiled step, unless it would need copies of the weights that take too much memory."""
    compute, parameters = decoder.compute, list(decoder.parameters())
    copied = sum(each.numel() for each in parameters if compute is not None and each.dtype != compute)
    return compile_step(decoder) if compute is None or fits(decoder, copied * compute.itemsize) else None


def _install(decoder: Decoder, step: CompiledStep) -> None:
    decoder.step = step
    vars(decoder.head)["forward"] = step.head  # of this object: hooks are called as before


_TOKENS_PER_READ = 16
"""Tokens after which the host looks for the end of the text; those after it were computed in vain."""


def decode_on_device(
    model: Decoder, prompt: list[int], count: int, sampling: Sampling, end_ids: Collection[int]
) -> list[int]:
    """Continue a prompt by ``count`` tokens at most, or to the first of ``end_ids``; returns the new tokens.

    The model is complete, on a device with ``has_graphs``; the prompt has at least one token.
    """
    step = _TokenStep(model, prompt, count, sampling)
    repeat: Callable[[], object] = step
    done, tokens = 1, list[int]()
    while done < count and not _ended(tokens, end_ids):
        stop = min(count, done + _TOKENS_PER_READ)
        if done > _TOKENS_PER_READ:  # the tokens so far have compiled and loaded all kernels
            repeat = repeat if repeat is not step else backend_of(step.device).record(step)
        for _ in range(done, stop):
            repeat()
        # Waits for the device, so not after each token.
        done, tokens = stop, step.tokens(stop)
    tokens = tokens or step.tokens(done)
    ends = [place for place, token in enumerate(tokens) if token in end_ids]
    return tokens[: ends[0]] if ends else tokens


def _ended(tokens: list[int], end_ids: Collection[int]) -> bool:
    return any(token in end_ids for token in tokens)


class _TokenStep:
    """The work of one token, on the same memory in each call, so that it can be recorded."""

    def __init__(self, model: Decoder, prompt: list[int], count: int, sampling: Sampling) -> None:
        weight = next(model.parameters())
        self.device = weight.device
        self._model, self._sampling = model, sampling
        # All random numbers in advance: a recorded step cannot draw on the host.
        self._draws_N = draws(sampling.seed, count).to(self.device)
        self._tokens_N = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._newest_11 = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        self._index_1 = torch.zeros(1, dtype=torch.int64, device=self.device)  # of the next token
        cache = KVCache(model.config, 1, len(prompt) + count, self.device, model.compute or weight.dtype)
        self._choose(model.hidden(torch.tensor([prompt], device=self.device), cache=cache))
        self._cache = DeviceKVCache(cache)

    def __call__(self) -> None:
        self._choose(self._model.hidden(self._newest_11, positions=self._cache.positions_B1, cache=self._cache))

    def tokens(self, count: int) -> list[int]:
        chosen: list[int] = self._tokens_N[:count].tolist()
        return chosen

    def _choose(self, hidden_1SD: torch.Tensor) -> None:
        assert self._model.head is not None, "the model is complete"
        token_1 = choose_on_device(self._model.head(hidden_1SD[0, -1]), self._sampling, self._draws_N[self._index_1])
        self._newest_11.copy_(token_1)
        self._tokens_N.index_copy_(0, self._index_1, token_1)
        self._index_1 += 1
