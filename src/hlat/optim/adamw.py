"""AdamW over parameters, in two groups: decayed and not.

Decayed are matrices and embeddings. Norm weights and biases are decayed only where the recipe says so
(``optimizer.decay_norms``), as HLAT did; its paper found little difference.
"""

from collections.abc import Sequence

import torch

from hlat.config.sections import OptimizerConfig
from hlat.model import LocalParameter, local
from hlat.optim.adamw_bf16 import Bf16AdamW
from hlat.precision import MODES

_MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(
    held: Sequence[LocalParameter], config: OptimizerConfig, mode: str = "fp32", seed: int = 0
) -> torch.optim.Optimizer:
    """AdamW over what a process holds of the parameters.

    Its state does not exist before the first step. The rate of a step is set by ``set_learning_rate``.

    Args:
        held: the parameters; bf16 in the modes whose weights are.
        config: rate, betas, eps, decay.
        mode: the precision mode. In those with bf16 weights it is ``Bf16AdamW``, in the others torch's AdamW, the
            fused kernel where the device has one.
        seed: of stochastic rounding.
    """
    matrices = [one for one in held if one.parameter.ndim >= 2]
    vectors = [one for one in held if one.parameter.ndim < 2]
    groups = [(matrices, config.weight_decay), (vectors, config.weight_decay if config.decay_norms else 0.0)]
    groups = [(ones, decay) for ones, decay in groups if ones]
    if MODES[mode].weights == torch.bfloat16:
        return Bf16AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, mode=mode, seed=seed)
    return torch.optim.AdamW(
        [{"params": [one.parameter for one in ones], "weight_decay": decay} for ones, decay in groups],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=all(one.parameter.device.type in ("cpu", "cuda") for one in held),
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` for the next step, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def allocate_state(optimizer: torch.optim.Optimizer, held: Sequence[LocalParameter]) -> None:
    """Create all that the first step over some parameters would leave in memory; nothing where that has been."""
    if isinstance(optimizer, Bf16AdamW):
        optimizer.allocate_state()
    else:
        for one in held:
            _init_torch_state(optimizer, one.parameter)


def state_tensors(optimizer: torch.optim.Optimizer, held: Sequence[LocalParameter]) -> dict[str, list[torch.Tensor]]:
    """The state of some parameters beside the step: by name, local tensors in the order of ``held``.

    What does not exist before the first step is created as that would: zeros.
    """
    names = optimizer.state_names if isinstance(optimizer, Bf16AdamW) else _MOMENTS
    for one in held:
        if isinstance(optimizer, Bf16AdamW):
            optimizer.init_state(one.parameter)
        else:
            _init_torch_state(optimizer, one.parameter)
    return {name: [local(optimizer.state[one.parameter][name]) for one in held] for name in names}


def _init_torch_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """The state of a parameter as torch's AdamW makes it at its first step; nothing where there is one."""
    state = optimizer.state[parameter]
    if state:
        return
    group = next(group for group in optimizer.param_groups if any(one is parameter for one in group["params"]))
    device = parameter.device if group["fused"] or group["capturable"] else "cpu"
    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    for name in _MOMENTS:
        state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
