"""Build AdamW with two parameter groups, with and without weight decay, and access its state.

    local parameters, optimizer section, precision mode --build_optimizer--> torch's AdamW or Bf16AdamW

Matrices and embeddings are decayed. Norm weights and biases are decayed only with ``optimizer.decay_norms``, as HLAT
did; its paper found little difference.
"""

from collections.abc import Sequence

import torch

from hlat.config.sections import OptimizerConfig
from hlat.model import LocalParameter, local
from hlat.optim.adamw_bf16 import Bf16AdamW
from hlat.precision import MODES
from hlat.runtime.backend import backend_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(
    parameters: Sequence[LocalParameter], config: OptimizerConfig, mode: str = "fp32", seed: int = 0
) -> torch.optim.Optimizer:
    """Build AdamW for the local parameters of a process.

    Its state does not exist before the first step. ``set_learning_rate`` sets the rate of a step.

    Args:
        parameters: the local parameters; bf16 in precision modes with bf16 weights.
        config: learning rate, betas, eps, weight decay.
        mode: precision mode. Modes with bf16 weights use ``Bf16AdamW``, others torch's AdamW, with the fused kernel if
            the device has one.
        seed: seed of stochastic rounding.
    """
    matrices = [each for each in parameters if each.parameter.ndim >= 2]
    vectors = [each for each in parameters if each.parameter.ndim < 2]
    groups = [(matrices, config.weight_decay), (vectors, config.weight_decay if config.decay_norms else 0.0)]
    groups = [(members, decay) for members, decay in groups if members]
    if MODES[mode].weights == torch.bfloat16:
        return Bf16AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, mode=mode, seed=seed)
    return torch.optim.AdamW(
        [{"params": [each.parameter for each in members], "weight_decay": decay} for members, decay in groups],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=all(backend_of(each.parameter.device).fused_adamw for each in parameters),
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def allocate_state(optimizer: torch.optim.Optimizer, parameters: Sequence[LocalParameter]) -> None:
    """Allocate all state that the first step would allocate, unless it exists."""
    if isinstance(optimizer, Bf16AdamW):
        optimizer.allocate_state()
    else:
        for each in parameters:
            _init_torch_state(optimizer, each.parameter)


def state_tensors(
    optimizer: torch.optim.Optimizer, parameters: Sequence[LocalParameter]
) -> dict[str, list[torch.Tensor]]:
    """Return the state tensors, without the step counter: by name, a local tensor per parameter, in order.

    State that does not exist before the first step is created: zeros.
    """
    names = optimizer.state_names if isinstance(optimizer, Bf16AdamW) else _MOMENTS
    for each in parameters:
        if isinstance(optimizer, Bf16AdamW):
            optimizer.init_state(each.parameter)
        else:
            _init_torch_state(optimizer, each.parameter)
    return {name: [local(optimizer.state[each.parameter][name]) for each in parameters] for name in names}


def _init_torch_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Create the state of a parameter as torch's AdamW does at its first step, unless it exists."""
    state = optimizer.state[parameter]
    if state:
        return
    group = next(group for group in optimizer.param_groups if any(member is parameter for member in group["params"]))
    device = parameter.device if group["fused"] or group["capturable"] else "cpu"
    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    for name in _MOMENTS:
        state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
