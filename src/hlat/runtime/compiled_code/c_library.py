"""Shared libraries that a process compiles from C for the processor that it runs on.

    source file --the cache of this user has it------------------------------------------------> ctypes --> this process
                --the machine's C compiler, a second--> shared library --into the cache----------------|
                --begin_compiling: the same in the background--|       --no cache: a private folder---|

A private folder is removed once its library is loaded.
"""

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hlat.runtime.compiled_code.library_cache import CachedLibrary, cached_library
from hlat.runtime.errors import LaunchError

_LOG = logging.getLogger(__name__)
_COMPILERS = ("cc", "gcc", "clang", "c++", "g++", "clang++")
# Fast, but every operation follows IEEE 754: -ffast-math would change the order of sums and flush subnormals.
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


class CompilationFailed(Exception):
    """No C compiler was found, or it failed; the message has the reason."""


def find_c_compiler() -> str | None:
    """Return the command of the C compiler: the environment's CC, or the first that this machine has; else None."""
    return os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), None)


def _tunings() -> tuple[tuple[str, ...], ...]:
    """Return sets of flags for this processor, of which the first that the compiler supports is used.

    Where torch is told to compute without AVX-512 (its variable ``ATEN_CPU_CAPABILITY``), so does what is compiled.
    """
    restricted = ("-mno-avx512f",) if os.environ.get("ATEN_CPU_CAPABILITY", "").lower() == "avx2" else ()
    return ("-march=native", *restricted), ("-mcpu=native",), ()


def begin_compiling(source: Path, flags: Sequence[str] = ()) -> None:
    """Start to compile a source file, so that ``compile_c_library`` with the same arguments has less to wait for.

    Nothing is started if the library is in the cache, or if another process is compiling it. ``finish_compiling`` has
    to follow soon: other processes wait for it. Problems are left to ``compile_c_library``.
    """
    compiler = find_c_compiler()
    if compiler is None:
        return
    with suppress(OSError, LaunchError):
        options = (*_FLAGS, *flags, *_tunings()[0])
        cached = cached_library(compiler, options, source)
        if cached is not None and (cached.is_whole() or not cached.lock(0)):
            return
        if cached is not None and cached.is_whole():  # the process that had the lock has just finished
            cached.unlock()
            return
        _BEGUN[source, tuple(flags)] = _Compilation(compiler, options, source, cached)


def finish_compiling() -> None:
    """Wait for the compilers that ``begin_compiling`` has started, and put their libraries into the cache."""
    for begun in _BEGUN.values():
        with suppress(CompilationFailed, OSError):
            begun.finish()


def compile_c_library(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Load the library of a source file, compiled for this processor: now, or before by any process of this user.

    Args:
        source: a file in C11.
        flags: additional flags of the compiler.

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
    """Load the library from the cache, after compiling it if it is not there; without a cache from a private folder."""
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
            with cached.locked():
                if not cached.is_whole():
                    _Compilation(compiler, options, source, cached).finish()
            return ctypes.CDLL(str(cached.path))
    return _Compilation(compiler, options, source, None).load()


class _Compilation:
    """A running compiler, and the folder of its output.

    Raises:
        OSError: the compiler cannot be started, or there is no place for the folder.
    """

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
        """Wait for the compiler, and put the library into the cache if there is one.

        Raises:
            CompilationFailed: the compiler refused the file.
            OSError: the library cannot be stored.
        """
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
        """Wait for the compiler and load the library; the folder is removed.

        Raises:
            CompilationFailed: the compiler refused the file.
            OSError: the library cannot be stored or loaded.
        """
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
    """End a compiler, and the programs that it has started: they write into a folder that is removed next."""
    if process.poll() is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()  # until the last of them has closed its end


_BEGUN: dict[tuple[Path, tuple[str, ...]], _Compilation] = {}
"""Compilations in the background, by source file and flags."""
