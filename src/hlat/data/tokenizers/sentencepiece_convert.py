"""Read a SentencePiece model and convert it to a tokenizer.json, which transformers and other libraries read.

    model, serialized --parse_model--> pieces, rules of trainer and normalizer --to_tokenizer_json--> tokenizer.json

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

    piece: str  # its spelling
    score: float
    kind: int  # ModelProto.SentencePiece.Type


class SentencePieceModel(NamedTuple):
    """A parsed ModelProto: its pieces by id, and those fields of its trainer and normalizer that decide ids."""

    pieces: list[Piece]
    model_type: int
    treat_whitespace_as_suffix: bool
    byte_fallback: bool
    name: str
    precompiled_charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    normalization_rule_tsv: str

    @property
    def symbols(self) -> list[str]:
        """The symbols of the user, the longest first."""
        return sorted((each.piece for each in self.pieces if each.kind == _USER), key=len, reverse=True)


def parse_model(content: bytes) -> SentencePieceModel:
    """Parse the bytes of ``SentencePieceProcessor.serialized_model_proto``."""
    pieces, trainer, rules = list[Piece](), dict[int, Any](), dict[int, Any]()
    for key, value in _proto_fields(content):
        if key == 1 << 3 | _BYTES:
            fields = dict(_proto_fields(value))
            (score,) = struct.unpack("<f", fields.get(2 << 3 | _FLOAT, bytes(4)))
            pieces.append(Piece(fields.get(1 << 3 | _BYTES, b"").decode(), score, fields.get(3 << 3, 1)))
        elif key in (2 << 3 | _BYTES, 3 << 3 | _BYTES):
            (trainer if key >> 3 == 2 else rules).update(_proto_fields(value))
    return SentencePieceModel(
        pieces,
        model_type=trainer.get(3 << 3, 1),
        treat_whitespace_as_suffix=bool(trainer.get(24 << 3, 0)),
        byte_fallback=bool(trainer.get(35 << 3, 0)),
        name=rules.get(1 << 3 | _BYTES, b"").decode(errors="replace"),
        precompiled_charsmap=rules.get(2 << 3 | _BYTES, b""),
        add_dummy_prefix=bool(rules.get(3 << 3, 1)),
        remove_extra_whitespaces=bool(rules.get(4 << 3, 1)),
        escape_whitespaces=bool(rules.get(5 << 3, 1)),
        normalization_rule_tsv=rules.get(6 << 3 | _BYTES, b"").decode(errors="replace"),
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


def to_tokenizer_json(model: SentencePieceModel, bos_id: int | None = None) -> bytes:
    """Convert a model to the bytes of a tokenizer.json.

    The piece ``bos_id`` is put in front of a prompt. ValueError names a property that a tokenizer.json cannot have.
    """
    _refuse_what_has_no_equal(model)
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(i, each.piece) for i, each in enumerate(model.pieces) if each.kind in _NEVER_TEXT],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model)},
        "pre_tokenizer": _pre_tokenizer(model),
        "post_processor": None if bos_id is None else _template(model.pieces[bos_id].piece, bos_id),
        "decoder": _decoder(model),
        "model": _unigram(model) if model.model_type == _UNIGRAM else _bpe(model),
    }
    return json.dumps(description, ensure_ascii=False, indent=2).encode()


_NEVER_TEXT = (_UNKNOWN, _CONTROL)  # types of pieces that no text can spell


def _refuse_what_has_no_equal(model: SentencePieceModel) -> None:
    if model.model_type == _WORD:
        raise ValueError("it is a model of whole words (model_type word)")
    if any(each.kind == _UNUSED for each in model.pieces):
        raise ValueError("some of its pieces are marked as unused")
    if not model.escape_whitespaces:
        raise ValueError("it does not spell spaces as ▁ (escape_whitespaces)")


def is_plain(model: SentencePieceModel) -> bool:
    """Return True if the model changes a text only by putting a space in front, and can encode any text."""
    changes = (model.precompiled_charsmap, model.normalization_rule_tsv, model.remove_extra_whitespaces)
    return (
        model.name == "identity"
        and not any((*changes, model.treat_whitespace_as_suffix))
        and all((model.add_dummy_prefix, model.escape_whitespaces, model.byte_fallback))
        and not any(each.kind in (_USER, _UNUSED) for each in model.pieces)
    )


def _special(index: int, piece: str) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": piece, **flags}


def _normalizers(model: SentencePieceModel) -> list[Json]:
    """List the changes of a text in SentencePiece's order: its rules, extra spaces, the dummy space, spaces as ▁."""
    found, after = list[Json](), list[Json]()
    if model.precompiled_charsmap:
        rules = tokenizers.normalizers.Precompiled(model.precompiled_charsmap)
        # SentencePiece applies no rule to the symbols of the user.
        changed = [each for each in model.symbols if rules.normalize_str(each) != each]
        for number, symbol in enumerate(changed, _STAND_IN):
            found.append(_replace({"String": symbol}, chr(number)))
            after.append(_replace({"String": chr(number)}, symbol))
        charsmap = base64.b64encode(model.precompiled_charsmap).decode()
        found += [*_groups(rules), {"type": "Precompiled", "precompiled_charsmap": charsmap}]
    if model.remove_extra_whitespaces:
        found += [_replace({"Regex": rf"\A +|[ {_SPACE}]+\z"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if model.add_dummy_prefix:
        end_of_text = {"Regex": r"(?<=[\s\S])\z"}  # an empty text stays empty
        suffix, prefix = _replace(end_of_text, _SPACE), {"type": "Prepend", "prepend": _SPACE}
        found.append(suffix if model.treat_whitespace_as_suffix else prefix)
    return [*found, _replace({"String": " "}, _SPACE), *after]


def _groups(rules: tokenizers.normalizers.Precompiled) -> list[Json]:
    # The library takes some groups of characters for one, and loses what SentencePiece keeps. A line end of two
    # characters gets the rules of both. Decomposed letters with several marks (Vietnamese, Hangul, kana) are composed
    # first: of their rules the library would apply the shortest.
    both = rules.normalize_str("\r") + rules.normalize_str("\n")
    found = [] if rules.normalize_str("\r\n") == both else [_replace({"String": "\r\n"}, both)]
    return [*found, *([{"type": "NFC"}] if rules.normalize_str("e\u0301") == "é" else [])]


def _replace(pattern: dict[str, str], content: str) -> Json:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _pre_tokenizer(model: SentencePieceModel) -> Json | None:
    """Build what keeps symbols whole, and names of control pieces in a text from becoming these pieces."""
    isolates = bool(model.symbols) and model.model_type != _UNIGRAM  # of which the scores decide
    if not isolates and model.model_type != _UNIGRAM:
        return None  # a merge makes only pieces of text
    text = [each.piece for each in model.pieces if each.kind == _NORMAL]
    joined = {piece[at : at + 2] for piece in text for at in range(len(piece) - 1)}
    never = [each.piece for each in model.pieces if each.kind in _NEVER_TEXT]
    names = [_cut_name(piece, joined) for piece in never if len(piece) > 1]
    if any(each.kind == _BYTE for each in model.pieces):
        names.append("<0x[0-9A-F]{2}(?=>)")
    steps = [_split("|".join(map(re.escape, model.symbols)), "Isolated")] if isolates else []
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


def _decoder(model: SentencePieceModel) -> Json:
    steps = [_replace({"String": _SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.add_dummy_prefix:
        at_end = int(model.treat_whitespace_as_suffix)
        steps.append({"type": "Strip", "content": " ", "start": 1 - at_end, "stop": at_end})
    return {"type": "Sequence", "decoders": steps}


def _bpe(model: SentencePieceModel) -> Json:
    normal = {piece: score for piece, score, kind in model.pieces if kind == _NORMAL}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": next(each.piece for each in model.pieces if each.kind == _UNKNOWN),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": bool(model.symbols),  # a symbol, which is isolated, is a piece
        "vocab": {each.piece: index for index, each in enumerate(model.pieces)},
        "merges": _merges(normal) if model.model_type == _BPE else [],
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


def _unigram(model: SentencePieceModel) -> Json:
    best = max((each.score for each in model.pieces if each.kind == _NORMAL), default=0.0)

    def score_of(piece: str, score: float, kind: int) -> float:
        return len(piece.encode()) * best - 0.1 if kind == _USER else score  # of bytes, as SentencePiece computes it

    return {
        "type": "Unigram",
        "unk_id": next(index for index, each in enumerate(model.pieces) if each.kind == _UNKNOWN),
        "byte_fallback": model.byte_fallback,
        "vocab": [[each.piece, score_of(*each)] for each in model.pieces],
    }
