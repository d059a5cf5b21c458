"""Samples: a global index becomes tokens, a pure function of the data and the seed."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.samples.best_fit import Fitted, fit
    from hlat.data.samples.epoch_order import Turns
    from hlat.data.samples.mixture import Mixture, Shares
    from hlat.data.samples.permutation import permute
    from hlat.data.samples.row_filling import NO_LABEL, Part, fill_row
    from hlat.data.samples.training_data import Batch, TrainingData, ValidationData
    from hlat.data.samples.weights import is_weighted, phases_of

__getattr__ = lazily(
    __name__,
    {
        "best_fit": (
            "Fitted",
            "fit",
        ),
        "epoch_order": ("Turns",),
        "row_filling": (
            "NO_LABEL",
            "Part",
            "fill_row",
        ),
        "mixture": (
            "Mixture",
            "Shares",
        ),
        "permutation": ("permute",),
        "training_data": (
            "Batch",
            "TrainingData",
            "ValidationData",
        ),
        "weights": (
            "is_weighted",
            "phases_of",
        ),
    },
)

__all__ = [
    "NO_LABEL",
    "Batch",
    "Fitted",
    "Mixture",
    "Part",
    "Shares",
    "TrainingData",
    "Turns",
    "ValidationData",
    "fill_row",
    "fit",
    "is_weighted",
    "permute",
    "phases_of",
]
