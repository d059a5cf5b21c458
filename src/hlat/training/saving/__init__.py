"""Saving the state of a run: checkpoints, snapshots and exports, the corruption check before them, rollback to them."""
