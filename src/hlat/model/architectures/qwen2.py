"""Qwen2 (arXiv 2407.10671): the blocks of LLaMA, with biases of queries, keys and values.

The biases are ``model.qkv_bias``, which is always true for this architecture.
"""

from hlat.model.architectures.base import Architecture, NormPlace, decoder_block
from hlat.model.architectures.llama import llama_spec

QWEN2 = Architecture(llama_spec, decoder_block, NormPlace.INPUT)
