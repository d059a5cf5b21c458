"""A record of the content of files accepts the same content, whatever part of the record could not be written."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hlat.data.stores.local_files import ContentRecord
from hlat.runtime.errors import DataError

_PAGE, _PAGES = 64, 5


def _record(tmp_path: Path, *places: str) -> ContentRecord:
    files = [("a file", _PAGE * _PAGES)]
    return ContentRecord([tmp_path / place for place in places], files, _PAGE, "key", "A remedy.")


def _full_disk(fits: Callable[[int], bool]) -> Callable[[int, bytes, int], int]:
    """Return a ``pwrite`` that finds room only for some offsets."""
    write = os.pwrite

    def pwrite(table: int, content: bytes, offset: int) -> int:
        if not fits(offset):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(table, content, offset)

    return pwrite


@pytest.mark.parametrize("lost", [range(_PAGES), range(1), range(2, 4), range(4, 5)])
def test_a_full_disk_makes_no_difference_of_content(
    tmp_path: Path, lost: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stamp of the file was written, and some of its pages were not: they are recorded when they are read again."""
    file = tmp_path / "a"
    file.write_bytes(os.urandom(_PAGE * _PAGES))
    cells = {32 + 8 * page for page in lost}
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", _full_disk(lambda offset: offset not in cells))
        _record(tmp_path, "run").complete(0, file)
    assert not _record(tmp_path, "run").is_complete(0)
    _record(tmp_path, "other").complete(0, file)
    both = _record(tmp_path, "run", "other")
    both.check(0, file)
    both.complete(0, file)
    assert _record(tmp_path, "run").is_complete(0)
    content = bytearray(file.read_bytes())
    content[_PAGE * lost[0]] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="the content of the file has changed: it differs within bytes"):
        _record(tmp_path, "run").complete(0, file)
