"""Checks of the files of a source, made before hashing, which may take hours.

Refused are: a folder that mixes text files with record files, a source that mixes tokens with text, and tokens without
a tokenizer.
"""

from collections.abc import Sequence
from pathlib import Path

from hlat.data.formats.base import FileFormat
from hlat.data.formats.columns.base import ColumnKind
from hlat.data.formats.registry import format_of
from hlat.data.sources.source_file import SourceFile
from hlat.data.stores.remote import url_file_name
from hlat.runtime.errors import DataError
from hlat.runtime.urls import is_url


def path_format(path: str, column: ColumnKind) -> FileFormat:
    """Return the format of a local or remote file; errors name the full URL, as several files may have the same name.

    Args:
        path: its path or URL.
        column: kind of the column that its source names.

    Raises:
        DataError: hlat does not read files of this type.
    """
    if not is_url(path):
        return format_of(Path(path), column)
    name = Path(url_file_name(path))
    try:
        return format_of(name, column)
    except DataError as error:
        raise DataError(str(error).replace(str(name), path, 1)) from error


def check_folder(path: str, files: Sequence[SourceFile]) -> None:
    """Check that a folder does not mix text files with record files.

    Raises:
        DataError: it does, so it is not clear which files are the corpus.
    """
    texts = [file for file in files if file.format.is_one_document]
    if texts and len(texts) < len(files):
        record = next(file for file in files if not file.format.is_one_document)
        text, other = (Path(url_file_name(file.path)) for file in (texts[0], record))
        raise DataError(
            f"{path}: the folder mixes text files ({text}) with {record.format.kind} files ({other}), so it "
            f"is not clear which are the corpus. Name them with a glob such as {path.rstrip('/')}/**/*{other.suffix}"
        )


def check_source(path: str, files: Sequence[SourceFile]) -> None:
    """Check that a source does not mix tokens with text, whose lengths cannot be added.

    Raises:
        DataError: it does.
    """
    tokens = [file for file in files if file.format.holds_tokens]
    if tokens and len(tokens) < len(files):
        other = next(file for file in files if not file.format.holds_tokens)
        raise DataError(
            f"{path}: tokens ({tokens[0].path}) and {other.format.kind} files ({other.path}) in one source. Make them "
            "two entries of data.sources, each with a glob."
        )


def check_tokenizer_given(tokens: str, tokenizer: str | None) -> None:
    """Check that a recipe with a file of tokens names their tokenizer.

    Args:
        tokens: path of the file of tokens.
        tokenizer: data.tokenizer.path.

    Raises:
        DataError: it does not.
    """
    if tokenizer is None:
        raise DataError(
            f"{tokens}: its documents are tokens, but data.tokenizer.path is not set. A tokenizer trained by hlat "
            "would give the ids other meanings. Set data.tokenizer.path to the tokenizer that the dataset was written "
            "with: a tokenizer.json, a SentencePiece .model, or the folder of one."
        )
