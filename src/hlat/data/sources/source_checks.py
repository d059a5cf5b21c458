"""How the files of a source are read, and which of them may be a source together.

What cannot be meant is refused here, before anything is hashed: text beside records in a folder, tokens beside text in
a source, tokens where no tokenizer says what they mean.
"""

from collections.abc import Sequence
from pathlib import Path

from hlat.data.formats import MEGATRON, TEXT, file_type
from hlat.data.stores import url_file_name
from hlat.runtime import DataError, is_url


def path_file_type(path: str) -> str:
    """How a file is read; refused with its whole URL, if it has one, since several may have the same name.

    Raises:
        DataError: an ending that is known not to be text.
    """
    if not is_url(path):
        return file_type(Path(path))
    name = Path(url_file_name(path))
    try:
        return file_type(name)
    except DataError as error:
        raise DataError(str(error).replace(str(name), path, 1)) from error


def check_folder(path: str, files: Sequence[str]) -> None:
    """Raise DataError if a folder mixes text files with others, so that which of them are meant is not clear."""
    texts = [file for file in files if path_file_type(file) == TEXT]
    if texts and len(texts) < len(files):
        record = next(file for file in files if path_file_type(file) != TEXT)
        text, other = (Path(url_file_name(file)) for file in (texts[0], record))
        raise DataError(
            f"{path}: the folder mixes text files ({text}) with {path_file_type(record)} files ({other}), so "
            f"which are the corpus is not clear. Name them with a glob such as {path.rstrip('/')}/**/*{other.suffix}"
        )


def check_source(path: str, files: Sequence[str]) -> None:
    """Raise DataError if a source has tokens and text, whose lengths cannot be added up, or a file of no known kind."""
    tokens = [file for file in files if path_file_type(file) == MEGATRON]
    if tokens and len(tokens) < len(files):
        other = next(file for file in files if path_file_type(file) != MEGATRON)
        raise DataError(
            f"{path}: tokens ({tokens[0]}) and {path_file_type(other)} files ({other}) in one source. Make them two of "
            "data.sources, each named with a glob."
        )


def check_tokenizer_given(tokens: str, tokenizer: str | None) -> None:
    """Raise DataError if there is a file of tokens, and no tokenizer is given that they are of."""
    if tokenizer is None:
        raise DataError(
            f"{tokens}: its documents are tokens, and data.tokenizer.path names no tokenizer: one that is trained here "
            "would give the ids other meanings. Set data.tokenizer.path to the tokenizer that the dataset was written "
            "with: tokenizer.json, a SentencePiece .model, or the folder of one."
        )
