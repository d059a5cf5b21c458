"""Training batches: their sources, and a prefetcher that reads the next one while a step computes."""
