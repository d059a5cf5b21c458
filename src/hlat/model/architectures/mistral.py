"""Mistral (arXiv 2310.06825): the blocks of LLaMA, with attention to the last ``model.sliding_window`` tokens only.

The window is part of the mask of attention within documents (``hlat.model.document_attention``), which all kernels,
context parallelism and generation use.
"""

from hlat.model.architectures.base import Architecture, NormPlace, decoder_block
from hlat.model.architectures.llama import llama_spec

MISTRAL = Architecture(llama_spec, decoder_block, NormPlace.INPUT)
