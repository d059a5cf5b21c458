"""Qwen3 (arXiv 2505.09388): the blocks of LLaMA, with norms of every query and key head before rotation.

The norms are ``model.qk_norm``, which is always true for this architecture; biases (``model.qkv_bias``) are optional.
"""

from hlat.model.architectures.base import Architecture, NormPlace, decoder_block
from hlat.model.architectures.llama import llama_spec

QWEN3 = Architecture(llama_spec, decoder_block, NormPlace.INPUT)
