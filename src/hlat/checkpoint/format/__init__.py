"""File format of checkpoints: the index of tensors, and tensor files read without unpickling."""
