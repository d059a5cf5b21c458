"""Shared libraries that a process compiles from C for the processor that it runs on.

    source file --the machine's C compiler, a second--> shared library in a private folder --ctypes--> this process

The folder is removed once the library is loaded: no file left on a disk is ever executed, and none that was compiled
for another processor is found.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_COMPILERS = ("cc", "gcc", "clang", "c++", "g++", "clang++")
# Fast, but every operation follows IEEE 754: -ffast-math would change the order of sums and flush subnormals.
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_TUNING = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler supports


class CompilationFailed(Exception):
    """No C compiler was found, or it failed; the message has the reason."""


def find_c_compiler() -> str | None:
    """Return the command of the C compiler: the environment's CC, or the first that this machine has; else None."""
    return os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), None)


def compile_c_library(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile a source file for this processor and load it.

    Args:
        source: a file in C11.
        flags: additional flags of the compiler.

    Raises:
        CompilationFailed: there is no compiler, or it refuses the file.
        OSError: the compiler cannot be started, or the library cannot be stored or loaded.
    """
    compiler = find_c_compiler()
    if compiler is None:
        raise CompilationFailed(f"no C compiler: found none of {', '.join(_COMPILERS)}")
    with tempfile.TemporaryDirectory(prefix="hlat-") as folder:
        output = Path(folder) / "native.so"
        for tuning in _TUNING:
            command = [*compiler.split(), "-x", "c", *_FLAGS, *flags, *tuning, str(source), "-o", str(output), "-lm"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return ctypes.CDLL(str(output))
    raise CompilationFailed(f"{compiler} failed: {result.stderr.strip()[-500:]}")
