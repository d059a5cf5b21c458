"""Read a source as preparation does, without tokenizing it: list it, look at its first bytes, read its documents."""

from pathlib import Path

from hlat.config.sections.data import DataConfig
from hlat.data.corpus_files import list_files
from hlat.data.prepare.corpus import Corpus, read_rows
from hlat.data.prepare.work_units import CorpusPosition
from hlat.data.source_listing import check_first_bytes
from hlat.runtime.errors import DataError


def read_source(path: Path | str, folder: Path, **section: object) -> list[object]:
    """Return the documents of a source in order, without null and empty ones.

    Args:
        path: the source.
        folder: folder of the cache.
        section: further fields of the data section.

    Raises:
        DataError: as preparation would, for a bad row too.
    """
    config = DataConfig.model_validate({"path": str(path), "tokenizer": {"vocab_size": 300}, **section})
    files = list_files(config, folder)
    check_first_bytes(files, config.unreadable_rows)
    corpus, documents = Corpus(files, range(len(files)), config.unreadable_rows), list[object]()
    bad_rows = corpus.new_bad_row_counter()
    for row in read_rows(corpus, CorpusPosition()):
        bad_rows.add(1, row.unreadable(1))
        if row.content is not None and len(row.content):
            documents.append(row.content)
    bad_rows.finish()
    return documents


def verdict(path: Path | str, folder: Path, **section: object) -> list[object] | str:
    """Return the documents of a source, or the message with which it is refused."""
    try:
        return read_source(path, folder, **section)
    except DataError as error:
        return str(error)
