"""Next-token cross-entropy, summed, in fp32, without the logits of a complete batch.

    hidden --a chunk of tokens--> logits -> loss and its gradient by logits -> gradients by hidden and head weight

The logits of a batch are its largest tensor: 8,192 tokens x 128 k vocabulary are 4 GiB in fp32, and torch's
cross-entropy keeps them twice. Here each chunk of tokens runs through head, loss and their gradients before the next
chunk starts, so that memory does not grow with the number of tokens. It takes the same three matrix products as the
plain loss (the Liger kernels, Hsu et al. 2024, use chunks likewise). Gradients of the summed loss are computed in the
forward pass; backward multiplies them by the incoming gradient.

With a z-loss, gradients are those of the loss plus ``z_loss`` log(Z)^2 per token, where Z is the sum of the
exponentials of its logits (PaLM, arXiv 2204.02311, section 5; OLMo 2, arXiv 2501.00656): it keeps logits from drifting.
The value remains the cross-entropy, so that losses with and without it can be compared. Terms of the user's own
(``LossTerm``) are functions of three numbers of a token, whatever the sharding: log(Z), the logit of its label, and the
mean of its logits. Autograd gives their slopes, and the gradient by a logit follows:

    d term / d logit = slope of log(Z) * exp(logit) / Z + (slope of the label, at the label) + slope of the mean / V

Tensor suffixes: N tokens, D width, V vocabulary, v local vocabulary rows (all, or this rank's), n tokens of a chunk.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hlat.config import Problem, RecipeError, own_parts
from hlat.model.kernels.library import block_rows, check_operand, check_rows, fields, has_kernels, operator, run
from hlat.model.kernels.matmul import linear, matmul
from hlat.model.pointwise import accumulation_dtype, soft_cap
from hlat.runtime.distributed.join import host_values

IGNORED = -100  # label of positions without a target, PyTorch's default ignore_index

_CHUNK_BYTES = 64 << 20  # bytes of fp32 logits
_SMALLEST_CHUNK = 256  # tokens: smaller matrix products are slower
_WIDEST_CHUNK = 2048  # tokens: largest chunk whose logits take more than _CHUNK_BYTES
HEAD_ROWS = 4096  # rows of the head whose gradient from a chunk is computed at a time, before it is added in fp32


class Loss(ctypes.Structure):
    """Arguments of ``loss_sums``, ``loss_gradient`` and ``first_equal``."""

    _fields_ = (
        ("width", ctypes.c_int64),
        *fields(ctypes.c_void_p, "logits", "rows", "peak", "sum", "label", "factor", "first"),
    )


def _check_loss(logits: torch.Tensor, rows: torch.Tensor, **of_tokens: torch.Tensor) -> None:
    check_rows("logits", logits)
    if logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and strides {logits.stride()}, and a contiguous matrix is needed"
        )
    check_operand("rows", rows, torch.int64, logits.shape[:1], logits.device)
    for name, tensor in of_tokens.items():
        check_operand(name, tensor, torch.float32, logits.shape[:1], logits.device)


def _sums_results(logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_loss(logits, rows)
    peak, total, label = logits.new_empty((3, len(logits)), dtype=torch.float32).unbind(0)
    return peak, total, label


@operator("cross_entropy_sums(Tensor logits, Tensor rows) -> (Tensor, Tensor, Tensor)", _sums_results)
def _sums(
    logits_NV: torch.Tensor, rows_N: torch.Tensor, peak_N: torch.Tensor, total_N: torch.Tensor, label_N: torch.Tensor
) -> None:
    """Write each token's largest logit, sum of exponentials relative to it, and logit of its label: fp32 (N,)."""
    # Without columns the largest logit is -infinity, and the sum 0
    if logits_NV.numel() == 0:
        peak_N.fill_(-torch.inf)
        total_N.zero_()
        label_N.zero_()
    # Rows outside of 0 to V - 1 have no label here; its logit is then 0.
    _run_loss("loss_sums", logits_NV, rows=rows_N.contiguous(), peak=peak_N, sum=total_N, label=label_N)


def _check_gradient(logits: torch.Tensor, rows: torch.Tensor, peak: torch.Tensor, factor: torch.Tensor) -> None:
    _check_loss(logits, rows, peak=peak, factor=factor)


@operator("cross_entropy_gradient_(Tensor(a!) logits, Tensor rows, Tensor peak, Tensor factor) -> ()", _check_gradient)
def _gradient(logits_NV: torch.Tensor, rows_N: torch.Tensor, peak_N: torch.Tensor, factor_N: torch.Tensor) -> None:
    """Overwrite logits by ``exp(logit - peak) * factor``, less 1 at the label."""
    of_tokens = {"rows": rows_N, "peak": peak_N, "factor": factor_N}
    _run_loss("loss_gradient", logits_NV, **{name: tensor.contiguous() for name, tensor in of_tokens.items()})


def _first_equal_results(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if logits.dim() == 2:  # else the check of logits says so
        check_operand("values", values, torch.float32, logits.shape[:1], logits.device)
    found = logits.new_empty(logits.shape[:1], dtype=torch.int64)
    _check_loss(logits, found)
    return found


@operator("first_equal(Tensor logits, Tensor values) -> Tensor", _first_equal_results)
def _first_equal(logits_NV: torch.Tensor, values_N: torch.Tensor, found_N: torch.Tensor) -> None:
    """Find the first logit of each token that equals a value, fp32 (N,): its column, int64 (N,), or V if none does."""
    found_N.fill_(logits_NV.shape[1])
    _run_loss("first_equal", logits_NV, peak=values_N.contiguous(), first=found_N)


def _run_loss(name: str, logits_NV: torch.Tensor, **tensors: torch.Tensor) -> None:
    width = logits_NV.shape[1]
    arguments = Loss(width, logits_NV.data_ptr(), **{field: tensor.data_ptr() for field, tensor in tensors.items()})
    if logits_NV.numel():
        run(name, logits_NV.dtype, arguments, len(logits_NV), block_rows(width))


# Function of log(Z), the logit of the label and the mean logit of each token, (N,) each, to what is added to the
# token's loss, (N,); keyword arguments are its options.
LossTerm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def loss_terms(sections: Mapping[str, Mapping[str, Any]]) -> list[LossTerm]:
    """Import the loss terms of ``training.loss_terms``, with their options; RecipeError lists what is wrong."""
    found: list[LossTerm] = []

    def load(name: str, values: Mapping[str, Any]) -> None:
        path = f"training.loss_terms.{name}"
        part = own_parts.load_part(own_parts.LOSSES, path, name, "a function of tensors", callable)
        options = own_parts.read_options(own_parts.options_class(part, given=_STATISTICS), values, path)
        term = partial(part, **options.model_dump())
        with host_values():
            reason = _term_problem(term)
        if reason:
            remedy = "docs/extend.md has an example."
            raise RecipeError([Problem(path, reason, remedy)])
        found.append(term)

    if problems := own_parts.gather_problems(partial(load, name, values) for name, values in sections.items()):
        raise RecipeError(problems)
    return found


_STATISTICS = ("log_z", "label", "mean")  # arguments of a loss term


def _term_problem(term: LossTerm) -> str:
    """Say why a term cannot be used, found with a few numbers; empty if it can."""
    inputs = [torch.linspace(low, high, 8) for low, high in ((1.0, 3.0), (-1.0, 0.9), (-0.5, 0.5))]
    try:
        values, slopes = _term_slopes([term], inputs)
        halves = [_term_slopes([term], [each[rows] for each in inputs]) for rows in (slice(4), slice(4, 8))]
    except Exception as error:  # code of the user's own may raise anything
        return f"it fails on numbers of 8 tokens: {type(error).__name__}: {error}."
    joined = torch.cat([torch.stack((part[0], *part[1])) for part in halves], dim=1)
    if not torch.allclose(joined, torch.stack((values, *slopes)), rtol=1e-5, atol=1e-6):
        return "the term of a token depends on other tokens, of which another rank may have some."
    return ""


def _term_slopes(
    terms: Sequence[LossTerm], statistics: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the sum of terms for each token, and its derivatives by the statistics."""
    with torch.enable_grad():
        inputs = [each.detach().requires_grad_() for each in statistics]
        values = torch.stack([term(*inputs) for term in terms]).sum(0)
        if values.shape != inputs[0].shape:
            raise ValueError(f"it returns shape {tuple(values.shape)} for tokens of shape {tuple(inputs[0].shape)}")
        slopes = torch.autograd.grad(values.sum(), inputs, allow_unused=True)
    return values.detach(), [
        torch.zeros_like(each) if slope is None else slope for each, slope in zip(inputs, slopes, strict=True)
    ]


class CrossEntropy:
    """Cross-entropy of a chunk of logits, and its gradient; the vocabulary may be sharded over processes.

    Subclasses reduce over the shards of the vocabulary; here it is not sharded.

    Args:
        first_row: vocabulary row of the first column of the logits.
        columns: largest number of columns of any process; None if all have as many as this one.
    """

    def __init__(self, first_row: int = 0, columns: int | None = None) -> None:
        self._first_row, self._columns = first_row, columns
        self.z_loss = 0.0  # factor of log(Z)^2, the term that only gradients have
        self.terms: Sequence[LossTerm] = ()  # further terms, which only gradients have too
        self.softcap: float | None = None  # logits are softcap * tanh(product / softcap); None for the product

    def cap(self, products: torch.Tensor) -> torch.Tensor:
        """Compute logits from products with rows of the head."""
        return soft_cap(products, self.softcap)

    def chunk(self, columns: int, width: int) -> int:
        """Number of tokens of a chunk of logits, for hidden states of a width; the same on every process."""
        # 64 MiB of fp32 logits, but at least as many tokens as the model is wide, up to 2048. Adding to the gradient of
        # the head takes as long as the products of some hundred tokens, and logits in fp32 are then no larger than that
        # gradient.
        within = _CHUNK_BYTES // (4 * (self._columns or columns))
        return max(_SMALLEST_CHUNK, within, min(width, _WIDEST_CHUNK))

    def reduce_max(self, peak_N: torch.Tensor) -> torch.Tensor:
        """Reduce each token's largest local logit to the largest over the complete vocabulary."""
        return peak_N

    def reduce_sum(self, sums_2N: torch.Tensor) -> torch.Tensor:
        """Reduce two sums per token over the local columns to sums over the complete vocabulary."""
        return sums_2N

    def reduce_min(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Reduce a row number per token to the smallest of all processes that share the vocabulary."""
        return rows_N

    def most_likely(self, logits_Nv: torch.Tensor) -> torch.Tensor:
        """Return the vocabulary row with each token's largest logit, the first of equal ones: (N,), int64."""
        local_peak_N = logits_Nv.amax(-1)
        # A clone: subclasses reduce in place, and the local peak is needed below.
        peak_N = self.reduce_max(local_peak_N.clone())
        # max() need not return the first of equal logits.
        local_N = torch.where(logits_Nv == local_peak_N.unsqueeze(1), 1, 0).argmax(1) + self._first_row
        # int32: some devices have no collectives of int64.
        local_N = local_N.masked_fill(local_peak_N != peak_N, torch.iinfo(torch.int32).max).to(torch.int32)
        return self.reduce_min(local_N).to(torch.int64)

    def __call__(
        self, logits_Nv: torch.Tensor, labels_N: torch.Tensor, gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute log(sum(exp(logits))) - logit of the label for each token, 0 where the label is ``IGNORED``.

        Args:
            logits_Nv: products with the local vocabulary rows, not capped yet, contiguous; overwritten.
            labels_N: rows of the complete vocabulary, int64 or int32.
            gradient: True to compute it too.

        Returns:
            The losses (N,) in nats, fp32 or wider; and the gradient (N, v) of their sum in the dtype of the logits,
            z-loss included, or None.
        """
        if self.softcap is None:
            return self._of_logits(logits_Nv, labels_N, gradient)
        capped_Nv = self.cap(logits_Nv)
        # d softcap tanh(x / softcap) / d x = 1 - tanh^2
        slope_Nv = (capped_Nv / self.softcap).square_().neg_().add_(1) if gradient else None
        loss_N, grad_Nv = self._of_logits(capped_Nv, labels_N, gradient)
        return loss_N, None if grad_Nv is None or slope_Nv is None else grad_Nv.mul_(slope_Nv)

    def _of_logits(
        self, logits_Nv: torch.Tensor, labels_N: torch.Tensor, gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute losses and gradient from the logits themselves; see ``__call__``."""
        row_N = (labels_N - self._first_row).to(torch.int64)
        here_N = (row_N >= 0) & (row_N < logits_Nv.shape[1])
        # A compiler fuses the plain formulas itself.
        fused = not torch.compiler.is_compiling() and has_kernels(logits_Nv) and not self.terms
        means_N = self._means(logits_Nv) if self.terms and gradient else None
        sums = self._fused_sums if fused else self._plain_sums
        peak_N, total_N, label_N, exp_Nv = sums(logits_Nv, row_N, here_N)
        total_N, label_N = self.reduce_sum(torch.stack((total_N, label_N)))
        counted_N = labels_N != IGNORED
        loss_N = (total_N.log() - label_N).masked_fill(~counted_N, 0)
        if not gradient:
            return loss_N, None
        factor_N = counted_N / total_N
        if self.z_loss:  # d (log Z)^2 / d logit = 2 log Z exp(logit) / Z
            factor_N *= 1 + 2 * self.z_loss * (peak_N + total_N.log())
        if means_N is not None:
            statistics = (peak_N + total_N.log(), peak_N + label_N, means_N[0])
            _, slopes = _term_slopes(self.terms, statistics)
            by_z_N, by_label_N, by_mean_N = (slope_N.masked_fill(~counted_N, 0) for slope_N in slopes)
            exp_Nv.mul_((factor_N + by_z_N / total_N).unsqueeze(1)).add_((by_mean_N / means_N[1]).unsqueeze(1))
            at_label_N = (by_label_N - 1) * (here_N & counted_N)
            exp_Nv.scatter_add_(1, row_N.masked_fill(~here_N, 0).unsqueeze(1), at_label_N.unsqueeze(1))
            return loss_N, exp_Nv.to(logits_Nv.dtype)
        # Labels of other processes, and missing ones, become -1: the kernel subtracts no 1 for them.
        here_N &= counted_N
        if fused:
            torch.ops.hlat.cross_entropy_gradient_(logits_Nv, row_N.masked_fill(~here_N, -1), peak_N, factor_N)
            return loss_N, logits_Nv
        grad_Nv = exp_Nv.mul_(factor_N.unsqueeze(1))
        grad_Nv.scatter_add_(1, row_N.masked_fill(~here_N, 0).unsqueeze(1), -here_N.to(grad_Nv.dtype).unsqueeze(1))
        return loss_N, grad_Nv.to(logits_Nv.dtype)

    def _means(self, logits_Nv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the mean logit of each token over the complete vocabulary, and the size of that: (N,) each."""
        sums_N = logits_Nv.sum(-1, dtype=accumulation_dtype(logits_Nv.dtype))
        sums_N, columns_N = self.reduce_sum(torch.stack((sums_N, torch.full_like(sums_N, logits_Nv.shape[1]))))
        return sums_N / columns_N, columns_N

    def score(self, logits_Nv: torch.Tensor, tokens_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probabilities of given tokens, and if each is the most likely one (the first of equally likely).

        Logits (N, v), contiguous, are overwritten; tokens are rows of the complete vocabulary, int64. Returns nats
        (N,), fp32 or wider, and bool (N,).
        """
        row_N, columns = tokens_N - self._first_row, logits_Nv.shape[1]
        here_N = (row_N >= 0) & (row_N < columns)
        if has_kernels(logits_Nv):
            peak_N, total_N, label_N, _ = self._fused_sums(logits_Nv, row_N, here_N)
            best_N = torch.ops.hlat.first_equal(logits_Nv, peak_N)
        else:
            best_N = logits_Nv.argmax(1)  # the first of equal logits; max() may return another
            local_peak_N = logits_Nv.gather(1, best_N[:, None])[:, 0]
            peak_N, total_N, label_N, _ = self._plain_sums(logits_Nv, row_N, here_N)
            best_N = best_N.masked_fill(local_peak_N != peak_N, columns)
        total_N, label_N = self.reduce_sum(torch.stack((total_N, label_N)))
        # int32: some devices have no collectives of int64.
        best_N = (best_N + self._first_row).masked_fill(best_N == columns, torch.iinfo(torch.int32).max)
        return label_N - total_N.log(), self.reduce_min(best_N.to(torch.int32)) == tokens_N

    def _plain_sums(
        self, logits_Nv: torch.Tensor, row_N: torch.Tensor, here_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Largest logit; relative to it sum of exponentials and logit of the label or 0; exponentials (N, v)."""
        wide_Nv = logits_Nv.to(accumulation_dtype(logits_Nv.dtype))
        peak_N = self.reduce_max(wide_Nv.amax(-1))
        wide_Nv.sub_(peak_N.unsqueeze(1))
        label_N1 = wide_Nv.gather(1, row_N.masked_fill(~here_N, 0).unsqueeze(1))
        exp_Nv = wide_Nv.exp_()
        return peak_N, exp_Nv.sum(-1), label_N1.squeeze(1).masked_fill(~here_N, 0), exp_Nv

    def _fused_sums(
        self, logits_Nv: torch.Tensor, row_N: torch.Tensor, here_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the same in one pass, without the exponentials: returns the logits in their place."""
        local_peak_N, total_N, label_N = torch.ops.hlat.cross_entropy_sums(logits_Nv, row_N)
        peak_N = self.reduce_max(local_peak_N.clone())
        # The kernel's sums are relative to the local peak
        total_N *= (local_peak_N - peak_N).exp()
        return peak_N, total_N, (label_N - peak_N).masked_fill(~here_N, 0), logits_Nv


def head_loss(
    hidden: torch.Tensor, weight_vD: torch.Tensor, labels: torch.Tensor, cross_entropy: CrossEntropy
) -> torch.Tensor:
    """Compute the summed cross-entropy of ``hidden @ weight.T``: a scalar in nats, fp32 or wider, in bounded memory.

    Hidden states (..., D) in the compute dtype, head of any floating dtype, labels (...) int64, some ``IGNORED``.
    """
    # A sum: micro-batches and ranks can be added, and divided once by the tokens of the global batch.
    arguments = (hidden.flatten(0, -2), weight_vD, labels.flatten(), cross_entropy, torch.is_grad_enabled())
    out: torch.Tensor = _HeadLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


def row_losses(
    hidden_BSD: torch.Tensor, weight_vD: torch.Tensor, labels_BS: torch.Tensor, cross_entropy: CrossEntropy
) -> torch.Tensor:
    """Compute the summed cross-entropy of each row without gradients, in bounded memory: (B,) in nats, fp32 or wider.

    Hidden states (B, S, D) in the compute dtype; local rows of the head, any floating dtype; labels (B, S), int64,
    ``IGNORED`` for positions without a target.
    """
    with torch.no_grad():
        # Logits are computed at positions with a label only
        counted_BS = labels_BS != IGNORED
        hidden_ND, labels_N = hidden_BSD[counted_BS], labels_BS[counted_BS]
        row_N = counted_BS.nonzero()[:, 0]
        rows, matrix_vD = cross_entropy.chunk(*weight_vD.shape), weight_vD.to(hidden_BSD.dtype)
        losses_B = hidden_BSD.new_zeros(len(labels_BS), dtype=accumulation_dtype(hidden_BSD.dtype))
        for begin in range(0, len(hidden_ND), rows):
            chunk = slice(begin, begin + rows)
            losses_n, _ = cross_entropy(linear(hidden_ND[chunk], matrix_vD), labels_N[chunk], gradient=False)
            losses_B.index_add_(0, row_N[chunk], losses_n)
    return losses_B


@torch.no_grad()
def next_tokens(
    hidden_BSD: torch.Tensor, weight_vD: torch.Tensor, labels_BS: torch.Tensor, cross_entropy: CrossEntropy
) -> torch.Tensor:
    """Choose the most likely next token of each row: token ids (B,), int64; 0 for a row without a label.

    Hidden states, weight and labels as in ``row_losses``. A row has at most one position with a label; the token after
    that position is chosen, and the label does not matter.
    """
    asked_BS = labels_BS != IGNORED
    hidden_ND, row_N = hidden_BSD[asked_BS], asked_BS.nonzero()[:, 0]
    size, matrix_vD = cross_entropy.chunk(*weight_vD.shape), weight_vD.to(hidden_BSD.dtype)
    tokens_B = torch.zeros(len(labels_BS), dtype=torch.int64, device=hidden_BSD.device)
    for begin in range(0, len(hidden_ND), size):
        chunk = slice(begin, begin + size)
        tokens_B[row_N[chunk]] = cross_entropy.most_likely(linear(hidden_ND[chunk], matrix_vD))
    return tokens_B


# Function of hidden states, head weight, labels and cross-entropy: ``head_loss``, ``row_losses``, ``next_tokens``
Reduction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, CrossEntropy], torch.Tensor]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_vD: torch.Tensor,
        labels_N: torch.Tensor,
        cross_entropy: CrossEntropy,
        differentiated: bool,
    ) -> torch.Tensor:
        by_hidden, by_weight = (differentiated and needed for needed in ctx.needs_input_grad[:2])
        rows, matrix_vD = cross_entropy.chunk(*weight_vD.shape), weight_vD.to(hidden_ND.dtype)
        loss = hidden_ND.new_zeros((), dtype=accumulation_dtype(hidden_ND.dtype))
        grad_hidden_ND = torch.empty_like(hidden_ND) if by_hidden else None
        grad_weight_vD: torch.Tensor | None = None
        for begin in range(0, len(hidden_ND), rows):
            hidden_nD = hidden_ND[begin : begin + rows]
            trains = by_hidden or by_weight
            logits_nv = matmul(hidden_nD, matrix_vD.T) if trains else linear(hidden_nD, matrix_vD)
            losses_n, grad_nv = cross_entropy(logits_nv, labels_N[begin : begin + rows], trains)
            # Logits and their gradient are the largest tensors of a step: only one chunk of them may be alive.
            del logits_nv
            loss += losses_n.sum()
            if grad_hidden_ND is not None and grad_nv is not None:
                matmul(grad_nv, matrix_vD, out=grad_hidden_ND[begin : begin + rows])
            if by_weight and grad_nv is not None:
                if grad_weight_vD is None and len(hidden_ND) <= rows:
                    grad_weight_vD = matmul(grad_nv.T, hidden_nD)
                else:  # accumulated in fp32, as a single product over all tokens would be
                    if grad_weight_vD is None:
                        grad_weight_vD = torch.zeros_like(matrix_vD, dtype=loss.dtype)
                    _add_product(grad_weight_vD, grad_nv, hidden_nD)
            del grad_nv
        ctx.save_for_backward(grad_hidden_ND, None if grad_weight_vD is None else grad_weight_vD.to(weight_vD.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_hidden, by_weight = (None if saved is None else saved * grads[0] for saved in ctx.saved_tensors)
        return by_hidden, by_weight, None, None, None


def _add_product(total_vD: torch.Tensor, grad_nv: torch.Tensor, hidden_nD: torch.Tensor) -> None:
    if total_vD.dtype == grad_nv.dtype:
        total_vD.addmm_(grad_nv.T, hidden_nD)
        return
    # Some rows at a time, whose product fits into a cache.
    for begin in range(0, len(total_vD), HEAD_ROWS):
        rows = slice(begin, begin + HEAD_ROWS)
        total_vD[rows].add_(matmul(grad_nv[:, rows].T, hidden_nD))


class Head(nn.Module):
    """The output projection: logits, or the loss if labels are given, without building all logits."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.cross_entropy = CrossEntropy()

    @property
    def matrix(self) -> torch.Tensor:
        """The weight, (local vocabulary rows, width)."""
        return self.weight

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, *, reduction: Reduction = head_loss
    ) -> torch.Tensor:
        """(B, S, D) -> logits (B, S, v); with labels (B, S) -> their summed cross-entropy, or another reduction."""
        if labels is None:
            return self.cross_entropy.cap(linear(x, self.matrix))
        return reduction(x, self.matrix, labels, self.cross_entropy)


class TiedHead(Head):
    """The head with tied weights: it has no parameter of its own and uses the embedding matrix."""

    def __init__(self, embedding: nn.Embedding) -> None:
        nn.Module.__init__(self)
        # A tuple, so that the embedding is not registered as a submodule a second time.
        self._embedding = (embedding,)
        self.cross_entropy = CrossEntropy()

    @property
    def matrix(self) -> torch.Tensor:
        return self._embedding[0].weight
