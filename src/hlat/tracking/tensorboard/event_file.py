"""Records of TensorBoard's event files, written without TensorBoard and protobuf (73 MB with what they bring along).

    scalars of a step --protocol buffer--> Event --length, checksums--> TFRecord --one write--> file

Formats: tensorboard/compat/proto/event.proto and summary.proto (messages and numbers of their fields), "Encoding" of
protobuf.dev (wire format), tensorflow.org/tutorials/load_data/tfrecord (frame and masked checksum), RFC 3720, B.4
(CRC-32C). Tests compare the bytes with those of TensorBoard's own writer.
"""

import math
import struct
from collections.abc import Mapping
from typing import BinaryIO

from hlat.runtime.process.appended_file import AppendedFile

FILE_VERSION = "brain.Event:2"
"""Version of the format, in the first record of a file."""

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7  # fields of Event
_VALUE = 1  # field of Summary
_TAG, _SIMPLE_VALUE = 1, 2  # fields of Summary.Value
_STATUS, _START = 1, 1  # field of SessionLog, and one of its values
_LARGEST_FLOAT = 3.4028234663852886e38


def version_event(time: float, step: int) -> bytes:
    """Return the Event that begins a file; ``time`` in seconds since 1970."""
    return _event(time, step) + _message(_FILE_VERSION, FILE_VERSION.encode())


def start_event(time: float, step: int) -> bytes:
    """Return the Event that marks scalars of this step and later ones, in files before this one, as superseded."""
    return _event(time, step) + _message(_SESSION_LOG, _key(_STATUS, _VARINT) + _varint(_START))


def scalars_event(time: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return the Event with the scalars of a step, by tag. They are stored as float32."""
    summary = b"".join(_message(_VALUE, _scalar(tag, value)) for tag, value in values.items())
    return _event(time, step) + _message(_SUMMARY, summary)


def write_record(file: "BinaryIO | AppendedFile", data: bytes) -> None:
    """Append a TFRecord to an unbuffered file: length, checksum of the length, data, checksum of the data.

    Raises:
        OSError: the file cannot be written.
    """
    length = struct.pack("<Q", len(data))
    left = memoryview(length + _masked_checksum(length) + data + _masked_checksum(data))
    while left:
        left = left[file.write(left) :]


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of bytes. Records have a few hundred; zlib has another polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc_table() -> list[int]:
    """CRC-32C of each byte, by the reversed polynomial."""
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC = _crc_table()


def _masked_checksum(data: bytes) -> bytes:
    """TFRecord's checksum: the CRC-32C rotated right by 15 bits, plus a constant."""
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _event(time: float, step: int) -> bytes:
    head = _key(_WALL_TIME, _DOUBLE) + struct.pack("<d", time)
    return head + _key(_STEP, _VARINT) + _varint(step) if step else head  # protobuf leaves out zeros


def _scalar(tag: str, value: float) -> bytes:
    if abs(value) > _LARGEST_FLOAT:  # pack refuses what float32 cannot hold; False for NaN, which stays
        value = math.copysign(math.inf, value)
    return _message(_TAG, tag.encode()) + _key(_SIMPLE_VALUE, _FLOAT) + struct.pack("<f", value)


def _message(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(value: int) -> bytes:
    """Encode an integer of at least 0: seven bits per byte, the lowest first, the top bit set on all but the last."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
