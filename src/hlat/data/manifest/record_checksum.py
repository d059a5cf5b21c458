"""JSON that carries a checksum of what it says, so that one flipped bit is noticed by whoever reads it.

    record --canonical JSON--> sha256 --> the last key of the record

The checksum is of the content, not of the spelling: a line break more or less changes nothing that is said. It protects
against damage, not against someone who computes it anew.
"""

import hashlib
import json
from typing import Any

CHECKSUM_KEY = "checksum"


def checksum_of(record: dict[str, Any]) -> str:
    """The sha256 of a record without its own checksum, spelled in one way only: sorted keys, no white space."""
    content = {key: value for key, value in record.items() if key != CHECKSUM_KEY}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """A record of JSON values, with its checksum."""
    return {**record, CHECKSUM_KEY: checksum_of(record)}


def checksum_matches(record: dict[str, Any]) -> bool:
    """Compare the checksum that a record carries with its content; False also where it carries none."""
    return record.get(CHECKSUM_KEY) == checksum_of(record)
