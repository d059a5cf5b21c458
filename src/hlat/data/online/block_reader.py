"""Reading of blocks: a block of the block index -> its rows.

The reader of each format is kept, because it may keep what it had to decode or to open for other blocks of a file.
"""

from collections.abc import Iterator

from hlat.data.formats import WHOLE, InputFile, RangeReader, Row, Vocabulary
from hlat.data.online.block_index import FileBlock
from hlat.data.sources import SourceFile
from hlat.runtime import DataError


class BlockReader:
    """Reads blocks.

    Args:
        vocabulary: vocabulary of the tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._readers: dict[str, RangeReader] = {}

    def rows(self, file: SourceFile, block: FileBlock, row: int) -> Iterator[Row]:
        """Yield the rows of a block from its ``row``-th on, counted from the beginning of the block.

        The file is checked for changes at the end of the block, and before a row or the file is reported as damaged.

        Raises:
            DataError: as the format's ``documents``; or the file has changed since it was listed.
        """
        with file.open_local() as local:
            file.check_unchanged()
            with file.as_input(local, self._vocabulary) as opened:
                try:
                    for found_row in self._read_rows(file, opened, block, row):
                        if found_row.error is not None:
                            file.check_unchanged()
                        yield found_row
                except DataError:
                    file.check_unchanged()
                    raise
            file.check_unchanged()

    def _read_rows(self, file: SourceFile, opened: InputFile, block: FileBlock, row: int) -> Iterator[Row]:
        if block.stop == WHOLE:
            return file.format.documents(opened, row)
        if file.format.name not in self._readers:
            self._readers[file.format.name] = file.format.range_reader()
        return self._readers[file.format.name].rows(opened, block.part, row)
