"""AdamW over bf16 weights and moments, for the precision modes bf16-sr, bf16 and bf16-kahan.

    held parameters, their gradients, step, rate, seed --Bf16AdamW.step--> weights, moments, in one pass over memory

One process and any sharding of many make the same bits of the same gradients: an element's arithmetic is its own, and
its random bits belong to its place in the Hugging Face tensor (``element_addresses``, ``rounding``). The
host never waits for the device: the step is a tensor, and a rate is an argument of a kernel.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hlat.model import LocalParameter, local
from hlat.optim import adamw_reference as reference
from hlat.optim.adamw_cpu import native_kernel
from hlat.optim.adamw_reference import Kernel, Operands, rounding_of
from hlat.optim.element_addresses import ElementAddresses, address_elements
from hlat.precision import step_keys, stream_keys
from hlat.runtime.distributed import in_fake_world

_LOG = logging.getLogger(__name__)
_PURPOSE = "rounding"  # of the random bits in bf16-sr
_PURPOSE_OF_MOMENTS = "rounding of moments"  # in the other modes, which round nothing else so
_EXPONENT_BITS = 24  # of a step: float32 counts no further

Squares = tuple[torch.Tensor, torch.Tensor]


class Bf16AdamW(torch.optim.Optimizer):
    """AdamW whose state between steps is bf16; ``hlat.optim.adamw_reference`` says what it computes.

    The state of a parameter is ``step``, a float32 scalar, and tensors like the parameter, named by ``state_names``. As
    with torch's optimizers it does not exist before the first step, and the rate is that of ``param_groups``.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[LocalParameter], float]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        mode: str,
        seed: int,
    ) -> None:
        """Args:
        groups: parameters, and their weight decay.
        lr, betas, eps: as in ``torch.optim.AdamW``.
        mode: "bf16-sr", "bf16" or "bf16-kahan".
        seed: of the random bits of stochastic rounding.
        """
        self._held = [one for held, _ in groups for one in held]
        assert all(one.parameter.dtype == torch.bfloat16 for one in self._held), f"the weights of {mode} are bf16"
        self._mode, self._seed = mode, seed
        self._squares: dict[float, Squares] = {}  # of each beta, on the device
        self.state_names = ("exp_avg", "exp_avg_sq") + (("compensation",) if mode == "bf16-kahan" else ())
        params = [{"params": [one.parameter for one in held], "weight_decay": decay} for held, decay in groups if held]
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def init_state(self, parameter: torch.Tensor) -> None:
        """Create the state of a parameter, as its first step would; nothing where there is one."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in self.state_names:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def allocate_state(self) -> None:
        """Create all that the first step would leave: the state of every parameter, and tables."""
        for one in self._held:
            self.init_state(one.parameter)
        for beta in {beta for group in self.param_groups for beta in group["betas"]}:
            self._squares_of(beta)
        _ = self._lines, self._keys_2N, self._owners_N

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient, bf16 or fp32."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.allocate_state()
        with_gradient = [index for index, one in enumerate(self._held) if one.gradient is not None]
        if not with_gradient:
            return loss
        steps = [self.state[one.parameter]["step"] for one in self._held]
        torch._foreach_add_([steps[index] for index in with_gradient], 1)
        steps_P = torch.stack(steps)
        keys_2N = step_keys(self._keys_2N, steps_P[self._owners_N])
        scalars_P7 = self._scalars(steps_P)
        rounding = rounding_of(self._mode, self.param_groups[0]["betas"])
        self._kernel([self._operands(index, scalars_P7[index]) for index in with_gradient], keys_2N, rounding)
        return loss

    def _operands(self, index: int, scalars: torch.Tensor) -> Operands:
        held, lines = self._held[index], self._lines[index]
        moments = {name: lines.of(local(self.state[held.parameter][name])) for name in self.state_names}
        assert held.gradient is not None, "asked before"
        return Operands(
            weight=lines.of(held.tensor),
            gradient=lines.of(held.gradient.contiguous()),
            exp_avg=moments["exp_avg"],
            exp_avg_sq=moments["exp_avg_sq"],
            compensation=moments.get("compensation"),
            scalars=scalars,
            lines=lines,
        )

    def _scalars(self, steps_P: torch.Tensor) -> torch.Tensor:
        """``reference.SCALARS`` of every parameter: fp32 of shape (P, 7), from float64."""
        rows = []
        for group, steps in zip(self.param_groups, steps_P.split(self._sizes), strict=True):
            beta1, beta2 = group["betas"]
            ones = torch.ones_like(steps, dtype=torch.float64)
            bias1, bias2 = (1.0 - _power(self._squares_of(beta), steps) for beta in (beta1, beta2))
            columns = [
                ones * (group["lr"] * group["weight_decay"]),
                group["lr"] / bias1,
                ones * (1.0 - beta1),
                ones * beta2,
                ones * (1.0 - beta2),
                1.0 / bias2.sqrt(),
                ones * group["eps"],
            ]
            rows.append(torch.stack(columns, dim=1))
        return torch.cat(rows).to(torch.float32)

    def _squares_of(self, base: float) -> Squares:
        if base not in self._squares:
            self._squares[base] = _squares(base, self._device)
        return self._squares[base]

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.param_groups]

    @functools.cached_property
    def _device(self) -> torch.device:
        return self._held[0].tensor.device

    @functools.cached_property
    def _lines(self) -> list[ElementAddresses]:
        lines: list[ElementAddresses] = []
        names = 0
        for one in self._held:
            lines.append(address_elements(one, names))
            names += len(one.layout.tensors)
        return lines

    @functools.cached_property
    def _keys_2N(self) -> torch.Tensor:
        names = [part.name for one in self._held for part in one.layout.tensors]
        purpose = _PURPOSE if self._mode == "bf16-sr" else _PURPOSE_OF_MOMENTS
        return stream_keys(self._seed, purpose, names, self._device)

    @functools.cached_property
    def _owners_N(self) -> torch.Tensor:
        """The parameter of each name."""
        owners = [index for index, one in enumerate(self._held) for _ in one.layout.tensors]
        return torch.tensor(owners, device=self._device)

    @functools.cached_property
    def _kernel(self) -> Kernel:
        return _nothing if in_fake_world() else kernel_for(self._device)


def _nothing(parameters: Sequence[Operands], keys_2N: torch.Tensor, rounding: str) -> None:
    """The kernel of a rehearsal, whose tensors have nothing that could be written; the others need no memory either."""


def kernel_for(device: torch.device) -> Kernel:
    """The fastest kernel that this machine has for a device; all give the same bits. Compiles what has to be."""
    if device.type == "cpu":
        return native_kernel() or reference.update
    if device.type == "cuda":
        try:
            from hlat.optim.adamw_triton import update  # noqa: PLC0415  (Triton is where CUDA is)
        except ImportError as problem:
            _LOG.warning("AdamW over bf16 weights runs uncompiled: Triton cannot be imported: %s", problem)
        else:
            return update
    return reference.update


def _power(squares: Squares, exponents: torch.Tensor) -> torch.Tensor:
    """A base to some powers, in float64, by multiplications alone: the same bits on every device, unlike ``pow``.

    Args:
        squares: of the base, from ``_squares``.
        exponents: whole numbers up to 2**24, shape (P,), any dtype.
    """
    squares_E, places_E = squares
    bits_PE = (exponents.to(torch.int64).unsqueeze(1) >> places_E) & 1
    factors = torch.where(bits_PE == 1, squares_E, 1.0)
    while factors.shape[1] > 1:
        half = factors.shape[1] // 2
        factors = factors[:, :half] * factors[:, half:]
    return factors.squeeze(1)


def _squares(base: float, device: torch.device) -> Squares:
    """``base ** (2 ** e)`` for every place e of an exponent, and the places; a power of two many."""
    count = 1 << (_EXPONENT_BITS - 1).bit_length()
    squares = [base]
    while len(squares) < count:
        squares.append(squares[-1] * squares[-1])
    return torch.tensor(squares, dtype=torch.float64, device=device), torch.arange(count, device=device)
