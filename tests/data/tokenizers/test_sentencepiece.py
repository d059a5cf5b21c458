"""SentencePiece models are read without protobuf, and have one encoder."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hlat.data.tokenizers.load import load_tokenizer
from hlat.data.tokenizers.sentencepiece_convert import parse_model
from tests.support.data.tokenizer_kinds import spm

sentencepiece = pytest.importorskip("sentencepiece")
PLAIN: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}


@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        {"model_type": "unigram", "user_defined_symbols": "<sep>,東"},
        {"model_type": "char", "add_dummy_prefix": False, "treat_whitespace_as_suffix": True},
    ],
)
def test_a_model_is_read_as_by_protobuf(options: dict[str, Any]) -> None:
    """Witness: the classes that protobuf's compiler made of the definition."""
    definition = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    content = sentencepiece.SentencePieceProcessor(model_proto=spm(**options)).serialized_model_proto()
    ours, theirs = parse_model(content), definition.ModelProto()
    theirs.ParseFromString(content)
    assert ours.pieces == [(each.piece, each.score, each.type) for each in theirs.pieces]
    for name, value in list(ours._asdict().items())[1:]:
        section = theirs.trainer_spec if hasattr(theirs.trainer_spec, name) else theirs.normalizer_spec
        assert value == getattr(section, name), name


def test_a_model_needs_no_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(spm(**PLAIN))
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    monkeypatch.delitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", raising=False)
    load_tokenizer(file).save(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
