"""Further copies of a run's state: snapshots on local disks, and checkpoints in an object store."""
