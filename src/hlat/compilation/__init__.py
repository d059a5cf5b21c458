"""The compiled code of a run before it starts: filled into the compilers' cache, and packed for other machines."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.compilation.archive import CompiledCache as CompiledCache
    from hlat.compilation.archive import check_archive_path as check_archive_path
    from hlat.compilation.archive import compiled_files as compiled_files
    from hlat.compilation.archive import pack as pack
    from hlat.compilation.archive import place as place
    from hlat.compilation.archive import unpack as unpack
    from hlat.compilation.archive import working_folder as working_folder
    from hlat.compilation.graphs import compile_graphs as compile_graphs

__getattr__ = lazily(
    __name__,
    {
        "archive": "CompiledCache check_archive_path compiled_files pack place unpack working_folder",
        "graphs": "compile_graphs",
    },
)
