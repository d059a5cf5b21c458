"""An export keeps what of a tokenizer_config.json has an id; the rest is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import load_tokenizer
from hlat.runtime.errors import DataError
from tests.support.data.tokenizer_kinds import EOS, byte_bpe


def test_named_special_tokens_stay_named(tmp_path: Path) -> None:
    """Witness: transformers, which gives them as attributes."""
    transformers = pytest.importorskip("transformers")
    config: dict[str, Any] = {"extra_special_tokens": {"image_token": "<image>", "gone_token": "<gone>"}}
    ours = Tokenizer(byte_bpe((EOS, "<image>")).to_str().encode(), config, EOS)
    ours.save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    assert saved["extra_special_tokens"] == {"image_token": "<image>"}
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.image_token == "<image>" and len(theirs) == ours.vocab_size
    assert "<gone>" in ours.left_out[0]


def test_tokens_that_only_added_tokens_decoder_names_are_told() -> None:
    decoder = {"0": {"content": EOS, "special": True}, "9999": {"content": "<tool>", "special": False}}
    ours = Tokenizer(byte_bpe().to_str().encode(), {"added_tokens_decoder": decoder}, EOS)
    assert ours.left_out == ("tokens of its configuration without an id (<tool>)",)
    assert not Tokenizer(byte_bpe().to_str().encode(), {"added_tokens_decoder": [5]}, EOS).left_out


def test_a_configuration_that_was_not_fetched_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_bpe().to_str())
    file = tmp_path / "tokenizer_config.json"
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 12345\n")
    with pytest.raises(DataError, match=rf"{file}.*Git LFS pointer"):
        load_tokenizer(tmp_path)
