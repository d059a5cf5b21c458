"""Asynchronous saving: a staging buffer in shared memory, and a saver process that writes it during training."""
