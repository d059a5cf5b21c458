"""Processes of a run that no supervisor of hlat watches, as under torchrun and srun: they watch themselves."""
