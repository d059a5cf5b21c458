"""A file that a process appends to for months, under a name that others may give to another file meanwhile.

    name --> the open file: append
         --> no file, or an empty one (removed, renamed, rotated): write the content back under the name, then append
         --> another file (an editor's copy): append to that

Names are looked up in the folder that was opened, wherever that is moved: another folder in its place is left alone.
"""

import os
import stat
from pathlib import Path

_COPIED_BYTES = 1 << 20
_MOST_VAIN = 2


class AppendedFile:
    """An open file in an existing folder. Closing it twice is harmless.

    Args:
        path: the file; created if it does not exist.
        restores: write its content back if it was moved; otherwise a new file begins.

    Attributes:
        descriptor: descriptor of the file, for reading and appending, the same number until ``close``; then -1.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, restores: bool = True) -> None:
        self._name, self._restores = path.name, restores
        self._vain = 0  # follows in a row that did not find the file that they opened
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.descriptor = self._open()
        except OSError:
            os.close(self._folder)
            raise

    def follow(self) -> str:
        """Open the file under the name if it is another one; return ``written back`` or ``another file``, else nothing.

        A file that cannot be opened or written back is not followed, nor one of a file system that never gives a file
        the same identity twice. Another file with content may lack what was appended while a program made it.
        """
        if self._vain == _MOST_VAIN or self._is_in_place():
            return ""
        is_empty = self._size_in_place() == 0
        try:
            if self._restores and is_empty:
                self._write_back()
            new = self._open()
        except OSError:
            return ""
        os.dup2(new, self.descriptor, inheritable=False)
        os.close(new)
        self._vain = 0 if self._is_in_place() else self._vain + 1
        return "written back" if is_empty else "another file"

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes; return how many were written."""
        return os.write(self.descriptor, content)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self.descriptor

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            os.close(self._folder)
            self.descriptor = -1

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._name, flags, 0o644, dir_fd=self._folder)

    def _is_in_place(self) -> bool:
        opened = os.fstat(self.descriptor)
        if not stat.S_ISREG(opened.st_mode):
            return True
        try:
            found = os.stat(self._name, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # a file system that does not answer
        return os.path.samestat(found, opened)

    def _size_in_place(self) -> int:
        try:
            return os.stat(self._name, dir_fd=self._folder).st_size
        except FileNotFoundError:
            return 0

    def _write_back(self) -> None:
        """Copy the content to a new file, which then gets the name: a crash leaves all of it or nothing."""
        copy = f".{self._name}.{os.getpid()}.tmp"
        new = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644, dir_fd=self._folder)
        try:
            offset = 0
            while content := os.pread(self.descriptor, _COPIED_BYTES, offset):
                offset += os.write(new, content)
            os.fsync(new)
            os.rename(copy, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            os.unlink(copy, dir_fd=self._folder)
            raise
        finally:
            os.close(new)
