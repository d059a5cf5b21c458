"""Versions of the JSON records of prepared data, in one table: how each is written and read.

    fields --write--> JSON object with format_version --read--> fields | ValueError: it is damaged

To add a version, add its reader to ``RECORD_FORMATS`` (in a file of its own, if it is more than a few lines). From then
on records are written in it; those of all other versions in the table stay readable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hlat.data.manifest.record_checksum import CHECKSUM_KEY, checksum_matches, with_checksum

Record = dict[str, Any]


@dataclass(frozen=True)
class RecordFormat:
    """One version of the records.

    Attributes:
        version: ``format_version`` in the record.
        write: adds what is stored besides the fields.
        read: removes it again; raises ValueError if the record is damaged.
        has_checksum: True if the record has a checksum of its own content.
    """

    version: int
    write: Callable[[Record], Record]
    read: Callable[[Record], Record]
    has_checksum: bool


def _unchanged(record: Record) -> Record:
    return record


def _checked(stored: Record) -> Record:
    if not checksum_matches(stored):
        raise ValueError("its content does not match the checksum in it")
    return {key: value for key, value in stored.items() if key != CHECKSUM_KEY}


RECORD_FORMATS: dict[int, RecordFormat] = {
    3: RecordFormat(3, _unchanged, _unchanged, has_checksum=False),
    4: RecordFormat(4, with_checksum, _checked, has_checksum=True),
}
"""Formats by version."""

FORMAT_VERSION = max(RECORD_FORMATS)
"""Version that is written."""
