"""The tokenizer stored in a checkpoint, whose token ids the weights were trained on.

checkpoint/tokenizer/ --load--> Tokenizer --sha256--> compared with the tokenizer of prepared data
"""

from collections.abc import Mapping
from pathlib import Path

from hlat.checkpoint.format.filesystem import FileRecord
from hlat.checkpoint.protocol.reader import read_meta
from hlat.data import PreparedData, Tokenizer, load_tokenizer
from hlat.runtime.errors import CheckpointError, DataError

TOKENIZER = "tokenizer"  # folder of the tokenizer's files in a checkpoint

_JSON, _PIECES = "tokenizer.json", "tokenizer.model"


def tokenizer_files(source: Path) -> dict[str, Path]:
    """Map the files of a tokenizer folder for ``CheckpointStore.save``: path in the checkpoint -> file."""
    return {f"{TOKENIZER}/{file.name}": file for file in sorted(source.iterdir())}


def stored_tokenizer_files(folder: Path) -> dict[str, Path]:
    """Map the tokenizer's files of a checkpoint, as ``tokenizer_files`` does; empty if it has none."""
    return tokenizer_files(folder / TOKENIZER) if (folder / TOKENIZER).is_dir() else {}


def differing_tokenizers(files: Mapping[str, FileRecord], others: Mapping[str, FileRecord]) -> bool:
    """True if two checkpoints, given by the files in their manifests, both have a vocabulary, and not the same one."""
    names = [f"{TOKENIZER}/{name}" for name in (_JSON, _PIECES)]
    return any(name in files and name in others and files[name].sha256 != others[name].sha256 for name in names)


def has_tokenizer(folder: Path) -> bool:
    """True if a checkpoint has a tokenizer that hlat can read."""
    return any((folder / TOKENIZER / name).is_file() for name in (_JSON, _PIECES))


def read_tokenizer(folder: Path, eos_token: str | None = "auto") -> Tokenizer:
    """Load the tokenizer of a checkpoint.

    Args:
        folder: folder of the checkpoint.
        eos_token: end-of-sequence token, as for ``load_tokenizer``.

    Raises:
        CheckpointError: the checkpoint has no tokenizer.
        DataError: the tokenizer is unreadable, or has no such end-of-sequence token.
    """
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder}: has no tokenizer, so text cannot be converted to tokens: the model it was imported from had "
            f"neither {_JSON} nor {_PIECES}. Put one of them next to its config.json and run hlat import again."
        )
    return load_tokenizer(_tokenizer_file(folder), eos_token, is_saved=True)


def check_same_tokenizer(folder: Path, prepared: PreparedData) -> None:
    """Check that prepared data has the token ids that weights were trained on; weights without tokenizer pass.

    The end-of-document token is a setting of the data and is not compared. A checkpoint may have both a SentencePiece
    model and its conversion to tokenizer.json; the data may have been prepared with either.

    Args:
        folder: the checkpoint or Hugging Face folder, as returned by ``find_weights``.
        prepared: the prepared data.

    Raises:
        DataError: the data was prepared with another tokenizer.
    """
    place = folder / TOKENIZER if (folder / TOKENIZER).is_dir() else folder  # a Hugging Face folder holds it itself
    files = [place / name for name in (_JSON, _PIECES) if (place / name).is_file()]
    if files and not any(_prepared_with(prepared, file) for file in files):
        raise DataError(
            f"{prepared.dir}: was prepared with another tokenizer than the weights in {folder} were trained with, so "
            f"its token ids mean other text. Prepare the text with "
            f"data.tokenizer.path={place} into another data.prepared_dir."
        )


def _prepared_with(prepared: PreparedData, file: Path) -> bool:
    try:
        stored = load_tokenizer(file, prepared.tokenizer.eos_token, is_saved=True)
        return stored.sha256 == prepared.manifest.tokenizer_sha256
    except DataError:  # it lacks the end-of-sequence token
        return False


def _tokenizer_file(folder: Path) -> Path:
    """Tokenizer file of a checkpoint: the one that a run's data was prepared with, or that transformers would load."""
    first, second = (_PIECES, _JSON) if "recipe" in read_meta(folder) else (_JSON, _PIECES)
    file = folder / TOKENIZER / first
    return file if file.is_file() else file.with_name(second)
