"""AdamW update of bf16 weights in plain torch, and its random bits: what all kernels reproduce bit for bit.

    LocalParameter --address_elements--> ElementAddresses: the tensor as lines, and the place of each line in the
        canonical tensor
    local parameters, seed, mode --RoundingStreams--> addresses, and keys of the tensors in a step
    w, g, m, v, (c), scalars, keys --update--> w, m, v, (c) in place; g is only read

Random bits are addressed by seed, canonical name, step and position in the canonical tensor. So every optimizer and
every layout draws the same bits for an element. A line is a range of elements of one row of one canonical tensor: a row
of a matrix, or a range of a vector. Element j of a line has column ``column + j`` there. So an element has the same
address in complete, tensor-parallel, sharded and fused parameters, and kernels do not depend on layouts.

Every value is widened to fp32, every operation is rounded to fp32 (IEEE 754, nothing fused or reordered), and the
scalars of an update are computed in float64 and rounded to fp32 once, but for the scale of the gradients, which is
computed in fp32:

    g  = g * scale, rounded to the dtype of the gradient, as if clipping had stored it
    m <- m + (g - m) * (1 - beta1)
    v <- v * beta2 + (g * g) * (1 - beta2)
    u  = w * (lr * decay) + (m / (sqrt(v) * (1 / sqrt(1 - beta2^t)) + eps)) * (lr / (1 - beta1^t))
    w <- w - u

This is AdamW (Loshchilov and Hutter 2019, algorithm 2; ``torch.optim.AdamW``). The moments are used in u before they
are rounded. The rounding scheme decides how w, m and v are rounded to bf16; it depends on the mode and on the betas:

    bf16-sr     all rounded stochastically, each with its own 16 random bits
    bf16        all rounded to nearest even
    bf16-kahan  all to nearest; c keeps the rounding error of w (Zamirai et al. 2020, "Revisiting bfloat16 training"):
                y = c - u;  w' = bf16(w + y);  c <- y - (w' - w), rounded stochastically;  w <- w'
    bf16-long, bf16-kahan-long    w as in bf16 and bf16-kahan, m and v rounded stochastically

The "long" schemes exist because rounding to nearest can make a moment stop changing: a change of less than half a
spacing of bf16 values is lost. A change is 1 - beta of the distance to the gradient (or its square), half a spacing is
2^-9 to 2^-8 of the moment. So a moment can stay wrong by a relative error of up to 2^-8 / (1 - beta). At beta = 0.95
that is 8 % of v, 4 % of its root. Above beta = 1 - 2^-8 there are values from which v never decreases, above 1 - 2^-9
it never does. The long schemes are used if this error is above 1/8. With stochastic rounding the mean is correct for
every beta.

Likewise c, which has up to half a spacing of w, 2^-8 of it: rounded to nearest it would stop changing where u is less
than half a spacing of c, about 2^-18 of w, and change by up to twice u just above that. Rounded stochastically it
changes by u on average, down to the rounding of c - u to fp32, 2^-32 of w.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hlat.model import LocalParameter
from hlat.optim.base import counter_device
from hlat.precision import element_bits, line_bits, step_keys, stochastic_round, stream_keys
from hlat.runtime.backend import torch_private
from hlat.runtime.backend.device import is_on_host
from hlat.runtime.backend.table import backend_of, types_with


@dataclass(frozen=True)
class ElementAddresses:
    """Addresses of the L lines (possibly none) of a local tensor."""

    length: int  # elements of a line
    # rows_L, columns_L: row and column of each line's first element in its canonical tensor, int32; vectors have row 0
    rows_L: torch.Tensor
    columns_L: torch.Tensor
    # canonical tensor of each line, int32: an index into the names of all parameters of the optimizer
    names_L: torch.Tensor

    @property
    def count(self) -> int:
        return self.rows_L.shape[0]

    def view_lines(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(self.count, self.length)

    def slice_lines(self, start: int, stop: int) -> "ElementAddresses":
        rows, columns, names = (table[start:stop] for table in (self.rows_L, self.columns_L, self.names_L))
        return ElementAddresses(self.length, rows, columns, names)


def address_elements(parameter: LocalParameter, first_name: int = 0) -> ElementAddresses:
    """Compute the addresses of a local parameter's elements, on its device; names count from ``first_name``."""
    layout, tensor = parameter.layout, parameter.tensor
    runs = list(layout.runs(parameter.first_row, parameter.first_row + tensor.shape[0]))
    numbers = {canonical.name: first_name + index for index, canonical in enumerate(layout.tensors)}
    matrix = bool(layout.columns)
    # Lines of one length, so that they are a matrix: a row, or what divides all ranges of a vector.
    length = math.prod(layout.columns) if matrix else math.gcd(*(run.count for run in runs)) or 1
    tables: list[torch.Tensor] = [torch.empty(3, 0, dtype=torch.int64)]
    for run in runs:
        if matrix:
            rows = torch.arange(run.canonical_start, run.canonical_start + run.count)
            columns = torch.full_like(rows, layout.first_column)
        else:
            columns = torch.arange(run.canonical_start, run.canonical_start + run.count, length)
            rows = torch.zeros_like(columns)
        assert run.canonical_start + run.count <= 1 << 31 > layout.first_column, "addresses have 32 bits"
        tables.append(torch.stack((rows, columns, torch.full_like(rows, numbers[run.name]))))
    table_3L = torch.cat(tables, dim=1)
    return ElementAddresses(length, *table_3L.to(torch.int32).to(tensor.device).unbind())


_WEIGHTS_PURPOSE = "rounding"  # random stream of bf16-sr
_MOMENTS_PURPOSE = "rounding of moments"  # random stream of the other modes, which round only moments stochastically


class RoundingStreams:
    """Addresses and keys of some parameters, all on one device, computed when first used."""

    def __init__(self, parameters: Sequence[LocalParameter], seed: int, mode: str) -> None:
        self._parameters, self._seed, self._mode = parameters, seed, mode

    def allocate(self) -> None:
        _ = self.addresses, self._keys_2N, self._owners_N

    def keys(self, steps_P: torch.Tensor) -> torch.Tensor:
        """Compute the keys of all canonical tensors in a step: int32 of shape (2, N), on the parameters' device."""
        keys_2N = step_keys(self._keys_2N, steps_P[self._owners_N])
        return keys_2N.to(self._parameters[0].tensor.device, non_blocking=True)

    @functools.cached_property
    def addresses(self) -> list[ElementAddresses]:
        """Addresses of the elements of each parameter."""
        addresses: list[ElementAddresses] = []
        names = 0
        for parameter in self._parameters:
            addresses.append(address_elements(parameter, names))
            names += len(parameter.layout.tensors)
        return addresses

    @functools.cached_property
    def _device(self) -> torch.device:
        return counter_device(self._parameters[0].tensor.device)

    @functools.cached_property
    def _keys_2N(self) -> torch.Tensor:
        names = [canonical.name for each in self._parameters for canonical in each.layout.tensors]
        purpose = _WEIGHTS_PURPOSE if self._mode == "bf16-sr" else _MOMENTS_PURPOSE
        return stream_keys(self._seed, purpose, names, self._device)

    @functools.cached_property
    def _owners_N(self) -> torch.Tensor:
        owners = [index for index, each in enumerate(self._parameters) for _ in each.layout.tensors]
        return torch.tensor(owners, device=self._device)


# Scalars of an update, in the order of the kernels' arguments: decay (lr times weight decay), step_size,
# one_minus_beta1, beta2, one_minus_beta2, inverse_bias2, eps, gradient_scale.

ROUNDINGS = ("bf16-sr", "bf16", "bf16-kahan", "bf16-long", "bf16-kahan-long")
"""Rounding schemes of an update: stochastic, to nearest, compensated (Kahan)."""

_WITH_FLOAT64 = types_with(lambda backend: backend.float64)  # a constant, for torch.compile
_MAX_BETA_TO_NEAREST = 1 - 2.0**-5  # above it, a moment may stay wrong by more than 1/8: 2^-8 / (1 - beta)
_CHUNK = 1 << 15  # elements at a time: temporaries fit into the cache, and torch starts no threads for so few
_DEVICE_CHUNK = 1 << 22  # on a device every operation is launched: few launches, and temporaries of 16 MiB
_MOST_GRAPHS = 256  # one for each shape of a chunk; torch's own limit of 8 is for graphs that should not vary


@dataclass(frozen=True)
class Operands:
    """Operands of an update for one parameter; matrices are (L, length), contiguous."""

    weight: torch.Tensor  # weight, exp_avg, exp_avg_sq: bf16, updated in place
    gradient: torch.Tensor  # bf16 or fp32
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    compensation: torch.Tensor | None  # bf16, updated in place; None except in the mode bf16-kahan
    scalars: torch.Tensor  # fp32, in the order above
    addresses: ElementAddresses

    def slice_lines(self, start: int, stop: int) -> "Operands":
        return replace(
            self,
            weight=self.weight[start:stop],
            gradient=self.gradient[start:stop],
            exp_avg=self.exp_avg[start:stop],
            exp_avg_sq=self.exp_avg_sq[start:stop],
            compensation=None if self.compensation is None else self.compensation[start:stop],
            addresses=self.addresses.slice_lines(start, stop),
        )


Kernel = Callable[[Sequence[Operands], torch.Tensor, str], None]
"""Updates parameters, given operands, int32 keys (2, N) of the canonical tensors in this step, and a scheme."""


def rounding_of(mode: str, betas: tuple[float, float], in_hardware: bool = False) -> str:
    """Return the rounding scheme of a precision mode with bf16 weights, for these betas."""
    if in_hardware:
        return "bf16"  # plain conversions, which the device rounds stochastically
    # Moments with large betas are never rounded to nearest: see the head of this module.
    if mode == "bf16-sr" or max(betas) <= _MAX_BETA_TO_NEAREST:
        return mode
    return f"{mode}-long"


def update(
    parameters: Sequence[Operands],
    keys_2N: torch.Tensor,
    rounding: str,
    update_chunk: Callable[[Operands, torch.Tensor, str], None] | None = None,
) -> None:
    """Update parameters, a chunk of lines at a time."""
    update_chunk = update_chunk or update_lines
    for operands in parameters:
        count = operands.addresses.count
        lines = max(1, (_CHUNK if is_on_host(operands.weight) else _DEVICE_CHUNK) // operands.addresses.length)
        for start in range(0, count, lines):
            chunk = operands if lines >= count else operands.slice_lines(start, start + lines)
            update_chunk(chunk, keys_2N, rounding)


def compiled_update(device: torch.device) -> Kernel:
    """Return ``update`` with one graph per shape of a chunk, compiled for the device."""
    graph = torch.compile(
        update_lines,
        backend=backend_of(device).compile_backend,
        dynamic=False,
        fullgraph=True,
        **torch_private.most_graphs(_MOST_GRAPHS),
    )
    return functools.partial(update, update_chunk=graph)


def update_lines(operands: Operands, keys_2N: torch.Tensor, rounding: str) -> None:
    """Update some lines, with fp32 temporaries of their size."""
    decay, step_size, one_minus_beta1, beta2, one_minus_beta2, inverse_bias2, eps, scale = operands.scalars.unbind()
    weight, gradient = operands.weight.float(), operands.gradient
    # Rounded as if clipping had stored the gradient.
    gradient = (gradient.float() * scale).to(gradient.dtype).float()
    exp_avg, exp_avg_sq = operands.exp_avg.float(), operands.exp_avg_sq.float()
    exp_avg = exp_avg + (gradient - exp_avg) * one_minus_beta1
    exp_avg_sq = exp_avg_sq * beta2 + (gradient * gradient) * one_minus_beta2
    denominator = square_root(exp_avg_sq) * inverse_bias2 + eps
    change = weight * decay + (exp_avg / denominator) * step_size
    bits = (None, None, None) if rounding in ("bf16", "bf16-kahan") else random_bits(operands.addresses, keys_2N)
    operands.exp_avg.copy_(rounded(exp_avg, bits[1]))
    operands.exp_avg_sq.copy_(rounded(exp_avg_sq, bits[2]))
    # The moments use their own bits: three roundings of an element are independent.
    of_weight = bits[0] if rounding == "bf16-sr" else None
    if operands.compensation is not None:
        of_weight = compensation_bits(operands.addresses, keys_2N)
    subtract(operands.weight, weight, change, operands.compensation, of_weight)


def rounded(values: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
    """Round fp32 values to bf16: stochastically with random bits, else to nearest even."""
    return values.to(torch.bfloat16) if bits is None else stochastic_round(values, bits)


def subtract(
    target: torch.Tensor,
    weight: torch.Tensor,
    change: torch.Tensor,
    compensation: torch.Tensor | None,
    bits: torch.Tensor | None,
) -> None:
    """Subtract an fp32 change from bf16 weights, in place; ``weight`` is the same in fp32."""
    # The bits are of the compensation if there is one, else of the weights; None rounds to nearest.
    if compensation is None:
        target.copy_(rounded(weight - change, bits))
        return
    # Kahan summation.
    change = compensation.float() - change
    nearest = (weight + change).to(torch.bfloat16)
    compensation.copy_(rounded(change - (nearest.float() - weight), bits))
    target.copy_(nearest)


def square_root(values: torch.Tensor) -> torch.Tensor:
    """Compute the correctly rounded square root of fp32 values, as IEEE 754 defines it."""
    # torch.sqrt of fp32 is off by the last bit for every sixth value if MKL computes it. The float64 root is close
    # enough: the root of a 24-bit number is never nearer than 2^-50 to the middle of two fp32 values. Devices without
    # float64 round their fp32 root correctly themselves.
    return values.double().sqrt().float() if values.device.type in _WITH_FLOAT64 else values.sqrt()


def random_bits(addresses: ElementAddresses, keys_2N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three sets of 16 random bits for every element, (L, length) each."""
    return element_bits(*_place(addresses, keys_2N))


def compensation_bits(addresses: ElementAddresses, keys_2N: torch.Tensor) -> torch.Tensor:
    """Return 16 random bits for the compensation of every element, (L, length)."""
    return line_bits(*_place(addresses, keys_2N))


def _place(
    addresses: ElementAddresses, keys_2N: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    first, second = keys_2N.index_select(1, addresses.names_L).unsqueeze(2)
    offsets = torch.arange(addresses.length, dtype=torch.int32, device=keys_2N.device)
    return (first, second), addresses.rows_L.unsqueeze(1), addresses.columns_L.unsqueeze(1) + offsets
