"""TensorBoard: the metrics as scalars in event files, written without TensorBoard and protobuf (73 MB with theirs).

    metrics -> train/loss, train/lr, ...   validation/loss, validation/NAME/loss, ...   task/NAME/acc, ...
    scalars of a step --protocol buffer--> Event --length, checksums--> TFRecord --one write--> file

A line of metrics is one record, written synchronously. torch's SummaryWriter is not used: it writes in a thread that
only prints its errors, and it reopens the file by name for each record, even if the run's folder has been replaced.

Formats: tensorboard/compat/proto/event.proto and summary.proto (messages and numbers of their fields), "Encoding" of
protobuf.dev (wire format), tensorflow.org/tutorials/load_data/tfrecord (frame and masked checksum), RFC 3720, B.4
(CRC-32C). Tests compare the bytes with those of TensorBoard's own writer.
"""

import itertools
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hlat.runtime.logs import AppendedFile
from hlat.tracking.jsonl import as_storage_error
from hlat.tracking.records import Metrics, TrackerNote, moved_note

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
    """Append a TFRecord to an unbuffered file: length, checksum of the length, data, checksum of the data."""
    length = struct.pack("<Q", len(data))
    left = memoryview(length + _masked_checksum(length) + data + _masked_checksum(data))
    while left:
        left = left[file.write(left) :]


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of bytes; zlib has another polynomial."""
    crc = 0xFFFFFFFF
    # A record has a few hundred bytes: Python is fast enough.
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            # The reversed polynomial of RFC 3720.
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC = _crc_table()


def _masked_checksum(data: bytes) -> bytes:
    """Return TFRecord's checksum: the CRC-32C rotated right by 15 bits, plus a constant."""
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


_VALIDATION = {"val_loss": "validation/loss", "val_bits_per_byte": "validation/bits_per_byte"}
_SETS, _TASKS = "val/", "task/"  # first parts of keys
# The step is the axis; a checksum is not a quantity.
_NOT_PLOTTED = frozenset({"step", "batch_crc32"})
_FILES = itertools.count()  # file numbers of this process; TensorBoard reads files in the order of their names


def scalars(metrics: Metrics) -> dict[str, float]:
    """Return tag and value of every metric that can be plotted."""
    found: dict[str, float] = {}
    for key, value in metrics.items():
        if key in _NOT_PLOTTED:
            continue
        tag = _tag(key)
        fields: dict[str, Any] = (
            {f"{tag}/{name}": field for name, field in value.items()} if isinstance(value, dict) else {}
        )
        for name, number in (fields or {tag: value}).items():
            if isinstance(number, int | float):
                found[name] = float(number)
    return found


def _tag(key: str) -> str:
    if key.startswith(_SETS):
        return f"validation/{key.removeprefix(_SETS)}"
    return key if key.startswith(_TASKS) else _VALIDATION.get(key, f"train/{key}")


class TensorBoard:
    """Writer of scalars to event files in a folder; the folder is created in an existing one.

    Scalars of an earlier process for steps after ``start_step`` are marked as superseded: each step is shown once.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, start_step: int) -> None:
        self._folder = folder
        self._move = ""
        self._open(start_step)

    def rewind(self, step: int) -> None:
        self.close()
        self._open(step)

    def log(self, metrics: Metrics) -> None:
        with as_storage_error(self._folder, "write TensorBoard events"):
            self._move = self._file.follow() or self._move
            write_record(self._file, scalars_event(time.time(), metrics["step"], scalars(metrics)))

    def notes(self) -> list[TrackerNote]:
        move, self._move = self._move, ""
        return [moved_note(f"{self._folder.name}/{self._name}", move)] if move else []

    def close(self, failed: bool = False) -> None:
        self._file.close()

    def _open(self, step: int) -> None:
        """Begin a file, which supersedes the scalars of others in the folder for steps after ``step``."""
        with as_storage_error(self._folder, "write TensorBoard events"):
            self._folder.mkdir(exist_ok=True)
            start = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            self._name = f"{start}.{next(_FILES):06d}"  # TensorBoard reads files in the order of their names
            self._file = AppendedFile(self._folder / self._name)
            try:
                write_record(self._file, version_event(time.time(), step + 1))
                write_record(self._file, start_event(time.time(), step + 1))
            except BaseException:
                self.close()
                raise
