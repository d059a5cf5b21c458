"""Manifest of prepared data: its types, files and checksums, the settings used to prepare it, and bad rows."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.manifest.bad_row import BadRow
    from hlat.data.manifest.bad_rows import MIN_BAD_ROWS, BadRowCounter, QuarantineWriter, too_many_bad_rows
    from hlat.data.manifest.hash_cache import load_hashes, save_hashes, update_hashes
    from hlat.data.manifest.manifest import (
        BLOCKS_FILE,
        MANIFEST_FILE,
        TOKENIZER_FOLDER,
        WORK_VERSION,
        BlocksRecord,
        DataManifest,
        QuarantineRecord,
        ShardRecord,
        SourceRecord,
        SourceRows,
        SourceTokens,
        SplitRecord,
        StrictRecord,
        content_fingerprint,
        documents_file,
        shard_file,
    )
    from hlat.data.manifest.manifest_file import (
        UnknownFormatError,
        read_data_manifest,
        read_record,
        validation_summary,
        write_data_manifest,
        write_record,
    )
    from hlat.data.manifest.record_checksum import CHECKSUM_KEY, checksum_matches, with_checksum
    from hlat.data.manifest.record_formats import FORMAT_VERSION
    from hlat.data.manifest.settings import content_settings, recipe_locations, recipe_source_names, setting_differences

__getattr__ = lazily(
    __name__,
    {
        "bad_row": ("BadRow",),
        "bad_rows": (
            "BadRowCounter",
            "MIN_BAD_ROWS",
            "QuarantineWriter",
            "too_many_bad_rows",
        ),
        "hash_cache": (
            "load_hashes",
            "save_hashes",
            "update_hashes",
        ),
        "manifest": (
            "BLOCKS_FILE",
            "BlocksRecord",
            "DataManifest",
            "MANIFEST_FILE",
            "QuarantineRecord",
            "ShardRecord",
            "SourceRecord",
            "SourceRows",
            "SourceTokens",
            "SplitRecord",
            "StrictRecord",
            "TOKENIZER_FOLDER",
            "WORK_VERSION",
            "content_fingerprint",
            "documents_file",
            "shard_file",
        ),
        "manifest_file": (
            "UnknownFormatError",
            "read_data_manifest",
            "read_record",
            "validation_summary",
            "write_data_manifest",
            "write_record",
        ),
        "record_checksum": (
            "CHECKSUM_KEY",
            "checksum_matches",
            "with_checksum",
        ),
        "record_formats": ("FORMAT_VERSION",),
        "settings": (
            "content_settings",
            "recipe_locations",
            "recipe_source_names",
            "setting_differences",
        ),
    },
)

__all__ = [
    "BLOCKS_FILE",
    "CHECKSUM_KEY",
    "FORMAT_VERSION",
    "MANIFEST_FILE",
    "MIN_BAD_ROWS",
    "TOKENIZER_FOLDER",
    "WORK_VERSION",
    "BadRow",
    "BadRowCounter",
    "BlocksRecord",
    "DataManifest",
    "QuarantineRecord",
    "QuarantineWriter",
    "ShardRecord",
    "SourceRecord",
    "SourceRows",
    "SourceTokens",
    "SplitRecord",
    "StrictRecord",
    "UnknownFormatError",
    "checksum_matches",
    "content_fingerprint",
    "content_settings",
    "documents_file",
    "load_hashes",
    "read_data_manifest",
    "read_record",
    "recipe_locations",
    "recipe_source_names",
    "save_hashes",
    "setting_differences",
    "shard_file",
    "too_many_bad_rows",
    "update_hashes",
    "validation_summary",
    "with_checksum",
    "write_data_manifest",
    "write_record",
]
