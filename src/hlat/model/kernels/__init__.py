"""Pointwise operations and the loss, compiled from C for the processor or by Triton for GPUs; attention in C.

are the kernels usable for this tensor? --yes--> operators ``torch.ops.hlat`` (library.py) --> kernels
--no---> the formulas in torch of pointwise.py and loss.py, torch's attention
"""
