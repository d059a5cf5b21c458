"""Libraries that this user has compiled on this machine before, so that no other process compiles them again.

    source files, command, compiler's version, processor --key--> ~/.cache/hlat/kernels/NAME-KEY.so
    a process that compiles --lock of the key--> the others on this host wait for its library

A file ends with the hash of what is before it: one that a power loss has left half-written is never loaded. Where there
is no safe place (no home folder, one that is read-only or in which others can write), there is no cache.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hlat.runtime.compiled_code.code_folder import open_code_folder

CPUINFO = Path("/proc/cpuinfo")
_IDENTITY = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU")  # beginnings of lines
_DIGEST_BYTES = hashlib.sha256().digest_size
_WAIT_SECONDS, _POLL_SECONDS = 60.0, 0.05  # longer than a compiler takes on a busy machine
_KEPT = 32  # libraries, last used first: those of some versions of hlat, compilers and processors


class CachedLibrary:
    """A library that is in the cache, or may be put there.

    Attributes:
        path: its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    def is_whole(self) -> bool:
        """Return True if the file is there, as it was written; it then counts as new, because somebody uses it."""
        try:
            content = self.path.read_bytes()
        except OSError:
            return False
        is_whole = len(content) > _DIGEST_BYTES and _digest(content[:-_DIGEST_BYTES]) == content[-_DIGEST_BYTES:]
        if is_whole:
            with suppress(OSError):
                os.utime(self.path)
        return is_whole

    def lock(self, seconds: float = _WAIT_SECONDS) -> bool:
        """Become the process that compiles it, or wait while another one does; False after so many seconds.

        The lock belongs to this process, not to its children, and ends with it. Without locks on the file system every
        process compiles.
        """
        deadline = time.monotonic() + seconds
        with suppress(OSError):
            self._lock = self.path.with_suffix(".lock").open("ab")
        while self._lock is not None:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # both mean that another process has it
                if time.monotonic() >= deadline:
                    self.unlock()
                    return False
                time.sleep(_POLL_SECONDS)
            except OSError:
                self.unlock()
            else:
                break
        return True

    def unlock(self) -> None:
        """Let other processes go on."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock within the block, if it can be had in time."""
        self.lock()
        try:
            yield
        finally:
            self.unlock()

    def working_folder(self) -> "tempfile.TemporaryDirectory[str]":
        """Make a folder for the compiler, beside the library. Those of processes that were killed are removed.

        Raises:
            OSError: it cannot be made.
        """
        prefix = f".{self.path.stem}-"
        if self._lock is not None:  # nobody else is using one
            for left in self.path.parent.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
        return tempfile.TemporaryDirectory(prefix=prefix, dir=self.path.parent, ignore_cleanup_errors=True)

    def keep(self, built: Path) -> None:
        """Store a library from the working folder under its name, complete or not at all.

        Raises:
            OSError: it cannot be stored.
        """
        content = built.read_bytes()
        built.write_bytes(content + _digest(content))  # a loader ignores what follows the sections
        built.replace(self.path)
        with suppress(OSError):  # another process removes old ones, too: the rest can wait
            libraries = sorted(self.path.parent.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
            for old in libraries[_KEPT:]:
                old.unlink(missing_ok=True)
                old.with_suffix(".lock").unlink(missing_ok=True)


def cached_library(compiler: str, options: Sequence[str], source: Path) -> CachedLibrary | None:
    """Return the place of what a compiler makes of a source file; None if libraries cannot be kept here.

    Args:
        compiler: its command.
        options: its options, without the names of files.
        source: the source file; what it includes lies beside it.

    Raises:
        LaunchError: others can write to the folder: what is there must not be loaded.
        OSError: the compiler cannot be started, or a source file cannot be read.
    """
    folder, processor = _folder(), _processor()
    if folder is None or not processor:
        return None
    open_code_folder(folder)
    if not folder.is_dir():
        return None
    parts = [compiler, " ".join(options), _compiler_version(compiler), processor]
    sources = sorted(path for path in source.parent.iterdir() if path.suffix in (".c", ".h"))
    parts += [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in (source, *sources)]
    return CachedLibrary(folder / f"{source.stem}-{_digest(chr(10).join(parts).encode()).hex()[:24]}.so")


def _folder() -> Path | None:
    """Folder of the cache in the home of this user; None if there is no such home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not given.is_absolute():  # the rule of XDG
        with suppress(RuntimeError):
            given = Path.home() / ".cache"
    return given / "hlat" / "kernels" if given.is_absolute() else None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


@functools.cache
def _compiler_version(compiler: str) -> str:
    """Text by which a compiler names itself and its version."""
    done = subprocess.run([*compiler.split(), "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.stdout.decode(errors="replace")


@functools.cache
def _processor() -> str:
    """Describe the processor for which a compiler makes code here; empty where the system does not say."""
    lines: list[str] = []
    with suppress(OSError), CPUINFO.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                break  # the next processors are of the same kind, and reading hundreds of them takes time
            if line.startswith(_IDENTITY) and not line.startswith("model name"):
                lines.append(line.strip())
    return "\n".join(lines)
