"""Text becomes samples: sources -> documents -> tokens -> shards -> samples addressed by a global index.

    stores      files of this machine and of object stores, a cache, retries
    tokenizers  text <-> token ids
    formats     files -> rows -> documents
    sources     paths, globs and URLs -> a sorted list of files
    manifest    the record of prepared data: its files, settings, bad rows
    prepared    a folder of token shards, opened and checked
    prepare     documents -> token shards and a manifest, by worker processes, restartable, on one machine or several
    samples     global sample index -> source -> row -> tokens, a pure function
    online      documents -> samples while training, by processes of their own

Names of the doors are resolved on first use: a worker process that only tokenizes (prepare/worker.py) then starts without
importing torch, which would cost more than tokenizing a small corpus.
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.prepare_for import prepare_recipe_data

__getattr__ = lazily(__name__, {"prepare_for": ("prepare_recipe_data",)})

__all__ = ["prepare_recipe_data"]
