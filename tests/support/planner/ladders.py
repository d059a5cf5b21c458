"""Ladders whose runs end at the losses of a known law."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hlat.config import ModelConfig
from hlat.forecast import CHINCHILLA, Ladder, LadderRun, LawFit, ScalingLaw, SizeKind, model_sizes, write_ladder
from hlat.planner.problem.loss_law import LadderLaw

SEQUENCE = 2048


def ladder_of_law(kind: SizeKind = "flops", law: ScalingLaw = CHINCHILLA) -> Ladder:
    """Runs of 6 sizes on 4 numbers of tokens each, without noise."""
    runs = []
    for width, layers in ((128, 4), (192, 6), (256, 8), (384, 8), (512, 10), (640, 12)):
        model = ModelConfig(vocab_size=32000, layers=layers, hidden_size=width, intermediate_size=3 * width,
                            heads=width // 64, max_sequence_length=SEQUENCE)  # fmt: skip
        sizes = model_sizes(model, SEQUENCE)
        for ratio in (5, 20, 80, 320):
            tokens = int(ratio * sizes["flops"])
            loss = law.loss(sizes[kind], tokens)
            runs.append(LadderRun(f"{width}-{ratio}", sizes, tokens, loss, ((1.0, loss),)))
    return Ladder(tuple(runs), {"data.sequence_length": SEQUENCE})


def write_law(folder: Path, kind: SizeKind = "flops") -> Path:
    """Write such a ladder, and return its folder."""
    write_ladder(folder, ladder_of_law(kind))
    return folder


def law_of_fits(kind: SizeKind, *samples: ScalingLaw) -> LadderLaw:
    """The law that a plan asks, of a ladder whose fit is CHINCHILLA, and whose samples are given."""
    fit = LawFit(CHINCHILLA, samples or (CHINCHILLA,), 0.0)
    ladder: Any = SimpleNamespace(kind=kind, fit=fit, runs=(), conditions={})
    return LadderLaw(ladder, Path("ladder"))
