"""The tokenizer that lies in a checkpoint: its ids are what the weights were trained on.

checkpoint/tokenizer/ --load--> Tokenizer --sha256--> compared with the tokenizer of prepared data
"""

from pathlib import Path

from hlat.checkpoint.protocol import read_meta
from hlat.data.prepared import Prepared
from hlat.data.tokenizers import Tokenizer, load_tokenizer
from hlat.runtime import CheckpointError, DataError

TOKENIZER = "tokenizer"  # folder of the tokenizer's files in a checkpoint

_JSON, _PIECES = "tokenizer.json", "tokenizer.model"


def tokenizer_files(source: Path) -> dict[str, Path]:
    """The files of a tokenizer's folder as ``CheckpointStore.save`` takes them: path in the checkpoint -> file."""
    return {f"{TOKENIZER}/{file.name}": file for file in sorted(source.iterdir())}


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint carries a tokenizer that hlat reads."""
    return any((folder / TOKENIZER / name).is_file() for name in (_JSON, _PIECES))


def read_tokenizer(folder: Path, eos_token: str | None = "auto") -> Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        folder: the checkpoint itself.
        eos_token: as for ``load_tokenizer``.

    Raises:
        CheckpointError: it carries none.
        DataError: it is unreadable, or has no such end-of-sequence token.
    """
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder}: has no tokenizer, so that text cannot be turned into tokens: the model it was imported from "
            f"had neither {_JSON} nor {_PIECES}. Put one beside its config.json and run hlat import again."
        )
    return load_tokenizer(_own_file(folder), eos_token)


def check_same_tokenizer(folder: Path, prepared: Prepared) -> None:
    """See that weights know the token ids of prepared data. Nothing can be said where they came without a tokenizer.

    Which token ends a document is a choice of the data and not compared. A SentencePiece model and its conversion
    to tokenizer.json may lie side by side: either may have made the data.

    Args:
        folder: the checkpoint itself, as ``resolve`` gives it.
        prepared: the data.

    Raises:
        DataError: the data was made with another tokenizer.
    """
    files = [folder / TOKENIZER / name for name in (_JSON, _PIECES) if (folder / TOKENIZER / name).is_file()]
    if files and not any(_made(prepared, file) for file in files):
        raise DataError(
            f"{prepared.dir}: was prepared with another tokenizer than the one that the weights in {folder} were "
            f"trained with: its token ids mean other text to them. Prepare the text with "
            f"data.tokenizer.path={folder / TOKENIZER} into another data.prepared_dir."
        )


def _made(prepared: Prepared, file: Path) -> bool:
    try:
        return load_tokenizer(file, prepared.tokenizer.eos_token).sha256 == prepared.manifest.tokenizer_sha256
    except DataError:  # it does not even have that token
        return False


def _own_file(folder: Path) -> Path:
    """Of a run, what its data was made with; of an import, the file that transformers would take."""
    first, second = (_PIECES, _JSON) if "recipe" in read_meta(folder) else (_JSON, _PIECES)
    file = folder / TOKENIZER / first
    return file if file.is_file() else file.with_name(second)
