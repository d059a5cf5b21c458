"""The manifest of prepared data: its types, files and checksums, the settings it was made with, and bad rows."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.manifest.bad_rows import EARLIEST, QuarantineWriter, Tally, Unreadable, too_many
    from hlat.data.manifest.hash_cache import known_hashes, remember_hashes, remember_touched
    from hlat.data.manifest.manifest import (
        BLOCKS,
        FORMAT_VERSION,
        MANIFEST,
        TOKENIZER,
        WORK_VERSION,
        BlocksRecord,
        Manifest,
        QuarantineRecord,
        Record,
        ShardRecord,
        SourceRecord,
        SourceRows,
        SourceTokens,
        SplitRecord,
        content_fingerprint,
        documents_file,
        shard_file,
    )
    from hlat.data.manifest.manifest_file import (
        OtherFormat,
        read_manifest,
        read_stored,
        told,
        write_manifest,
        write_stored,
    )
    from hlat.data.manifest.sealing import CHECKSUM, is_whole, sealed
    from hlat.data.manifest.settings import differences, names_of, places_of, settings_of

__getattr__ = lazily(
    __name__,
    {
        "bad_rows": (
            "EARLIEST",
            "QuarantineWriter",
            "Tally",
            "Unreadable",
            "too_many",
        ),
        "hash_cache": (
            "known_hashes",
            "remember_hashes",
            "remember_touched",
        ),
        "manifest": (
            "BLOCKS",
            "BlocksRecord",
            "FORMAT_VERSION",
            "MANIFEST",
            "Manifest",
            "QuarantineRecord",
            "Record",
            "ShardRecord",
            "SourceRecord",
            "SourceRows",
            "SourceTokens",
            "SplitRecord",
            "TOKENIZER",
            "WORK_VERSION",
            "content_fingerprint",
            "documents_file",
            "shard_file",
        ),
        "manifest_file": (
            "OtherFormat",
            "read_manifest",
            "read_stored",
            "told",
            "write_manifest",
            "write_stored",
        ),
        "sealing": (
            "CHECKSUM",
            "is_whole",
            "sealed",
        ),
        "settings": (
            "differences",
            "names_of",
            "places_of",
            "settings_of",
        ),
    },
)

__all__ = [
    "BLOCKS",
    "CHECKSUM",
    "EARLIEST",
    "FORMAT_VERSION",
    "MANIFEST",
    "TOKENIZER",
    "WORK_VERSION",
    "BlocksRecord",
    "Manifest",
    "OtherFormat",
    "QuarantineRecord",
    "QuarantineWriter",
    "Record",
    "ShardRecord",
    "SourceRecord",
    "SourceRows",
    "SourceTokens",
    "SplitRecord",
    "Tally",
    "Unreadable",
    "content_fingerprint",
    "differences",
    "documents_file",
    "is_whole",
    "known_hashes",
    "names_of",
    "places_of",
    "read_manifest",
    "read_stored",
    "remember_hashes",
    "remember_touched",
    "sealed",
    "settings_of",
    "shard_file",
    "told",
    "too_many",
    "write_manifest",
    "write_stored",
]
