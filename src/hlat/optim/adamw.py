"""AdamW with two parameter groups, with and without weight decay.

    local parameters, optimizer section, precision mode --AdamWSpec.build--> Fp32AdamW (torch's) or Bf16AdamW
    gradients, step, learning rate, seed --Bf16AdamW.step--> weights, moments, in one pass over memory
        device --kernel_for--> C on CPUs, Triton on GPUs, else the reference in torch

Matrices and embeddings are decayed. Norm weights and biases are decayed only with ``optimizer.decay_norms``, as HLAT
did; its paper found little difference.

``Bf16AdamW`` is for bf16 weights and moments, in the precision modes bf16-sr, bf16 and bf16-kahan. The same gradients
give the same bits in one process and with any sharding: the update of an element depends on that element only, and its
random bits on its index in the canonical tensor (``adamw_reference.py``, ``precision.py``). The host never
waits for the device: step counters, and the scalars and keys that follow from them, are computed on the device, or on
the host where the device has no float64.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hlat.config import AdamWFields
from hlat.model import LocalParameter, local
from hlat.optim import adamw_reference as reference
from hlat.optim.adamw_reference import Kernel, Operands, RoundingStreams, rounding_of
from hlat.optim.base import (
    STEP,
    Optimizer,
    OptimizerSpec,
    WholeMatrices,
    as_torch,
    counter_device,
    scaled_groups,
    without_tracing,
)
from hlat.optim.cpu_kernels import native_kernel
from hlat.precision import MODES
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import in_fake_world

_LOG = logging.getLogger(__name__)
_EXPONENT_BITS = 24  # bits of a step counter: float32 represents integers up to 2**24

Squares = tuple[torch.Tensor, torch.Tensor]


class Bf16AdamW(Optimizer):
    """AdamW with bf16 weights and state; ``hlat.optim.adamw_reference`` defines the computation.

    The state of a parameter is ``step``, a float32 scalar, and tensors like the parameter, named by ``state_names``.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[LocalParameter], dict[str, float]]],
        *,
        betas: tuple[float, float],
        mode: str,
        seed: int,
        in_hardware: bool = False,
    ) -> None:
        """Create the optimizer of groups of parameters, each with its options; without state."""
        self._in_hardware = in_hardware  # then values are only converted, and the device rounds them stochastically
        self._parameters = [each for members, _ in groups for each in members]
        assert all(each.parameter.dtype == torch.bfloat16 for each in self._parameters), (
            f"the weights of {mode} are bf16"
        )
        self._mode, self._streams = mode, RoundingStreams(self._parameters, seed, mode)
        self._squares: dict[float, Squares] = {}  # by beta, where the counters are
        self._gradient_scale: torch.Tensor | None = None  # of the next step; None for 1
        self.state_names = ("exp_avg", "exp_avg_sq") + (("compensation",) if mode == "bf16-kahan" else ())
        super().__init__(as_torch(groups), {"betas": betas})

    def init_state(self, parameter: torch.Tensor) -> None:
        self._create_zeros(parameter, self.state_names)

    def allocate_state(self) -> None:
        super().allocate_state()
        for beta in {beta for group in self.param_groups for beta in group["betas"]}:
            # Tables too: a rehearsal counts all memory of the first step.
            self._squares_of(beta)
        self._streams.allocate()

    def scale_gradients(self, scale: torch.Tensor) -> None:
        self._gradient_scale = scale  # the update reads the gradients anyway

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self._evaluate(closure)
        self.allocate_state()
        scale, self._gradient_scale = self._gradient_scale, None
        with_gradient = [index for index, each in enumerate(self._parameters) if each.gradient is not None]
        if not with_gradient:
            return loss
        steps_P = self._count_step(with_gradient)
        keys_2N = self._streams.keys(steps_P)
        scalars = _add_column(self._scalars(steps_P).to(self._device, non_blocking=True), scale).unbind()
        rounding = rounding_of(self._mode, self.param_groups[0]["betas"], self._in_hardware)
        self._kernel([self._operands(index, scalars[index]) for index in with_gradient], keys_2N, rounding)
        return loss

    def _count_step(self, with_gradient: Sequence[int]) -> torch.Tensor:
        steps = [self.state[each.parameter]["step"] for each in self._parameters]
        # On the device, and all counters are read there: the host never waits.
        torch._foreach_add_([steps[index] for index in with_gradient], 1)
        return torch.stack(steps)

    def _operands(self, index: int, scalars: torch.Tensor) -> Operands:
        parameter, addresses = self._parameters[index], self._streams.addresses[index]
        moments = {
            name: addresses.view_lines(local(self.state[parameter.parameter][name])) for name in self.state_names
        }
        assert parameter.gradient is not None, "step() checked this"
        return Operands(
            weight=addresses.view_lines(parameter.tensor),
            gradient=addresses.view_lines(parameter.gradient.contiguous()),
            exp_avg=moments["exp_avg"],
            exp_avg_sq=moments["exp_avg_sq"],
            compensation=moments.get("compensation"),
            scalars=scalars,
            addresses=addresses,
        )

    def _scalars(self, steps_P: torch.Tensor) -> torch.Tensor:
        # Those of adamw_reference.py but for the last, (P, 7): in float64 where the counters are, rounded to fp32 once.
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
            self._squares[base] = _squares(base, counter_device(self._device))
        return self._squares[base]

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.param_groups]

    @functools.cached_property
    def _device(self) -> torch.device:
        return self._parameters[0].tensor.device

    @functools.cached_property
    def _kernel(self) -> Kernel:
        # Fake tensors have no data. Real kernels allocate a chunk's temporaries at most.
        return _skip_update if in_fake_world() else kernel_for(self._device)


def _add_column(scalars_P7: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    # The scale of the gradients is a column, so that each row has all scalars of a parameter: (P, 8).
    ones_P1 = torch.ones_like(scalars_P7[:, :1])
    return torch.cat((scalars_P7, ones_P1 if scale is None else ones_P1 * scale), dim=1)


def _skip_update(parameters: Sequence[Operands], keys_2N: torch.Tensor, rounding: str) -> None:
    """Kernel of a rehearsal, whose fake tensors have no data. Real kernels allocate a chunk's temporaries at most."""


def kernel_for(device: torch.device) -> Kernel:
    """Return the fastest kernel for a device, compiled if necessary. All kernels give the same bits."""
    return _KERNELS[kernel_name(device)](device) or reference.update


def kernel_name(device: torch.device) -> str:
    """Name of the kernel for a device, a key of the table: the backend's, unless the device cannot run it."""
    backend = backend_of(device)
    return _WITHOUT_COMPILER if backend.compile_obstacle(device) else backend.rounding_kernel


def _triton_kernel(device: torch.device) -> Kernel | None:
    compiler = backend_of(device).compiler
    # Uncompiled the update gives the same bits, slowly: a warning is enough.
    if compiler is not None and not compiler.is_available():
        needed = f"{compiler.package} and Python's header files (python3-dev)"
        _LOG.warning("AdamW over bf16 weights runs uncompiled: Triton's launchers need %s", needed)
        return None
    try:
        from hlat.optim.adamw_triton import update  # noqa: PLC0415  (Triton is installed with CUDA builds only)
    except ImportError as problem:
        _LOG.warning("AdamW over bf16 weights runs uncompiled: Triton cannot be imported: %s", problem)
        return None
    kernel: Kernel = update
    return kernel


_WITHOUT_COMPILER = "torch"
_KERNELS: dict[str, Callable[[torch.device], Kernel | None]] = {
    # rounding_kernel of a backend -> the kernel; None if it cannot be built here
    "c": lambda device: native_kernel(),
    "triton": _triton_kernel,
    "compiled": reference.compiled_update,
    _WITHOUT_COMPILER: lambda device: reference.update,
}


def _power(squares: Squares, exponents: torch.Tensor) -> torch.Tensor:
    """Raise a base, given its ``_squares``, to integer powers (P,) of up to 2**24, in float64."""
    # By multiplications only: the same bits on every device, unlike pow.
    squares_E, shifts_E = squares
    bits_PE = (exponents.to(torch.int64).unsqueeze(1) >> shifts_E) & 1
    factors = torch.where(bits_PE == 1, squares_E, 1.0)
    while factors.shape[1] > 1:
        half = factors.shape[1] // 2
        factors = factors[:, :half] * factors[:, half:]
    return factors.squeeze(1)


def _squares(base: float, device: torch.device) -> Squares:
    """Compute ``base ** (2 ** e)`` for every bit e of an exponent; return these and the e."""
    count = 1 << (_EXPONENT_BITS - 1).bit_length()  # a power of two, so that _power can halve
    squares = [base]
    while len(squares) < count:
        squares.append(squares[-1] * squares[-1])
    return torch.tensor(squares, dtype=torch.float64, device=device), torch.arange(count, device=device)


_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = without_tracing(torch.optim.AdamW.step)


class AdamWSpec(OptimizerSpec[AdamWFields]):
    """AdamW: two moments for every element, and a compensation in the mode bf16-kahan."""

    update_bytes = 30.0  # reads weight, gradient, two moments (fp32); writes three of them and a copy

    def state_dtypes(self, hidden_matrix: bool) -> dict[str, torch.dtype]:
        mode = MODES[self.mode]
        dtypes = dict.fromkeys(_MOMENTS, mode.moments)
        return dtypes if mode.compensation is None else {**dtypes, "compensation": mode.compensation}

    def kernel(self, device: torch.device) -> str:
        backend = backend_of(device)
        if MODES[self.mode].weights == torch.bfloat16:
            return f"AdamW over bf16 weights, kernel {kernel_name(device)}"
        return f"torch's AdamW, {'fused' if backend.fused_adamw else 'foreach'}"

    def build(
        self, parameters: Sequence[LocalParameter], seed: int = 0, matrices: WholeMatrices | None = None
    ) -> Optimizer:
        config = self.config
        groups = scaled_groups(parameters, config, weight_decay=config.weight_decay, eps=config.eps)
        if MODES[self.mode].weights == torch.bfloat16:
            return Bf16AdamW(
                groups,
                betas=config.betas,
                mode=self.mode,
                seed=seed,
                in_hardware=self.in_hardware,
            )
        fused = all(backend_of(each.parameter.device).fused_adamw for each in parameters)
        return Fp32AdamW(
            as_torch(groups),
            betas=config.betas,
            fused=fused,
            foreach=not fused,  # torch's choice on accelerators, and with the same memory in a rehearsal of one
        )


class Fp32AdamW(Optimizer, torch.optim.AdamW):
    """torch's AdamW, over fp32 weights."""

    state_names = _MOMENTS
    # divisor of the gradients of the next step, read by torch's fused kernel; None for 1
    grad_scale: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _STEP(self, closure)
        self.grad_scale = None
        return loss

    def scale_gradients(self, scale: torch.Tensor) -> None:
        devices = [parameter.device for group in self.param_groups for parameter in group["params"] if group["fused"]]
        if devices and backend_of(devices[0]).scales_in_adamw:
            # torch's kernel divides: one more rounding than a product. It still writes the gradients, but does not read
            # them twice.
            divisor = scale.float().reciprocal()
            self.grad_scale = divisor if self.grad_scale is None else self.grad_scale * divisor
        else:
            super().scale_gradients(scale)

    def init_state(self, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        if state:
            return
        group = next(group for group in self.param_groups if any(member is parameter for member in group["params"]))
        # As torch's AdamW does at its first step.
        device = parameter.device if group["fused"] or group["capturable"] else "cpu"
        state[STEP] = torch.zeros((), dtype=torch.float32, device=device)
        for name in _MOMENTS:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
