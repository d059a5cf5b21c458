"""Data: sources -> documents -> tokens -> shards -> samples addressed by a global index.

    stores      local files and object stores: atomic writes, a cache, retries
    tokenizers  text <-> token ids
    formats     files -> rows -> documents
    sources     paths, globs and URLs -> a sorted list of files
    manifest    the record of prepared data: its files, settings, bad rows
    prepared    a folder of token shards: open it and check it
    prepare     documents -> token shards and a manifest, by worker processes, resumable, on one machine or several
    samples     global sample index -> source -> row -> tokens, a pure function
    online      documents -> samples while training, by separate processes

The names of a door (an ``__init__.py``) are resolved on first use. So a worker process that only tokenizes
(prepare/worker.py) starts without importing torch, which would take longer than tokenizing a small corpus.
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.input_check import InputReport, check_inputs
    from hlat.data.prepare_for import open_validation_sets, prepare_recipe_data, prepare_validation_sets

__getattr__ = lazily(
    __name__,
    {
        "input_check": ("InputReport", "check_inputs"),
        "prepare_for": ("open_validation_sets", "prepare_recipe_data", "prepare_validation_sets"),
    },
)

__all__ = [
    "InputReport",
    "check_inputs",
    "open_validation_sets",
    "prepare_recipe_data",
    "prepare_validation_sets",
]
