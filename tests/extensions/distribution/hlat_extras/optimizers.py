"""Lion (Chen et al. 2023, arXiv 2302.06675): the sign of an interpolated momentum."""

import torch


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum, gradient = state["momentum"], parameter.grad
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * torch.sign(beta1 * momentum + (1 - beta1) * gradient))
                momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)
