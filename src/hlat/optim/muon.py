"""Muon: momentum of hidden matrices, orthogonalized by Newton-Schulz iterations; AdamW for all other parameters.

    gradients --momentum, Nesterov--> directions --WholeMatrices--> whole matrices --Newton-Schulz--> U V^T, about
        --WholeMatrices--> updates --learning rate, weight decay--> weights

Keller Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with weight decay and the scale of Liu et al. 2025
(Moonlight, arXiv 2502.16982, equation 4), for a hidden matrix W with momentum M, both of A x B:

    M <- M + (G - M) * (1 - momentum)
    D  = G + (M - G) * momentum                      with Nesterov's momentum, else M
    W <- W - W * (lr * decay) - NS(D) * (lr * 0.2 * sqrt(max(A, B)))

A matrix with orthonormal rows (or columns) has elements of root mean square 1 / sqrt(max(A, B)), so that updates have
the size 0.2 of AdamW's, and learning rates tuned for AdamW apply. NS(D) has singular values near 1 instead of exactly
1. q, k, v, gate and up are matrices of their own, also if they are stored fused. D is rounded to the dtype of the
precision mode's products before it is gathered, and NS(D) before it is returned: bf16 in all modes but fp32. The
products themselves are fp32 on devices that would emulate bf16. All of this follows from recipe and device.

Over bf16 weights, everything is computed in fp32 and rounded as in ``adamw_reference.py``, with the same random bits.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hlat.config import MuonConfig
from hlat.model import LocalParameter, local
from hlat.optim.adamw import AdamWSpec
from hlat.optim.adamw_reference import RoundingStreams, compensation_bits, random_bits, rounded, rounding_of, subtract
from hlat.optim.base import (
    STEP,
    LocalMatrices,
    Optimizer,
    OptimizerSpec,
    WholeMatrices,
    as_torch,
    scale_in_place,
    scaled_groups,
)
from hlat.precision import MODES
from hlat.runtime.backend.table import backend_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic of Newton-Schulz: a x + b x^3 + c x^5, of large slope at 0 (Jordan et al. 2024)."""
_RMS = 0.2  # root mean square of AdamW's updates in practice (Liu et al. 2025, section 2.2)
_SMALLEST_NORM = 1e-7  # of a matrix that is divided by its norm: zero stays zero
_CHUNK = 1 << 20  # elements of bf16 weights updated at a time, which bounds the memory of fp32 temporaries
_CHUNK_BYTES = {"bf16": 16, "bf16-kahan": 22}
"""Bytes of temporaries per element of a chunk by rounding scheme, as a rehearsal counts them: fp32 values."""
_RANDOM_CHUNK_BYTES = 32  # the same in the other schemes, with the words of random bits


class MuonSpec(OptimizerSpec[MuonConfig]):
    """Muon: one momentum for elements of hidden matrices, AdamW's moments for all others."""

    update_bytes = 24.0  # reads weight, gradient, momentum (fp32); writes momentum, direction and weight

    def state_dtypes(self, hidden_matrix: bool) -> dict[str, torch.dtype]:
        if not hidden_matrix:
            return self._adamw.state_dtypes(hidden_matrix)
        mode = MODES[self.mode]
        return {"momentum": mode.moments} | ({} if mode.compensation is None else {"compensation": mode.compensation})

    @property
    def matrix_dtype(self) -> torch.dtype | None:
        return MODES[self.mode].compute

    def matrix_flops(self, rows: int, columns: int) -> float:
        m, n = sorted((rows, columns))
        # A step multiplies (m, n) by (n, m), (m, m) by (m, m), and (m, m) by (m, n).
        return float(self.config.ns_steps * 2 * m * m * (2 * n + m))

    def matrix_bytes(self, rows: int, columns: int) -> float:
        m, n = sorted((rows, columns))
        # The next iterate, and two products of the smaller side.
        return float(MODES[self.mode].compute.itemsize * (m * n + 2 * m * m))

    def element_bytes(self, elements: int) -> float:
        mode = MODES[self.mode]
        if mode.weights == torch.bfloat16:
            # fp32 temporaries of a chunk; with fp32 weights, a direction that is then rounded.
            scheme = rounding_of(self.mode, (self.config.momentum, self.config.momentum), self.in_hardware)
            return float(min(elements, _CHUNK) * _CHUNK_BYTES.get(scheme, _RANDOM_CHUNK_BYTES))
        return float(elements * mode.weights.itemsize if mode.compute != mode.weights else 0)

    def kernel(self, device: torch.device) -> str:
        dtype = backend_of(device).product_dtype(MODES[self.mode].compute)
        return f"Newton-Schulz in {str(dtype).removeprefix('torch.')}; else {self._adamw.kernel(device)}"

    def build(
        self, parameters: Sequence[LocalParameter], seed: int = 0, matrices: WholeMatrices | None = None
    ) -> Optimizer:
        hidden = [each for each in parameters if each.layout.is_hidden_matrix]
        others = [each for each in parameters if not each.layout.is_hidden_matrix]
        adamw = self._adamw.build(others, seed)
        return Muon(hidden, adamw, self, seed, matrices or LocalMatrices())

    @property
    def _adamw(self) -> AdamWSpec:
        return AdamWSpec(self.config, self.mode, self.in_hardware)


class Muon(Optimizer):
    """Muon of hidden matrices, and another optimizer of the other parameters, as one optimizer.

    ``param_groups`` has the matrices first, then the groups of the other optimizer, with which it shares its state.
    ``step`` is collective if matrices are sharded.
    """

    def __init__(
        self,
        matrices: Sequence[LocalParameter],
        adamw: Optimizer,
        spec: MuonSpec,
        seed: int,
        access: WholeMatrices,
    ) -> None:
        config, mode = spec.config, spec.mode
        self._matrices, self._adamw, self._config, self._access = matrices, adamw, config, access
        self.state_names, self._own_names = spec.state_names, tuple(spec.state_dtypes(hidden_matrix=True))
        self._mode = MODES[mode]
        self._own = {id(each.parameter) for each in matrices}
        self._indices = {each.name: index for index, each in enumerate(matrices)}
        self._is_bf16 = self._mode.weights == torch.bfloat16
        self._rounding = rounding_of(mode, (config.momentum, config.momentum), spec.in_hardware)
        self._streams = RoundingStreams(matrices, seed, mode)
        groups = scaled_groups(matrices, config, weight_decay=config.weight_decay)
        # A rank may have no matrices.
        super().__init__(as_torch(groups) or [{"params": []}], {"lr": config.lr})
        self._count = len(self.param_groups)
        self._group_of = {each.name: index for index, (members, _) in enumerate(groups) for each in members}
        self.param_groups += adamw.param_groups

    def init_state(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._own:
            self._create_zeros(parameter, self._own_names)
        else:
            self._share_state()
            self._adamw.init_state(parameter)

    def allocate_state(self) -> None:
        super().allocate_state()
        self._adamw.allocate_state()
        if self._is_bf16:
            self._streams.allocate()

    @torch.no_grad()
    def scale_gradients(self, scale: torch.Tensor) -> None:
        scale_in_place([each.parameter for each in self._matrices], scale)
        self._share_state()
        self._adamw.scale_gradients(scale)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self._evaluate(closure)
        self.allocate_state()
        self._adamw.step()
        steps = [self.state[each.parameter][STEP] for each in self._matrices]
        torch._foreach_add_(steps, 1)
        keys_2N = self._streams.keys(torch.stack(steps)) if self._is_bf16 else None
        for batch in self._access.batches(self._matrices):
            directions = [self._direction(each, keys_2N) for each in batch]
            self._access.transform(batch, directions, lambda _, matrix: orthogonalize(matrix, self._config.ns_steps))
            for each, update in zip(batch, directions, strict=True):
                self._apply(each, update, keys_2N)
            del directions, update  # before the next batch needs as much memory
        return loss

    def _share_state(self) -> None:
        # Before each use: both may have been replaced, as by loading a checkpoint.
        self._adamw.state, self._adamw.param_groups = self.state, self.param_groups[self._count :]

    def _direction(self, parameter: LocalParameter, keys_2N: torch.Tensor | None) -> torch.Tensor:
        """Update the momentum of a parameter; return the direction to orthogonalize, a new local tensor."""
        momentum, gradient = local(self.state[parameter.parameter]["momentum"]), parameter.gradient
        assert gradient is not None, "every hidden matrix has a gradient"
        beta = self._config.momentum
        if keys_2N is not None:
            return self._bf16_direction(parameter, momentum, gradient, keys_2N)
        gradient = gradient.to(momentum.dtype)
        momentum.lerp_(gradient, 1 - beta)
        direction = gradient.lerp(momentum, beta) if self._config.nesterov else momentum.clone()
        narrow = self._mode.compute != self._mode.weights
        return direction.to(self._mode.compute) if narrow else direction

    def _bf16_direction(
        self, parameter: LocalParameter, momentum: torch.Tensor, gradient: torch.Tensor, keys_2N: torch.Tensor
    ) -> torch.Tensor:
        # In fp32, a chunk of lines at a time, which bounds the temporaries.
        direction, beta = torch.empty_like(momentum), self._config.momentum
        addresses = self._streams.addresses[self._indices[parameter.name]]
        lines = [addresses.view_lines(tensor) for tensor in (momentum, gradient.contiguous(), direction)]
        for chunk in _chunks(addresses.count, addresses.length):
            kept, here, out = (tensor[chunk] for tensor in lines)
            wide, values = kept.float(), here.float()
            wide = wide + (values - wide) * (1 - beta)
            out.copy_(values + (wide - values) * beta if self._config.nesterov else wide)
            # As in adamw_reference: the long schemes round moments stochastically.
            is_nearest = self._rounding in ("bf16", "bf16-kahan")
            at = addresses.slice_lines(chunk.start, chunk.stop)
            kept.copy_(rounded(wide, None if is_nearest else random_bits(at, keys_2N)[1]))
        return direction

    def _apply(self, parameter: LocalParameter, update: torch.Tensor, keys_2N: torch.Tensor | None) -> None:
        """Decay the local weights of a parameter and subtract the update, scaled matrix by matrix."""
        group = self.param_groups[self._group_of[parameter.name]]
        decay, scales = group["lr"] * group["weight_decay"], self._scales(parameter, group["lr"])
        if keys_2N is not None:
            self._bf16_apply(parameter, update, decay, scales, keys_2N)
            return
        weight = parameter.tensor.mul_(1 - decay)
        for block in parameter.row_blocks():
            rows = zip(parameter.row_views(block, weight), parameter.row_views(block, update), strict=True)
            for target, source in rows:
                target.add_(source, alpha=-scales[block.name])

    def _bf16_apply(
        self,
        parameter: LocalParameter,
        update: torch.Tensor,
        decay: float,
        scales: dict[str, float],
        keys_2N: torch.Tensor,
    ) -> None:
        addresses = self._streams.addresses[self._indices[parameter.name]]
        compensation = self.state[parameter.parameter].get("compensation")
        weights, updates = addresses.view_lines(parameter.tensor), addresses.view_lines(update)
        errors = None if compensation is None else addresses.view_lines(local(compensation))
        scale_L = update.new_empty(addresses.count, dtype=torch.float32)
        for block in parameter.row_blocks():
            for run in parameter.row_views(block, scale_L):
                run.fill_(scales[block.name])
        for chunk in _chunks(addresses.count, addresses.length):
            wide = weights[chunk].float()
            change = wide * decay + updates[chunk].float() * scale_L[chunk].unsqueeze(1)
            at = addresses.slice_lines(chunk.start, chunk.stop)
            bits = random_bits(at, keys_2N)[0] if self._rounding == "bf16-sr" else None
            if errors is not None:
                bits = compensation_bits(at, keys_2N)
            subtract(weights[chunk], wide, change, None if errors is None else errors[chunk], bits)

    def _scales(self, parameter: LocalParameter, rate: float) -> dict[str, float]:
        """Return the factor of the update of each canonical matrix, learning rate included."""
        shapes = self._access.shapes(parameter)
        return {name: rate * _RMS * math.sqrt(max(shape)) for name, shape in shapes.items()}


def _chunks(lines: int, length: int) -> list[slice]:
    count = max(1, _CHUNK // max(1, length))
    return [slice(start, min(start + count, lines)) for start in range(0, lines, count)]


def orthogonalize(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Move singular values near 1 by Newton-Schulz iterations, keeping the singular vectors; overwrites ``matrix``.

    Five steps bring singular values above 0.002 of the Frobenius norm to between 0.65 and 1.25; zero stays zero.
    """
    a, b, c = COEFFICIENTS
    dtype = backend_of(matrix.device).product_dtype(matrix.dtype)
    # The products of the smaller side are cheaper.
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype)
    # In bf16 the sum of squares would stop growing.
    norm = torch.linalg.vector_norm(x, dtype=torch.promote_types(dtype, torch.float32))
    x.div_(norm.clamp(min=_SMALLEST_NORM))
    # Allocated once: the iterations reuse these.
    other, gram = torch.empty_like(x), x.new_empty(x.shape[0], x.shape[0])
    square = torch.empty_like(gram)
    for _ in range(steps):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=square)
        torch.addmm(x, square, x, beta=a, out=other)
        x, other = other, x
    return (x.T if is_tall else x).to(matrix.dtype)
