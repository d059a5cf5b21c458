"""Ladders drawn from a law that is known."""

import numpy as np

from hlat.forecast import Ladder, LadderRun, Observation, ScalingLaw

LAW = ScalingLaw(1.7, 400.0, 900.0, 0.34, 0.31)
SIZES, TOKENS = (5e6, 1.5e7, 5e7, 1.5e8), (1e8, 4e8, 1.6e9, 6.4e9)


def observations(law: ScalingLaw = LAW, noise: float = 0.0, seed: int = 0, shared: float = 0.0) -> list[Observation]:
    """Runs of every size and token count; ``shared`` is the noise that runs of a size have in common."""
    draw = np.random.default_rng(seed)
    by_size = draw.normal(0, shared, len(SIZES)) if shared else np.zeros(len(SIZES))
    return [
        Observation(size, tokens, law.loss(size, tokens) * float(np.exp(draw.normal(0, noise) + common)),
                    f"trunk {size}" if shared else "")
        for size, common in zip(SIZES, by_size, strict=True)
        for tokens in TOKENS
    ]  # fmt: skip


def ladder_of(runs: list[Observation], decay: float = 0.1, embedding: float = 0.0) -> Ladder:
    """Return a ladder of runs whose loss falls by ``decay`` in the logarithm for each e-fold of its tokens."""
    return Ladder(
        tuple(
            LadderRun(
                str(number),
                {"total": run.size + embedding, "non_embedding": run.size, "flops": run.size + embedding / 3},
                int(run.tokens),
                run.loss,
                tuple((f, run.loss * f**-decay) for f in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)),
                run.trunk,
            )
            for number, run in enumerate(runs)
        ),
        {"data.sequence_length": 1024},
    )
