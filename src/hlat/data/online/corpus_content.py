"""Content of the source files of a run that tokenizes while training: compared as read, and recorded completely.

    block --bytes of it--> pages --ContentRecord--> the same as before, or a DataError with the file
    files --a thread of low priority--> all pages recorded, or compared if the stamp of the file has changed

The part of a file that has a block is not known in Arrow, Megatron and compressed files: only the thread compares them,
so that the first batch does not wait until a large file has been read, by each process that reads blocks of it.
Files of object stores are compared as they are read only: their version is compared whenever they are fetched.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from hlat.data.formats.ranges import FileRange
from hlat.data.formats.records import InputFile
from hlat.data.sources.source_file import SourceFile
from hlat.data.stores.content_record import ContentRecord

CONTENT_FILE = "corpus.content"
_PAGE = 1 << 20
_REMEDY = "Restore the file, or start a new run with another run.dir and data.prepared_dir."


class CorpusContent:
    """Content of the files of a corpus.

    Args:
        files: the files.
        folders: folders with a record each; what one of them knows is compared with.
        fingerprint: that of the prepared data.
    """

    def __init__(self, files: Sequence[SourceFile], folders: Iterable[Path], fingerprint: str) -> None:
        self._files = files
        self._parts = parts = [part for file in files for part in file.files]
        self._numbers = {id(part): number for number, part in enumerate(parts)}
        places = [folder / CONTENT_FILE for folder in folders]
        self._record = ContentRecord(places, [(part.path, part.size) for part in parts], _PAGE, fingerprint, _REMEDY)

    def check(self, file: SourceFile, opened: InputFile, part: FileRange, end: int = 0) -> int:
        """Compare or record what a range of a file is read from.

        Args:
            file: the file.
            opened: the same, opened.
            part: the range.
            end: byte after the last row that begins in it; 0 if it is not known yet.

        Returns:
            The end of the bytes that were compared.

        Raises:
            DataError: the content differs from that of an earlier reading.
        """
        number, found = self._number(file), file.format.bytes_of(opened, part)
        if found is None:  # left to ``complete``
            return file.size
        start, stop = found[0], max(end, file.size if found[1] is None else found[1])
        for first, last in ((start, stop), (0, 1), (file.size - 1, file.size)):  # the ends say how the rest is read
            self._record.check(number, opened.path, max(first, 0), last)
        return stop

    def complete(self, worker: int = 0, workers: int = 1, budget: float = float("inf")) -> None:
        """Compare or record all of the local files, or as many as ``budget`` bytes allow.

        Those that were recorded come first: they may be another text by now. A file is not read if its stamp is the
        same as when it was recorded or compared last.

        Args:
            worker: number of the process; each one takes other files.
            workers: number of processes.
            budget: bytes.

        Raises:
            DataError: the content of a file differs, or it cannot be read.
        """
        own = [part for file in self._files[worker::workers] for part in file.files if part.cached_store is None]
        numbers = sorted(map(self._number, own), key=lambda number: not self._record.is_complete(number))
        for number in numbers:
            if (budget := budget - self._parts[number].size - (_PAGE >> 4)) >= 0:
                self._record.complete(number, Path(self._parts[number].path))

    def incomplete(self) -> list[SourceFile]:
        """Return the local files of which not all has been recorded."""
        local = (part for part in self._parts if part.cached_store is None)
        return [part for part in local if not self._record.is_complete(self._number(part))]

    def close(self) -> None:
        """Close the record."""
        self._record.close()

    def _number(self, file: SourceFile) -> int:
        return self._numbers[id(file)]
