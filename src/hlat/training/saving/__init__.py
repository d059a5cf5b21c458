"""Saving: when to save, rollback, the check of replicas, exports while training; losses beside their forecast."""
