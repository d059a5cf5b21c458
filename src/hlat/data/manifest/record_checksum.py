"""Checksums inside JSON records, so that readers notice a single flipped bit.

    record --canonical JSON--> sha256 --> the last key of the record

The checksum covers the values, not the formatting: line breaks between them can change. It protects against damage, not
against manipulation, because anyone can compute it again.
"""

import hashlib
import json
from typing import Any

CHECKSUM_KEY = "checksum"


def checksum_of(record: dict[str, Any]) -> str:
    """Compute the sha256 of a record without its checksum, in canonical JSON: sorted keys, no white space."""
    content = {key: value for key, value in record.items() if key != CHECKSUM_KEY}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of JSON values with its checksum added."""
    return {**record, CHECKSUM_KEY: checksum_of(record)}


def checksum_matches(record: dict[str, Any]) -> bool:
    """Return True if a record has a checksum that matches its content."""
    return record.get(CHECKSUM_KEY) == checksum_of(record)
