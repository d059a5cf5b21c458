"""Compiled code: libraries in C, which are compiled and kept, and the check of folders from which code is loaded."""

from hlat.runtime.compiled_code.c_library import (
    CompilationFailed,
    begin_compiling,
    compile_c_library,
    find_c_compiler,
    finish_compiling,
)
from hlat.runtime.compiled_code.code_folder import check_code_folder, open_code_folder

__all__ = [
    "CompilationFailed",
    "begin_compiling",
    "check_code_folder",
    "compile_c_library",
    "find_c_compiler",
    "finish_compiling",
    "open_code_folder",
]
