"""Processes of a run that no supervisor of hlat watches, as under torchrun and srun: they watch themselves."""

from hlat.launch.unsupervised.watch import watching_itself

__all__ = ["watching_itself"]
