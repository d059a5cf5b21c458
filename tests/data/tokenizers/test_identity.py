"""The identity of a tokenizer changes with its ids, and an export has the ids of training."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hlat.data.prepared.consistency import tokenizer_problems
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import check_export, load_saved, load_tokenizer, vocabulary_texts
from hlat.runtime.errors import DataError
from tests.support.data.tokenizer_kinds import EOS, TEXTS, byte_bpe, spm


def _hash_of_file(content: bytes, tokenizer: Any) -> str:
    """Compute the identity of a tokenizer whose ids the file that was given decides alone."""
    return hashlib.sha256(content + json.dumps([tokenizer.eos_id, tokenizer.vocab_size]).encode()).hexdigest()


def _problems(tokenizer: Any, sha256: str) -> str:
    manifest: Any = SimpleNamespace(tokenizer_sha256=sha256, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)
    return "; ".join(tokenizer_problems(manifest, tokenizer))


def test_sentencepiece_models_that_are_encoded_by_their_conversion_have_another_identity(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    plain = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    for name, options, same in (("plain", plain, True), ("rules", {}, False)):
        content = spm(model_type="bpe", **options)
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.model").write_bytes(content)
        ours = load_tokenizer(tmp_path / name)
        assert (ours.sha256 == _hash_of_file(content, ours)) is same
        ours.save(tmp_path / name)
        assert load_saved(tmp_path / name).sha256 == ours.sha256
        assert not _problems(ours, ours.sha256) and "not the tokenizer" in _problems(ours, "0")


@pytest.mark.parametrize("eos", ["auto", EOS, "<mark>", None])
def test_a_token_that_the_configuration_makes_special_is_in_the_identity(tmp_path: Path, eos: str | None) -> None:
    """Witness: the ids of a document with the name of the token, by the tokenizer that was saved."""
    made = json.loads(byte_bpe().to_str())
    ids = made["model"]["vocab"].values()
    made["added_tokens"].append({**made["added_tokens"][0], "content": "<mark>", "special": False})
    made["added_tokens"][-1]["id"] = max(*ids, made["added_tokens"][0]["id"]) + 1
    content = json.dumps(made).encode()
    without = Tokenizer(content, None, EOS)
    ours = Tokenizer(content, {"eos_token": EOS, "extra_special_tokens": {"mark_token": "<mark>"}}, eos)
    assert without.sha256 == _hash_of_file(content, without)
    assert len(without.encode("a<mark>")) < len(ours.encode("a<mark>"))
    assert ours.sha256 != _hash_of_file(content, ours)
    ours.save(tmp_path)
    saved = load_saved(tmp_path)
    assert (saved.sha256, saved.encode("a<mark>")) == (ours.sha256, ours.encode("a<mark>"))


def test_dropout_is_in_the_identity() -> None:
    """With it ids would be random: data that was prepared so is not data of the tokenizer without it."""
    made = json.loads(byte_bpe().to_str())
    content = json.dumps(made | {"model": made["model"] | {"dropout": 0.1}}).encode()
    ours = Tokenizer(content)
    assert "not the tokenizer" in _problems(ours, _hash_of_file(content, ours))


def test_an_export_with_other_ids_is_refused() -> None:
    """Witness: a vocabulary of which two tokens are exchanged in the file."""
    ours = Tokenizer(byte_bpe().to_str().encode())
    check_export(ours, TEXTS)
    check_export(ours, vocabulary_texts(ours))
    made = json.loads(ours.files["tokenizer.json"])
    vocab = made["model"]["vocab"]
    vocab["e"], vocab["o"] = vocab["o"], vocab["e"]
    ours.files["tokenizer.json"] = json.dumps(made).encode()
    for texts in (TEXTS, vocabulary_texts(ours)):
        with pytest.raises(DataError, match="other ids than in training"):
            check_export(ours, texts)
