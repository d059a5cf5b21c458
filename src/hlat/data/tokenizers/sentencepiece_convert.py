"""Convert a SentencePiece BPE model to a tokenizer.json, for libraries without SentencePiece.

Both merge the best pair of neighbours first, and the leftmost of equal pairs. So the conversion ranks every pair that
forms a piece by the score of the piece. Runs of spaces, which all have the same score in Llama's models, are merged
from the left one by one; ranking the longest run first gives the same result. An exported model has this file next to
its .model, because transformers 5 ranks by id when it loads a .model alone, and then splits indented text differently.

A model is converted only if its normalizer is "identity", it puts a space in front of a text, has byte fallback and no
user-defined pieces. Preparation always encodes with the sentencepiece library; only readers of the result use this.
"""

import json
from typing import Any

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # ModelProto.SentencePiece.Type
_BPE = 2  # TrainerSpec.ModelType
_SPACE = "▁"


def to_tokenizer_json(proto: Any, bos_id: int | None = None) -> bytes | None:
    """Convert a parsed ModelProto to the bytes of a tokenizer.json; return None if it cannot be converted.

    Args:
        proto: the model.
        bos_id: id of the piece to put in front of a prompt; None for none.
    """
    pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    if not is_plain(proto) or proto.trainer_spec.model_type != _BPE:
        return None
    if any(kind not in (_NORMAL, _UNKNOWN, _CONTROL, _BYTE) for _, _, kind in pieces):
        return None
    normal = {piece: score for piece, score, kind in pieces if kind == _NORMAL}
    vocabulary = {piece: index for index, (piece, _, _) in enumerate(pieces)}
    special = [(i, piece) for i, (piece, _, kind) in enumerate(pieces) if kind in (_UNKNOWN, _CONTROL)]
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": piece,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, piece in special
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": _SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None if bos_id is None else _template(pieces[bos_id][0], bos_id),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": next(piece for piece, _, kind in pieces if kind == _UNKNOWN),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": _merges(normal),
        },
    }
    return json.dumps(description, ensure_ascii=False, indent=2).encode()


def _template(piece: str, index: int) -> dict[str, Any]:
    """Build a post-processor that puts one piece in front of every text."""
    begin, text = {"SpecialToken": {"id": piece, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, begin, other],
        "special_tokens": {piece: {"id": piece, "ids": [index], "tokens": [piece]}},
    }


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
    )


def _merges(normal: dict[str, float]) -> list[list[str]]:
    """List every pair of pieces that forms another piece, best first."""
    ranked = []
    for piece, score in normal.items():
        spaces = not piece.strip(_SPACE)
        for split in range(1, len(piece)):
            left, right = piece[:split], piece[split:]
            if left in normal and right in normal and (right == _SPACE or not spaces):
                ranked.append((-score, -len(piece) if spaces else 0, split, left, right))
    return [[left, right] for *_, left, right in sorted(ranked, key=lambda merge: merge[:3])]
