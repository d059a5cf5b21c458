"""Write, verify, list and remove checkpoints, each as a unit: a checkpoint is complete or does not exist."""
