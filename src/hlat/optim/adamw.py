"""AdamW with two parameter groups, with and without weight decay.

    local parameters, optimizer section, precision mode --AdamWSpec.build--> Fp32AdamW (torch's) or Bf16AdamW

Matrices and embeddings are decayed. Norm weights and biases are decayed only with ``optimizer.decay_norms``, as HLAT
did; its paper found little difference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hlat.config import OptimizerConfig
from hlat.model import LocalParameter
from hlat.optim.adamw_bf16 import Bf16AdamW, kernel_name
from hlat.optim.base import STEP, Optimizer, OptimizerSpec, WholeMatrices, without_tracing
from hlat.precision import MODES
from hlat.runtime.backend.table import backend_of

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = without_tracing(torch.optim.AdamW.step)


class AdamWSpec(OptimizerSpec[OptimizerConfig]):
    """AdamW: two moments for every element, and a compensation in the mode bf16-kahan."""

    update_bytes = 30.0  # reads weight, gradient, two moments (fp32); writes three of them and a copy

    def state_dtypes(self, hidden_matrix: bool) -> dict[str, torch.dtype]:
        """Return dtypes of moments and compensation, the same for every parameter."""
        mode = MODES[self.mode]
        dtypes = dict.fromkeys(_MOMENTS, mode.moments)
        return dtypes if mode.compensation is None else {**dtypes, "compensation": mode.compensation}

    def kernel(self, device: torch.device) -> str:
        """Name the kernel: of ``Bf16AdamW`` in modes with bf16 weights, else of torch's AdamW."""
        backend = backend_of(device)
        if MODES[self.mode].weights == torch.bfloat16:
            return f"AdamW over bf16 weights, kernel {kernel_name(device)}"
        return f"torch's AdamW, {'fused' if backend.fused_adamw else 'foreach'}"

    def build(
        self, parameters: Sequence[LocalParameter], seed: int = 0, matrices: WholeMatrices | None = None
    ) -> Optimizer:
        """Build ``Bf16AdamW`` in modes with bf16 weights, else torch's AdamW, with the fused kernel if there is one."""
        config = self.config
        groups = decay_groups(parameters, config)
        if MODES[self.mode].weights == torch.bfloat16:
            return Bf16AdamW(
                groups,
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
                mode=self.mode,
                seed=seed,
                in_hardware=self.in_hardware,
            )
        fused = all(backend_of(each.parameter.device).fused_adamw for each in parameters)
        return Fp32AdamW(
            [{"params": [each.parameter for each in members], "weight_decay": decay} for members, decay in groups],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=fused,
            foreach=not fused,  # torch's choice on accelerators, and with the same memory in a rehearsal of one
        )


def decay_groups(
    parameters: Sequence[LocalParameter], config: OptimizerConfig
) -> list[tuple[list[LocalParameter], float]]:
    """Group parameters, matrices first, each group with its weight decay; empty groups are left out."""
    matrices = [each for each in parameters if each.parameter.ndim >= 2]
    vectors = [each for each in parameters if each.parameter.ndim < 2]
    groups = [(matrices, config.weight_decay), (vectors, config.weight_decay if config.decay_norms else 0.0)]
    return [(members, decay) for members, decay in groups if members]


class Fp32AdamW(Optimizer, torch.optim.AdamW):
    """torch's AdamW, over fp32 weights.

    Attributes:
        grad_scale: divisor of the gradients of the next step, read by torch's fused kernel; None for 1.
    """

    state_names = _MOMENTS
    grad_scale: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = _STEP(self, closure)
        self.grad_scale = None
        return loss

    def scale_gradients(self, scale: torch.Tensor) -> None:
        """Multiply the gradients of the next step by a scalar; the fused kernel divides by its reciprocal.

        That is one more rounding than a product, and the kernel still writes the gradients, but does not read them
        twice.
        """
        devices = [parameter.device for group in self.param_groups for parameter in group["params"] if group["fused"]]
        if devices and backend_of(devices[0]).scales_in_adamw:
            divisor = scale.float().reciprocal()
            self.grad_scale = divisor if self.grad_scale is None else self.grad_scale * divisor
        else:
            super().scale_gradients(scale)

    def init_state(self, parameter: torch.Tensor) -> None:
        """Create the state of a parameter as torch's AdamW does at its first step, unless it exists."""
        state = self.state[parameter]
        if state:
            return
        group = next(group for group in self.param_groups if any(member is parameter for member in group["params"]))
        device = parameter.device if group["fused"] or group["capturable"] else "cpu"
        state[STEP] = torch.zeros((), dtype=torch.float32, device=device)
        for name in _MOMENTS:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
