"""Loss of a language model by its size and its training tokens, and the sizes that are best for an amount of compute.

    C = 6 N D FLOPs, L(N, D) = E + A / N^alpha + B / D^beta --optimal_size--> N, D of least loss
                                                     + tokens to be generated --> N, D that train and serve for least

Hoffmann et al. 2022 (arXiv 2203.15556), approach 3, with the constants that Besiroglu et al. 2024 (arXiv 2404.10102)
fitted to the same runs: the published ones were rounded, and their fit had not converged. N counts all parameters. The
runs had up to 16 billion parameters, and MassiveText as data: the loss of other data is another one, but the best size
for an amount of compute changes little. With tokens to be generated: Sardana et al. 2023 (arXiv 2401.00448), equation
2, who also find that at high numbers of tokens per parameter further tokens help less than such a law says.
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
        """Return the loss in nats per token."""
        loss: float = self.irreducible + self.a / parameters**self.alpha + self.b / tokens**self.beta
        return loss

    def optimal_size(self, flops: float, generated: float = 0.0) -> tuple[float, float]:
        """Return the parameters and training tokens that are best for some FLOPs of training.

        Without tokens to be generated, they have the least loss. With them, no other size of that loss takes fewer
        FLOPs for training and generating together. That is where alpha A / N^alpha = (1 + I / (3 D)) beta B / D^beta,
        I being the generated tokens.

        Args:
            flops: FLOPs of the training, 6 N D.
            generated: tokens to be generated over the model's life, prompts included.
        """
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
