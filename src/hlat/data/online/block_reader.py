"""Reading of blocks: a block of the block index -> its rows.

The reader of each format is kept, because it may keep what it had to decode or to open for other blocks of a file.
"""

from collections.abc import Iterator

from hlat.data.formats.document import Vocabulary
from hlat.data.formats.ranges import WHOLE, RangeReader
from hlat.data.formats.records import InputFile, Row
from hlat.data.online.block_index import FileBlock
from hlat.data.online.corpus_content import CorpusContent
from hlat.data.sources.source_file import SourceFile
from hlat.runtime.errors import DataError


class BlockReader:
    """Reads blocks.

    Args:
        vocabulary: vocabulary of the tokenizer.
        content: what is known of the content of the files; None to compare nothing.
    """

    def __init__(self, vocabulary: Vocabulary, content: CorpusContent | None = None) -> None:
        self._vocabulary, self._content = vocabulary, content
        self._readers: dict[str, RangeReader] = {}

    def rows(self, file: SourceFile, block: FileBlock, row: int) -> Iterator[Row]:
        """Yield the rows of a block from its ``row``-th on, counted from the beginning of the block.

        The content of the block is compared before it is read, and, if the file's stamp has changed meanwhile, again at
        its end. Changes of the file are also looked for before a row or the file is reported as damaged.

        Raises:
            DataError: as the format's ``documents``; or the file has changed since it was listed or first read.
        """
        with file.open_local() as local:
            file.check_unchanged()
            with file.as_input(local, self._vocabulary) as opened:
                end = self._compare(file, opened, block)
                try:
                    for found_row in self._read_rows(file, opened, block, row):
                        if found_row.error is not None:
                            file.check_unchanged()
                        end = max(end, found_row.position)
                        yield found_row
                except DataError:
                    file.check_unchanged()
                    raise
                file.check_unchanged()  # first: if it was written a moment ago, this tells what happened
                self._compare(file, opened, block, end)

    def _compare(self, file: SourceFile, opened: InputFile, block: FileBlock, end: int = 0) -> int:
        """Compare the content of a block, and of rows that go on to byte ``end``; return the end of the block."""
        return 0 if self._content is None else self._content.check(file, opened, block.part, end)

    def _read_rows(self, file: SourceFile, opened: InputFile, block: FileBlock, row: int) -> Iterator[Row]:
        if block.stop == WHOLE:
            return file.format.documents(opened, row)
        if file.format.name not in self._readers:
            self._readers[file.format.name] = file.format.range_reader()
        return self._readers[file.format.name].rows(opened, block.part, row)
