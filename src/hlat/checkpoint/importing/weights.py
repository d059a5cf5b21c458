"""Import the weights of another program, as a checkpoint of hlat.

folder --find_format--> SourceModel --tensor by tensor--> checkpoint of weights and tokenizer, dtypes unchanged
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hlat.checkpoint.format.filesystem import NEW_FOLDER_REMEDY, Disk, check_new_folder
from hlat.checkpoint.format.tensor_files import ComputedChunk
from hlat.checkpoint.importing import find_format
from hlat.checkpoint.importing.base import SourceFormat, SourceModel, SourceTensor
from hlat.checkpoint.importing.hugging_face import HuggingFaceFolder, tokenizer_files_in
from hlat.checkpoint.protocol.commit import CheckpointContent, commit
from hlat.checkpoint.saved_run import TOKENIZER, software_versions
from hlat.checkpoint.state import MODEL
from hlat.config import model_section
from hlat.runtime.errors import CheckpointError


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
    return _import(find_format(Path(source)), Path(source), Path(out_dir), model, tokenizer)


def import_hf(hf_dir: str | Path, out_dir: str | Path) -> Path:
    """Convert a Hugging Face folder with safetensors, with errors as ``import_model``; pickled weights are refused."""
    return _import(HuggingFaceFolder(), Path(hf_dir), Path(out_dir), None, None)


def _import(
    source_format: SourceFormat,
    source: Path,
    out_dir: Path,
    model: str | Path | None,
    tokenizer: str | Path | None,
) -> Path:
    target = out_dir.absolute()
    # Before the source is read, which takes long.
    check_new_folder(target)
    config = None if model is None else model_section(str(model))
    found = source_format.open(source, config)
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
