"""Sources of a corpus: paths, globs and URLs resolve to a sorted list of files with fingerprints."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.sources.beginnings import read_beginnings
    from hlat.data.sources.columns import default_column, source_columns
    from hlat.data.sources.file_list import (
        CACHE_FOLDER,
        NumberedSource,
        cache_location,
        describe_corpus_changes,
        files_of_source,
        hash_files,
        list_files,
        numbered_sources,
        open_cached_store,
        without_linked_folders,
    )
    from hlat.data.sources.findings import check_first_bytes, doubts, first_bytes, refuse
    from hlat.data.sources.held_out import HeldOut, describe_scarce
    from hlat.data.sources.listing import SourceNotFoundError
    from hlat.data.sources.source_file import SourceFile, Stamp, sha256_of
    from hlat.data.sources.split import ALL_VALIDATION, SPLITS, Split, SplitRule, hash_share, hash_threshold, tail_start

__getattr__ = lazily(
    __name__,
    {
        "beginnings": ("read_beginnings",),
        "columns": ("default_column", "source_columns"),
        "file_list": (
            "CACHE_FOLDER",
            "cache_location",
            "NumberedSource",
            "describe_corpus_changes",
            "files_of_source",
            "hash_files",
            "list_files",
            "numbered_sources",
            "open_cached_store",
            "without_linked_folders",
        ),
        "findings": ("check_first_bytes", "doubts", "first_bytes", "refuse"),
        "held_out": ("HeldOut", "describe_scarce"),
        "listing": ("SourceNotFoundError",),
        "source_file": (
            "SourceFile",
            "Stamp",
            "sha256_of",
        ),
        "split": (
            "ALL_VALIDATION",
            "SPLITS",
            "Split",
            "SplitRule",
            "hash_share",
            "hash_threshold",
            "tail_start",
        ),
    },
)

__all__ = [
    "ALL_VALIDATION",
    "CACHE_FOLDER",
    "SPLITS",
    "HeldOut",
    "NumberedSource",
    "SourceFile",
    "SourceNotFoundError",
    "Split",
    "SplitRule",
    "Stamp",
    "cache_location",
    "check_first_bytes",
    "default_column",
    "describe_corpus_changes",
    "describe_scarce",
    "doubts",
    "files_of_source",
    "first_bytes",
    "hash_files",
    "hash_share",
    "hash_threshold",
    "list_files",
    "numbered_sources",
    "open_cached_store",
    "read_beginnings",
    "refuse",
    "sha256_of",
    "source_columns",
    "tail_start",
    "without_linked_folders",
]
