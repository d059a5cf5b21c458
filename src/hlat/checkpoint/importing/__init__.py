"""Formats of other programs: Hugging Face folders, shards of NeuronX Distributed, DCP files of torchtitan."""

from hlat.checkpoint.importing.base import SourceFormat, SourceModel, SourceTensor
from hlat.checkpoint.importing.hugging_face import HuggingFaceFolder, tokenizer_files_in
from hlat.checkpoint.importing.table import find_format

__all__ = ["HuggingFaceFolder", "SourceFormat", "SourceModel", "SourceTensor", "find_format", "tokenizer_files_in"]
