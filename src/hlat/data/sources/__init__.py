"""The sources of a corpus: paths, globs and URLs become a sorted list of files with fingerprints."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.sources.file_list import (
        CACHE,
        NothingThere,
        cache_of,
        corpus_changes,
        fingerprint,
        list_files,
        shelf_of,
    )
    from hlat.data.sources.source_file import SourceFile, Stamp, sha256_of
    from hlat.data.sources.split import ALL_VALIDATION, SPLITS, Assignment, Split, hash_threshold, tail_start

__getattr__ = lazily(
    __name__,
    {
        "file_list": (
            "CACHE",
            "NothingThere",
            "cache_of",
            "corpus_changes",
            "fingerprint",
            "list_files",
            "shelf_of",
        ),
        "source_file": (
            "SourceFile",
            "Stamp",
            "sha256_of",
        ),
        "split": (
            "ALL_VALIDATION",
            "Assignment",
            "SPLITS",
            "Split",
            "hash_threshold",
            "tail_start",
        ),
    },
)

__all__ = [
    "ALL_VALIDATION",
    "CACHE",
    "SPLITS",
    "Assignment",
    "NothingThere",
    "SourceFile",
    "Split",
    "Stamp",
    "cache_of",
    "corpus_changes",
    "fingerprint",
    "hash_threshold",
    "list_files",
    "sha256_of",
    "shelf_of",
    "tail_start",
]
