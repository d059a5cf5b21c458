"""Read the fields of a SentencePiece model that decide ids, without protobuf, which sentencepiece does not install.

    message = (key, value)*; key = number << 3 | kind; kind 0: varint, 1 and 5: 8 and 4 bytes, 2: length and bytes

The library's serialization is read, not the user's file, so it is whole. Numbers of fields and defaults:
https://github.com/google/sentencepiece/blob/v0.2.0/src/sentencepiece_model.proto
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

_BYTES, _FLOAT = 2, 5  # kinds; a varint's is 0
_SIZES = {1: 8, _FLOAT: 4}


class Piece(NamedTuple):
    """SentencePiece of a ModelProto."""

    piece: str
    score: float
    type: int


class TrainerSpec(NamedTuple):
    """Fields of a TrainerSpec that decide ids."""

    model_type: int
    treat_whitespace_as_suffix: bool
    byte_fallback: bool


class NormalizerSpec(NamedTuple):
    """Fields of a NormalizerSpec that decide ids."""

    name: str
    precompiled_charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    normalization_rule_tsv: str


class ModelProto(NamedTuple):
    """A model."""

    pieces: list[Piece]
    trainer_spec: TrainerSpec
    normalizer_spec: NormalizerSpec


def parse_model(content: bytes) -> ModelProto:
    """Parse the bytes of ``SentencePieceProcessor.serialized_model_proto``."""
    pieces, trainer, rules = list[Piece](), dict[int, Any](), dict[int, Any]()
    for key, value in _fields(content):
        if key == 1 << 3 | _BYTES:
            fields = dict(_fields(value))
            (score,) = struct.unpack("<f", fields.get(2 << 3 | _FLOAT, bytes(4)))
            pieces.append(Piece(fields.get(1 << 3 | _BYTES, b"").decode(), score, fields.get(3 << 3, 1)))
        elif key == 2 << 3 | _BYTES:
            trainer.update(_fields(value))
        elif key == 3 << 3 | _BYTES:
            rules.update(_fields(value))
    return ModelProto(
        pieces,
        TrainerSpec(
            model_type=trainer.get(3 << 3, 1),
            treat_whitespace_as_suffix=bool(trainer.get(24 << 3, 0)),
            byte_fallback=bool(trainer.get(35 << 3, 0)),
        ),
        NormalizerSpec(
            name=rules.get(1 << 3 | _BYTES, b"").decode(errors="replace"),
            precompiled_charsmap=rules.get(2 << 3 | _BYTES, b""),
            add_dummy_prefix=bool(rules.get(3 << 3, 1)),
            remove_extra_whitespaces=bool(rules.get(4 << 3, 1)),
            escape_whitespaces=bool(rules.get(5 << 3, 1)),
            normalization_rule_tsv=rules.get(6 << 3 | _BYTES, b"").decode(errors="replace"),
        ),
    )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield key and value of each field: a varint as an int, others as bytes; what a group has is left out.

    The key holds the kind, so a field of another kind than its definition's is another field, as it is for protobuf.
    """
    at = depth = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value: Any
            value, at = _varint(message, at)
        elif kind in (3, 4):  # a group begins or ends
            depth += 1 if kind == 3 else -1
            continue
        else:
            size, at = (_SIZES[kind], at) if kind in _SIZES else _varint(message, at)
            value, at = message[at : at + size], at + size
        if depth == 0:
            yield key, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, of which each byte gives seven bits, lowest first, and the place after it."""
    value = shift = 0
    while message[at] >= 128:
        value, at, shift = value | (message[at] & 127) << shift, at + 1, shift + 7
    return value | message[at] << shift, at + 1
