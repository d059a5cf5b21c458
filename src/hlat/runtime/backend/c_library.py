"""Shared libraries that a process compiles from C for the processor that it runs on, and the cache that keeps them.

    source file --the cache of this user has it------------------------------------------------> ctypes --> this process
                --the machine's C compiler, a second--> shared library --into the cache----------------|
                --begin_compiling: the same in the background--|       --no cache: a private folder---|

    source files, command, compiler's version, processor --key--> ~/.cache/hlat/kernels/NAME-KEY.so
    a process that compiles --lock of the key--> the others on this host wait for its library

A file of the cache ends with the hash of what is before it: one that a power loss has left half-written is never
loaded. Where there is no safe place (no home folder, one that is read-only or in which others can write), there is no
cache. A private folder is removed once its library is loaded.
"""

import ctypes
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from hlat.runtime.backend.code_folders import open_code_folder
from hlat.runtime.errors import LaunchError

CPUINFO = Path("/proc/cpuinfo")
_IDENTITY = (
    *("vendor_id", "cpu family", "model", "stepping", "flags"),
    *("Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),  # of Arm
)
_DIGEST_BYTES = hashlib.sha256().digest_size
_WAIT_SECONDS, _POLL_SECONDS = 60.0, 0.05  # longer than a compiler takes on a busy machine
_KEPT = 32  # libraries, last used first: those of some versions of hlat, compilers and processors


class CachedLibrary:
    """A library that is in the cache, or may be put there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    def is_whole(self) -> bool:
        """Return True if the file is there, as it was written."""
        try:
            content = self.path.read_bytes()
        except OSError:
            return False
        is_whole = len(content) > _DIGEST_BYTES and _digest(content[:-_DIGEST_BYTES]) == content[-_DIGEST_BYTES:]
        if is_whole:
            with suppress(OSError):
                # The newest are kept, so one that is used counts as new.
                os.utime(self.path)
        return is_whole

    def lock(self, seconds: float = _WAIT_SECONDS) -> bool:
        """Become the process that compiles it, or wait for the other one; False after so many seconds."""
        deadline = time.monotonic() + seconds
        with suppress(OSError):
            self._lock = self.path.with_suffix(".lock").open("ab")
        while self._lock is not None:
            try:
                # The lock is this process's, not its children's, and ends with it.
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # both mean that another process has it
                if time.monotonic() >= deadline:
                    self.unlock()
                    return False
                time.sleep(_POLL_SECONDS)
            except OSError:
                self.unlock()  # no locks on this file system: every process compiles
            else:
                break
        return True

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def working_folder(self) -> "tempfile.TemporaryDirectory[str]":
        """Make a folder for the compiler, beside the library.

        Raises:
            OSError: it cannot be made.
        """
        prefix = f".{self.path.stem}-"
        if self._lock is not None:  # nobody else is using one
            # Processes that were killed have left theirs.
            for left in self.path.parent.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
        return tempfile.TemporaryDirectory(prefix=prefix, dir=self.path.parent, ignore_cleanup_errors=True)

    def keep(self, built: Path) -> None:
        """Store a library under its name, complete or not at all.

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
    """Return the place of a compiled source file; None if libraries cannot be kept here.

    Raises:
        LaunchError: others can write to the folder: what is there must not be loaded.
        OSError: the compiler or a source file cannot be read.
    """
    folder, processor = _cache_folder(), _processor()
    if folder is None or not processor:
        return None
    open_code_folder(folder)
    if not folder.is_dir():
        return None
    parts = [compiler, " ".join(options), compiler_version(compiler), processor]
    # What a source file includes lies beside it.
    sources = sorted(path for path in source.parent.iterdir() if path.suffix in (".c", ".h"))
    parts += [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in (source, *sources)]
    return CachedLibrary(folder / f"{source.stem}-{_digest(chr(10).join(parts).encode()).hex()[:24]}.so")


def _cache_folder() -> Path | None:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not given.is_absolute():  # the rule of XDG
        with suppress(RuntimeError):
            given = Path.home() / ".cache"
    return given / "hlat" / "kernels" if given.is_absolute() else None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


@functools.cache
def compiler_version(compiler: str) -> str:
    """Return what a compiler, a command with options, says of its version."""
    done = subprocess.run([*compiler.split(), "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.stdout.decode(errors="replace")


@functools.cache
def processor_fields() -> dict[str, str]:
    """Return what the system says of the first processor, by name; empty where it says nothing."""
    found: dict[str, str] = {}
    with suppress(OSError), CPUINFO.open(encoding="utf-8", errors="replace") as file:
        for line in itertools.takewhile(str.strip, file):  # the others are alike, and reading hundreds takes time
            name, _, value = line.partition(":")
            found[name.strip()] = value.strip()
    return found


def _processor() -> str:
    """Describe the processor that code is compiled for; empty where the system does not say."""
    return "\n".join(f"{name}: {value}" for name, value in processor_fields().items() if name in _IDENTITY)


_LOG = logging.getLogger(__name__)
_COMPILERS = ("cc", "gcc", "clang", "c++", "g++", "clang++")
# Fast, but every operation follows IEEE 754: -ffast-math would change the order of sums and flush subnormals.
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


class CompilationFailed(Exception):
    """No C compiler was found, or it failed; the message has the reason."""


def find_c_compiler() -> str | None:
    """Return the compiler's command: the environment's CC, or the first that this machine has."""
    return os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), None)


def _tunings() -> tuple[tuple[str, ...], ...]:
    """Return sets of flags for this processor; the first that the compiler supports is used."""
    # Where torch is told to compute without AVX-512, so does what is compiled.
    restricted = ("-mno-avx512f",) if os.environ.get("ATEN_CPU_CAPABILITY", "").lower() == "avx2" else ()
    return ("-march=native", *restricted), ("-mcpu=native",), ()


def begin_compiling(source: Path, flags: Sequence[str] = ()) -> None:
    """Start to compile, so that ``compile_c_library`` with the same arguments has less to wait for."""
    compiler = find_c_compiler()
    if compiler is None:
        return
    with suppress(OSError, LaunchError):
        # Problems are left to compile_c_library. finish_compiling has to follow soon: others wait for the lock.
        options = (*_FLAGS, *flags, *_tunings()[0])
        cached = cached_library(compiler, options, source)
        if cached is not None and (cached.is_whole() or not cached.lock(0)):
            return
        if cached is not None and cached.is_whole():  # the process that had the lock has just finished
            cached.unlock()
            return
        _BEGUN[source, tuple(flags)] = _Compilation(compiler, options, source, cached)


def finish_compiling() -> None:
    """Wait for the compilers of ``begin_compiling``, and put their libraries into the cache."""
    for begun in _BEGUN.values():
        with suppress(CompilationFailed, OSError):
            begun.finish()


def compile_c_library(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Load a C11 file as a library for this processor, compiled now or before.

    Raises:
        CompilationFailed: there is no compiler, or it refuses the file.
        OSError: the compiler cannot be started, or the library cannot be stored or loaded.
    """
    begun = _BEGUN.pop((source, tuple(flags)), None)
    if begun is not None:
        with suppress(CompilationFailed, OSError):
            return begun.load()
    compiler = find_c_compiler()
    if compiler is None:
        raise CompilationFailed(f"no C compiler: found none of {', '.join(_COMPILERS)}")
    for tuning in _tunings():
        try:
            return _library(compiler, (*_FLAGS, *flags, *tuning), source)
        except CompilationFailed as problem:
            reason = problem
    raise reason


def _library(compiler: str, options: Sequence[str], source: Path) -> ctypes.CDLL:
    try:
        cached = cached_library(compiler, options, source)
    except LaunchError as refusal:
        _LOG.warning("compiled kernels are not kept, so each process compiles them: %s", refusal)
        cached = None
    if cached is not None:
        # A home that is full, or from which nothing may be executed, is no reason to compute with other kernels.
        with suppress(CompilationFailed, OSError):
            if cached.is_whole():
                return ctypes.CDLL(str(cached.path))
            cached.lock()  # or go on without it when the time is over
            try:
                if not cached.is_whole():
                    _Compilation(compiler, options, source, cached).finish()
            finally:
                cached.unlock()
            return ctypes.CDLL(str(cached.path))
    # No cache: a private folder.
    return _Compilation(compiler, options, source, None).load()


class _Compilation:
    """A running compiler, and the folder of its output; OSError if either cannot be made."""

    def __init__(self, compiler: str, options: Sequence[str], source: Path, cached: CachedLibrary | None) -> None:
        self._compiler, self._cached, self._finished = compiler, cached, False
        self._folder = (
            tempfile.TemporaryDirectory(prefix="hlat-", ignore_cleanup_errors=True)
            if cached is None
            else cached.working_folder()
        )
        self._output = Path(self._folder.name) / "native.so"
        command = [*compiler.split(), "-x", "c", *options, str(source), "-o", str(self._output), "-lm"]
        own = os.environ | {"TMPDIR": self._folder.name}  # the usual folder may be full
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=own, process_group=0
            )
        except OSError:
            self._folder.cleanup()
            raise
        # Also when this process ends: finalizers are called newest first, so before the one that removes the folder.
        weakref.finalize(self, _stop, self._process)

    def finish(self) -> None:
        if self._cached is None or self._finished:
            return
        self._finished = True
        try:
            with self._folder:
                self._wait()
                self._cached.keep(self._output)
        finally:
            self._cached.unlock()

    def load(self) -> ctypes.CDLL:
        self.finish()
        if self._cached is not None:
            return ctypes.CDLL(str(self._cached.path))
        with self._folder:
            self._wait()
            return ctypes.CDLL(str(self._output))

    def _wait(self) -> None:
        try:
            _, problems = self._process.communicate()
        finally:
            _stop(self._process)
        if self._process.returncode != 0:
            raise CompilationFailed(f"{self._compiler} failed: {problems.strip()[-500:]}")


def _stop(process: "subprocess.Popen[str]") -> None:
    """End a compiler and the programs that it has started: they write into a folder that is removed next."""
    if process.poll() is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()  # until the last of them has closed its end


_BEGUN: dict[tuple[Path, tuple[str, ...]], _Compilation] = {}  # by source file and flags
"""Compilations in the background, by source file and flags."""
