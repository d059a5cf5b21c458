"""The batches of a run: where they come from, and reading them while the step before computes."""

from hlat.training.batches.batch_sources import OnlineSamples, PreparedSamples, Samples
from hlat.training.batches.prefetch import Feed

__all__ = ["Feed", "OnlineSamples", "PreparedSamples", "Samples"]
