"""The compiled code of a run before it starts: filled into the compilers' cache, and packed for other machines."""

from hlat.compilation.archive import check_archive_path, pack
from hlat.compilation.cache import CompiledCache, compiled_files, place, unpack, working_folder
from hlat.compilation.graphs import compile_graphs

__all__ = [
    "CompiledCache",
    "check_archive_path",
    "compile_graphs",
    "compiled_files",
    "pack",
    "place",
    "unpack",
    "working_folder",
]
