"""The compiled code of a run before it starts: filled into the compilers' cache, and packed for other machines."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.compilation.archive import *
    from hlat.compilation.graphs import *

__getattr__ = lazily(
    __name__,
    {
        "archive": "CompiledCache check_archive_path compiled_files pack place unpack working_folder",
        "graphs": "compile_graphs",
    },
)
