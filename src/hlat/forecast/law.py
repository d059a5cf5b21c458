"""The law by which the loss of a model falls with its size and its training tokens, and the best size of a compute.

    N parameters, D tokens --loss--> E + A / N^alpha + B / D^beta, nats per token
    FLOPs = 6 N D, tokens that the model will generate --optimal_size--> N, D

Hoffmann et al. 2022 (arXiv 2203.15556), approach 3. A ladder of runs of one's own gives such a law, too (fitting.py).
"""

from dataclasses import dataclass

FLOPS_PER_PARAMETER = 6.0
"""FLOPs of training per parameter and token (attention left out), as the law counts them; of generating, a third."""

_LARGEST_SIZE = 1e14  # parameters; where the search for a size ends


@dataclass(frozen=True)
class ScalingLaw:
    """Constants of L(N, D) = E + A / N^alpha + B / D^beta, in nats per token."""

    irreducible: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        loss: float = self.irreducible + self.a / parameters**self.alpha + self.b / tokens**self.beta
        return loss

    def optimal_size(self, flops: float, generated: float = 0.0) -> tuple[float, float]:
        """Return the parameters and training tokens that are best for some FLOPs of training, 6 N D.

        Without tokens to be generated, they have the least loss. With them (prompts included), no other size of that
        loss takes fewer FLOPs for training and generating together.
        """
        # The optimum is where alpha A / N^alpha = (1 + I / (3 D)) beta B / D^beta, with I generated tokens. The left
        # side falls with N and the right side grows, so halving finds it.
        low, high = 1.0, _LARGEST_SIZE
        while high / low > 1 + 1e-12:
            size = (low * high) ** 0.5
            tokens = flops / FLOPS_PER_PARAMETER / size
            by_size = self.alpha * self.a / size**self.alpha
            by_tokens = (1 + generated / (3 * tokens)) * self.beta * self.b / tokens**self.beta
            low, high = (size, high) if by_size > by_tokens else (low, size)
        return low, flops / FLOPS_PER_PARAMETER / low


CHINCHILLA = ScalingLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""Besiroglu et al. 2024, table 1 (standard errors: A 125, B 1,293, alpha and beta 0.02)."""
