"""Choice and code of what computes a tensor: C for the processor, Triton on GPUs, oneDNN, or torch.

pointwise operations, loss: are the kernels usable? --yes--> operators ``torch.ops.hlat`` (library.py) --> kernels
                                                    --no---> the formulas in torch of pointwise.py and loss.py
attention.py, matmul.py: the same for attention and for matrix products
"""
