"""Load a tokenizer of any kind from its files.

tokenizer.json            json_tokenizer.py   (Hugging Face ``tokenizers``)
SentencePiece .model      sentencepiece.py    (extra ``sentencepiece``)
"""

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from hlat.data.stores.remote import local_path
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.json_tokenizer import read_json_tokenizer
from hlat.runtime.errors import DataError
from hlat.runtime.storage.file_content import recognize
from hlat.runtime.storage.hub import TOKENIZER_FILES, HubError, HubModel
from hlat.runtime.storage.small_files import read_small_file

_NAMES = ("tokenizer.json", "tokenizer.model")
_LARGEST_CONFIG = 1 << 26  # bytes; published ones with many reserved tokens have more than a megabyte


def load_tokenizer(path: str | Path, eos_token: str | None = "auto", *, is_saved: bool = False) -> Tokenizer:
    """Load a tokenizer from a tokenizer.json, a SentencePiece .model, or a folder that contains one of them.

    Args:
        path: the file or folder, or the id of a model of the Hugging Face Hub, whose tokenizer is downloaded once.
        eos_token: name of the end-of-sequence token; "auto" for the tokenizer's own; None for none.
        is_saved: True for the tokenizer of a run, which may be one that cannot be exported.

    Raises:
        DataError: the tokenizer is missing, unreadable, has no such end-of-sequence token, or cannot be exported.
    """
    path = _local_path(path)
    try:
        file = _tokenizer_file(path)
        content = file.read_bytes().removeprefix(BOM_UTF8)
        if found := recognize(content):
            raise DataError(f"{file}: this is {found.what}. {found.remedy}")
        config_file = file.with_name("tokenizer_config.json")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot read the tokenizer: {error}") from error
    config = _read_config(config_file) if file.name in _NAMES and config_file.is_file() else None
    if file.suffix == ".model":
        from hlat.data.tokenizers.sentencepiece import SentencePieceTokenizer  # noqa: PLC0415 - an extra

        return SentencePieceTokenizer(content, config, eos_token, str(file), is_saved)
    if not content:
        raise DataError(f"{file}: the tokenizer file is empty")
    return read_json_tokenizer(content, config, eos_token, str(file))


def load_saved(folder: Path) -> Tokenizer:
    """Load the tokenizer that ``Tokenizer.save`` wrote: the SentencePiece model if there is one, else tokenizer.json.

    Raises:
        DataError: see ``load_tokenizer``.
    """
    model = folder / "tokenizer.model"
    return load_tokenizer(model if model.is_file() else folder, is_saved=True)


def _local_path(path: str | Path) -> Path:
    hub = HubModel.parse(str(path))
    if hub is None:
        return Path(local_path(path))
    try:
        return hub.snapshot(TOKENIZER_FILES)
    except HubError as error:
        raise DataError(f"data.tokenizer.path {path}: {error}. Or set it to null to train a tokenizer.") from error


def _tokenizer_file(path: Path) -> Path:
    if path.is_dir():
        found = [path / name for name in _NAMES if (path / name).is_file()]
        if not found:
            raise DataError(
                f"{path}: no tokenizer here: expected {' or '.join(_NAMES)} in it. Name another, or null to train one."
            )
        return found[0]
    if not path.is_file():
        raise DataError(
            f"{path}: no such tokenizer.{_hub_advice(path)} Check data.tokenizer.path, or set it to null to train one."
        )
    if path.suffix not in (".json", ".model"):
        raise DataError(f"{path}: not a tokenizer: expected tokenizer.json, a SentencePiece .model, or their folder")
    return path


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_small_file(file, _LARGEST_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: cannot read the tokenizer's configuration: {error}. Restore it, or remove it."
        ) from error
    if not isinstance(config, dict):
        raise DataError(f"{file}: a JSON {type(config).__name__}, not an object. Restore the file, or remove it.")
    return config


def _hub_advice(path: Path) -> str:
    """Return how a model of the Hugging Face Hub is named, if this may be meant as one; its id has an owner."""
    if path.suffix or path.is_absolute() or len(path.parts) > 1:
        return ""
    return (
        f" If it is a model of the Hugging Face Hub, its id has an owner, as in openai-community/{path}; for a machine "
        "without network, name a folder made with `hf download OWNER/MODEL --local-dir FOLDER`."
    )
