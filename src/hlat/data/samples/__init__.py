"""Training samples: global sample index -> tokens, a pure function of the data and the seed."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.samples.best_fit import BestFitPlan, fit_documents
    from hlat.data.samples.epoch_order import EpochOrder
    from hlat.data.samples.mixture import Mixture, PhaseWeights
    from hlat.data.samples.permutation import permute
    from hlat.data.samples.row_filling import NO_LABEL, RowSegment, fill_row
    from hlat.data.samples.training_data import Batch, TrainingData, ValidationData
    from hlat.data.samples.weights import is_weighted, phase_weights

__getattr__ = lazily(
    __name__,
    {
        "best_fit": (
            "BestFitPlan",
            "fit_documents",
        ),
        "epoch_order": ("EpochOrder",),
        "row_filling": (
            "NO_LABEL",
            "RowSegment",
            "fill_row",
        ),
        "mixture": (
            "Mixture",
            "PhaseWeights",
        ),
        "permutation": ("permute",),
        "training_data": (
            "Batch",
            "TrainingData",
            "ValidationData",
        ),
        "weights": (
            "is_weighted",
            "phase_weights",
        ),
    },
)

__all__ = [
    "NO_LABEL",
    "Batch",
    "BestFitPlan",
    "EpochOrder",
    "Mixture",
    "PhaseWeights",
    "RowSegment",
    "TrainingData",
    "ValidationData",
    "fill_row",
    "fit_documents",
    "is_weighted",
    "permute",
    "phase_weights",
]
