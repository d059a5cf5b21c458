"""Import the weights of another program, as a checkpoint of hlat.

    folder --find_format--> SourceFormat --open--> SourceModel
                                                       --tensor by tensor--> checkpoint of weights and tokenizer, dtypes
                                                                             unchanged

To add a format: a file with a ``SourceFormat`` (see ``base.py``), and its line in ``SOURCE_FORMATS``.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hlat.checkpoint.format.filesystem import NEW_FOLDER_REMEDY, Disk, check_new_folder
from hlat.checkpoint.format.tensor_files import ComputedChunk
from hlat.checkpoint.importing.base import SourceFormat, SourceModel, SourceTensor
from hlat.checkpoint.importing.nxd import NxdShards
from hlat.checkpoint.importing.torchtitan import TorchtitanCheckpoint
from hlat.checkpoint.protocol.commit import CheckpointContent, commit
from hlat.checkpoint.saved_run import TOKENIZER, software_versions
from hlat.checkpoint.state import MODEL
from hlat.config import ModelConfig, model_section
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


SOURCE_FORMATS: tuple[SourceFormat, ...] = (HuggingFaceFolder(), NxdShards(), TorchtitanCheckpoint())


def find_format(folder: Path) -> SourceFormat:
    """Return the first format that recognises a folder; CheckpointError if none does."""
    for source in SOURCE_FORMATS:
        if folder.is_dir() and source.recognises(folder):
            return source
    reason = "nothing in it is recognised as a model" if folder.is_dir() else "no such folder"
    known = "; ".join(f"{source.name} ({source.signs})" for source in SOURCE_FORMATS)
    raise CheckpointError(f"{folder}: {reason}. hlat imports {known}.")


def import_model(
    source: str | Path, out_dir: str | Path, *, model: str | Path | None = None, tokenizer: str | Path | None = None
) -> Path:
    """Convert a model of any known format to a checkpoint of its weights, dtypes unchanged; return its folder.

    ``model`` is a preset or config.json, for formats that do not describe their model. ``tokenizer`` replaces the
    source's own: a tokenizer.json, a SentencePiece model, or a folder with one of them.

    Raises:
        RecipeError: hlat does not support this model, or there is no such preset.
        CheckpointError: the format is not known, files are missing or damaged, or ``out_dir`` is not empty.
        StorageError: a file-system operation failed; nothing is left behind.
    """
    source_format = find_format(Path(source))
    target = Path(out_dir).absolute()
    # Before the source is read, which takes long.
    check_new_folder(target)
    config = None if model is None else model_section(str(model))
    found = source_format.open(Path(source), config)
    tokenizer_files = found.files if tokenizer is None else _tokenizer_files(Path(tokenizer))
    # Read when it is written: a few tensors are in memory at a time, one for each thread that writes.
    chunks = [_chunk(name, tensor) for name, tensor in found.tensors.items()]
    files = {f"{TOKENIZER}/{name}": file for name, file in tokenizer_files.items()}
    # Step 0: weights alone, not the state of a run.
    commit(Disk(), target, CheckpointContent(0, chunks, _meta(found), files), NEW_FOLDER_REMEDY)
    return target


def _meta(found: SourceModel) -> dict[str, Any]:
    meta: dict[str, Any] = {"step": 0, "model": found.config.model_dump(mode="json")}
    # Without ids in the metadata those of the tokenizer are used.
    if found.special is not None and found.generation is not None:
        meta |= {"special_ids": asdict(found.special), "generation_ids": asdict(found.generation)}
    return meta | {"versions": software_versions()}


def _chunk(name: str, tensor: SourceTensor) -> ComputedChunk:
    shape = tuple(tensor.header.shape)
    return ComputedChunk(MODEL + name, shape, (0,) * len(shape), (tensor.header,), compute=tensor.read)


def _tokenizer_files(path: Path) -> dict[str, Path]:
    """Files of a tokenizer that the user named, under the names of checkpoints; CheckpointError if none."""
    files = {path.name: path} if path.is_file() else tokenizer_files_in(path)
    named = {("tokenizer.model" if name.endswith(".model") else name): file for name, file in files.items()}
    if not {"tokenizer.json", "tokenizer.model"} & named.keys():
        raise CheckpointError(
            f"{path}: no tokenizer there. Name a tokenizer.json, a SentencePiece .model, or a folder."
        )
    return named
