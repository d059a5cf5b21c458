"""Read a SentencePiece model and convert it to a tokenizer.json, which transformers and other libraries read.

    model, serialized --parse_model--> ModelProto: pieces, trainer, normalizer --to_tokenizer_json--> tokenizer.json

    message = (key, value)*; key = number << 3 | kind; kind 0: varint, 1 and 5: 8 and 4 bytes, 2: length and bytes
    text --normalizer: rules of the model, spaces, dummy prefix--> --pre_tokenizer: symbols apart--> --model--> ids

Only the fields that decide ids are read, without protobuf, which sentencepiece does not install. The library's
serialization is read, not the user's file, so it is whole. Numbers of fields and defaults:
https://github.com/google/sentencepiece/blob/v0.2.0/src/sentencepiece_model.proto

BPE: both libraries merge the best pair of neighbours first, and the leftmost of equal pairs. So the conversion ranks
every pair that forms a piece by the score of the piece. Runs of spaces, which all have the same score in Llama's
models, are merged from the left one by one; ranking the longest run first gives the same result. A model of characters
is one without merges.

Unigram: the scores are copied; a symbol of the user's gets the score that SentencePiece computes for it.

transformers 5 ranks by id when it loads a .model alone, and knows few of these rules, so a .model never travels
without its tokenizer.json.
"""

import base64
import json
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import tokenizers

_BYTES, _FLOAT = 2, 5  # kinds; a varint's is 0
_FIXED_SIZES = {1: 8, _FLOAT: 4}


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
    """A parsed model, with only the fields that decide ids."""

    pieces: list[Piece]
    trainer_spec: TrainerSpec
    normalizer_spec: NormalizerSpec


def parse_model(content: bytes) -> ModelProto:
    """Parse the bytes of ``SentencePieceProcessor.serialized_model_proto``."""
    pieces, trainer, rules = list[Piece](), dict[int, Any](), dict[int, Any]()
    for key, value in _proto_fields(content):
        if key == 1 << 3 | _BYTES:
            fields = dict(_proto_fields(value))
            (score,) = struct.unpack("<f", fields.get(2 << 3 | _FLOAT, bytes(4)))
            pieces.append(Piece(fields.get(1 << 3 | _BYTES, b"").decode(), score, fields.get(3 << 3, 1)))
        elif key == 2 << 3 | _BYTES:
            trainer.update(_proto_fields(value))
        elif key == 3 << 3 | _BYTES:
            rules.update(_proto_fields(value))
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


def _proto_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield key and value of each field: a varint as an int, others as bytes."""
    at = depth = 0
    while at < len(message):
        # The key holds the kind, so a field of another kind than its definition's is another field, as for protobuf.
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value: Any
            value, at = _varint(message, at)
        elif kind in (3, 4):  # a group begins or ends
            depth += 1 if kind == 3 else -1
            continue
        else:
            size, at = (_FIXED_SIZES[kind], at) if kind in _FIXED_SIZES else _varint(message, at)
            value, at = message[at : at + size], at + size
        if depth == 0:  # what a group has is left out
            yield key, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, seven bits a byte, lowest first, and the place after it."""
    value = shift = 0
    while message[at] >= 128:
        value, at, shift = value | (message[at] & 127) << shift, at + 1, shift + 7
    return value | message[at] << shift, at + 1


_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # ModelProto.SentencePiece.Type
_UNIGRAM, _BPE, _WORD = 1, 2, 3  # TrainerSpec.ModelType
_SPACE = "▁"
_STAND_IN = 0xF0000  # first of the private characters that stand for symbols while the rules are applied

Json = dict[str, Any]
Pieces = list[tuple[str, float, int]]  # Spelling, score and type of each piece, by id


def to_tokenizer_json(proto: Any, bos_id: int | None = None) -> bytes:
    """Convert a parsed ModelProto to the bytes of a tokenizer.json.

    The piece ``bos_id`` is put in front of a prompt. ValueError names a property that a tokenizer.json cannot have.
    """
    pieces = _pieces(proto)
    _refuse_what_has_no_equal(proto, pieces)
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(i, piece) for i, (piece, _, kind) in enumerate(pieces) if kind in _NEVER_TEXT],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(proto, pieces)},
        "pre_tokenizer": _pre_tokenizer(proto, pieces),
        "post_processor": None if bos_id is None else _template(pieces[bos_id][0], bos_id),
        "decoder": _decoder(proto),
        "model": _unigram(proto, pieces) if proto.trainer_spec.model_type == _UNIGRAM else _bpe(proto, pieces),
    }
    return json.dumps(description, ensure_ascii=False, indent=2).encode()


_NEVER_TEXT = (_UNKNOWN, _CONTROL)  # types of pieces that no text can spell


def _pieces(proto: Any) -> Pieces:
    return [(piece.piece, piece.score, piece.type) for piece in proto.pieces]


def _refuse_what_has_no_equal(proto: Any, pieces: Pieces) -> None:
    if proto.trainer_spec.model_type == _WORD:
        raise ValueError("it is a model of whole words (model_type word)")
    if any(kind == _UNUSED for _, _, kind in pieces):
        raise ValueError("some of its pieces are marked as unused")
    if not proto.normalizer_spec.escape_whitespaces:
        raise ValueError("it does not spell spaces as ▁ (escape_whitespaces)")


def is_plain(proto: Any) -> bool:
    """Return True if the model changes a text only by putting a space in front, and can encode any text."""
    rules = proto.normalizer_spec
    return bool(
        rules.name == "identity"
        and not rules.precompiled_charsmap
        and not rules.normalization_rule_tsv
        and rules.add_dummy_prefix
        and rules.escape_whitespaces
        and not rules.remove_extra_whitespaces
        and not proto.trainer_spec.treat_whitespace_as_suffix
        and proto.trainer_spec.byte_fallback
        and not any(kind in (_USER, _UNUSED) for _, _, kind in _pieces(proto))
    )


def _special(index: int, piece: str) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": piece, **flags}


def _normalizers(proto: Any, pieces: Pieces) -> list[Json]:
    """List the changes of a text in SentencePiece's order: its rules, extra spaces, the dummy space, spaces as ▁."""
    rules, found, after = proto.normalizer_spec, list[Json](), list[Json]()
    if rules.precompiled_charsmap:
        charsmap = {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(rules.precompiled_charsmap).decode(),
        }
        for number, symbol in enumerate(_changed_symbols(rules.precompiled_charsmap, pieces)):
            found.append(_replace({"String": symbol}, chr(_STAND_IN + number)))
            after.append(_replace({"String": chr(_STAND_IN + number)}, symbol))
        found += [*_groups(rules.precompiled_charsmap), charsmap]
    if rules.remove_extra_whitespaces:
        found += [_replace({"Regex": rf"\A +|[ {_SPACE}]+\z"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if rules.add_dummy_prefix:
        as_suffix = proto.trainer_spec.treat_whitespace_as_suffix
        end_of_text = {"Regex": r"(?<=[\s\S])\z"}  # an empty text stays empty
        found.append(_replace(end_of_text, _SPACE) if as_suffix else {"type": "Prepend", "prepend": _SPACE})
    return [*found, _replace({"String": " "}, _SPACE), *after]


def _changed_symbols(charsmap: bytes, pieces: Pieces) -> list[str]:
    """List the user's symbols that the rules would change; SentencePiece applies no rule to them."""
    rules = tokenizers.normalizers.Precompiled(charsmap)
    symbols = [piece for piece, _, kind in pieces if kind == _USER]
    return sorted((each for each in symbols if rules.normalize_str(each) != each), key=len, reverse=True)


def _groups(charsmap: bytes) -> list[Json]:
    rules = tokenizers.normalizers.Precompiled(charsmap)
    # The library takes some groups of characters for one, and loses what SentencePiece keeps. A line end of two
    # characters gets the rules of both. Decomposed letters with several marks (Vietnamese, Hangul, kana) are composed
    # first: of their rules the library would apply the shortest.
    both = rules.normalize_str("\r") + rules.normalize_str("\n")
    found = [] if rules.normalize_str("\r\n") == both else [_replace({"String": "\r\n"}, both)]
    return [*found, *([{"type": "NFC"}] if rules.normalize_str("e\u0301") == "é" else [])]


def _replace(pattern: dict[str, str], content: str) -> Json:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _pre_tokenizer(proto: Any, pieces: Pieces) -> Json | None:
    """Build what keeps symbols whole, and names of control pieces in a text from becoming these pieces."""
    symbols = sorted((piece for piece, _, kind in pieces if kind == _USER), key=len, reverse=True)
    isolates = bool(symbols) and proto.trainer_spec.model_type != _UNIGRAM  # of which the scores decide
    if not isolates and proto.trainer_spec.model_type != _UNIGRAM:
        return None  # a merge makes only pieces of text
    text = [piece for piece, _, kind in pieces if kind == _NORMAL]
    joined = {piece[at : at + 2] for piece in text for at in range(len(piece) - 1)}
    names = [_cut_name(piece, joined) for piece, _, kind in pieces if kind in _NEVER_TEXT and len(piece) > 1]
    if any(kind == _BYTE for _, _, kind in pieces):
        names.append("<0x[0-9A-F]{2}(?=>)")
    steps = [_split("|".join(map(re.escape, symbols)), "Isolated")] if isolates else []
    steps.append(_split("|".join(names), "MergedWithPrevious"))
    return {"type": "Sequence", "pretokenizers": steps}


def _cut_name(name: str, joined: set[str]) -> str:
    # Between two characters that no piece of text joins, so that the cut changes no ids; after the first if all are
    # joined.
    cut = next((at for at in range(1, len(name)) if name[at - 1 : at + 1] not in joined), 1)
    return f"{re.escape(name[:cut])}(?={re.escape(name[cut:])})"


def _split(regex: str, behavior: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}


def _template(piece: str, index: int) -> Json:
    begin, text = {"SpecialToken": {"id": piece, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, begin, other],
        "special_tokens": {piece: {"id": piece, "ids": [index], "tokens": [piece]}},
    }


def _decoder(proto: Any) -> Json:
    steps = [_replace({"String": _SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if proto.normalizer_spec.add_dummy_prefix:
        at_end = int(proto.trainer_spec.treat_whitespace_as_suffix)
        steps.append({"type": "Strip", "content": " ", "start": 1 - at_end, "stop": at_end})
    return {"type": "Sequence", "decoders": steps}


def _bpe(proto: Any, pieces: Pieces) -> Json:
    normal = {piece: score for piece, score, kind in pieces if kind == _NORMAL}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": next(piece for piece, _, kind in pieces if kind == _UNKNOWN),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": bool(proto.trainer_spec.byte_fallback),
        "ignore_merges": any(kind == _USER for _, _, kind in pieces),  # a symbol, which is isolated, is a piece
        "vocab": {piece: index for index, (piece, _, _) in enumerate(pieces)},
        "merges": _merges(normal) if proto.trainer_spec.model_type == _BPE else [],
    }


def _merges(normal: dict[str, float]) -> list[list[str]]:
    """List every pair of pieces that forms another piece, best first."""
    ranked = []
    for piece, score in normal.items():
        # Runs of spaces have one score: merged from the left, one by one; the longest run is ranked first.
        spaces = not piece.strip(_SPACE)
        for split in range(1, len(piece)):
            left, right = piece[:split], piece[split:]
            if left in normal and right in normal and (right == _SPACE or not spaces):
                ranked.append((-score, -len(piece) if spaces else 0, split, left, right))
    return [[left, right] for *_, left, right in sorted(ranked, key=lambda merge: merge[:3])]


def _unigram(proto: Any, pieces: Pieces) -> Json:
    best = max((score for _, score, kind in pieces if kind == _NORMAL), default=0.0)

    def score_of(piece: str, score: float, kind: int) -> float:
        return len(piece.encode()) * best - 0.1 if kind == _USER else score  # of bytes, as SentencePiece computes it

    return {
        "type": "Unigram",
        "unk_id": next(index for index, (_, _, kind) in enumerate(pieces) if kind == _UNKNOWN),
        "byte_fallback": bool(proto.trainer_spec.byte_fallback),
        "vocab": [[piece, score_of(piece, score, kind)] for piece, score, kind in pieces],
    }
