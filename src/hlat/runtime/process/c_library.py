"""Shared libraries that a process compiles from C for the processor that it runs on.

    source file --the machine's C compiler, a second--> shared library in a private folder --ctypes--> this process
                --begin_compiling: the same in the background--|

The folder is removed once the library is loaded: no file left on a disk is ever executed, and none that was compiled
for another processor is found.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

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

    Problems are left to that call.
    """
    compiler = find_c_compiler()
    if compiler is not None:
        with suppress(OSError):
            _BEGUN[source, tuple(flags)] = _Compilation(compiler, source, flags, _tunings()[0])


def compile_c_library(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile a source file for this processor and load it.

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
            return _Compilation(compiler, source, flags, tuning).load()
        except CompilationFailed as problem:
            reason = problem
    raise reason


class _Compilation:
    """A running compiler, and the folder of its output.

    Raises:
        OSError: the compiler cannot be started, or there is no place for the folder.
    """

    def __init__(self, compiler: str, source: Path, flags: Sequence[str], tuning: Sequence[str]) -> None:
        self._compiler = compiler
        self._folder = tempfile.TemporaryDirectory(prefix="hlat-", ignore_cleanup_errors=True)
        self._output = Path(self._folder.name) / "native.so"
        command = [*compiler.split(), "-x", "c", *_FLAGS, *flags, *tuning, str(source), "-o", str(self._output), "-lm"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        except OSError:
            self._folder.cleanup()
            raise

    def load(self) -> ctypes.CDLL:
        """Wait for the compiler and load the library; the folder is removed.

        Raises:
            CompilationFailed: the compiler refused the file.
            OSError: the library cannot be loaded.
        """
        with self._folder:
            _, problems = self._process.communicate()
            if self._process.returncode != 0:
                raise CompilationFailed(f"{self._compiler} failed: {problems.strip()[-500:]}")
            return ctypes.CDLL(str(self._output))


_BEGUN: dict[tuple[Path, tuple[str, ...]], _Compilation] = {}
