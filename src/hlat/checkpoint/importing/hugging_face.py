"""Hugging Face folders: config.json and safetensors files."""

from pathlib import Path

from hlat.checkpoint.importing.base import SourceFormat, SourceModel, SourceTensor
from hlat.config import ModelConfig
from hlat.model import LazyTensors, read_hf, read_special_ids
from hlat.runtime.errors import CheckpointError
from hlat.runtime.storage.hub import TOKENIZER_FILES


class HuggingFaceFolder(SourceFormat):
    """A folder that transformers loads; pickled weights are refused."""

    name = "a Hugging Face model"
    signs = "config.json and *.safetensors"

    def recognises(self, folder: Path) -> bool:
        return (folder / "config.json").is_file()

    def open(self, folder: Path, config: ModelConfig | None) -> SourceModel:
        if config is not None:
            raise CheckpointError(f"{folder}: its config.json says which model it is; leave out --model.")
        fields, tensors = read_hf(folder)
        special, generation = read_special_ids(folder)
        return SourceModel(
            ModelConfig.model_validate(fields),
            {name: _source_tensor(tensors, name) for name in tensors},
            tokenizer_files_in(folder),
            special,
            generation,
        )


def _source_tensor(tensors: LazyTensors, name: str) -> SourceTensor:
    return SourceTensor(tensors.header(name), lambda: tensors[name])


def tokenizer_files_in(folder: Path) -> dict[str, Path]:
    """Find the tokenizer's files in a Hugging Face folder, by file name."""
    found = {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}
    return {file.name: file for file in found}
