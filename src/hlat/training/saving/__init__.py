"""Saving: when to save, rollback to what was saved, the check of replicas, and exports while training."""
