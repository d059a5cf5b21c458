"""Training batches: their sources, and a prefetcher that reads the next one while a step computes."""

from hlat.training.batches.batch_sources import BatchSource, OnlineBatchSource, PreparedBatchSource
from hlat.training.batches.prefetch import BatchPrefetcher

__all__ = ["BatchPrefetcher", "BatchSource", "OnlineBatchSource", "PreparedBatchSource"]
