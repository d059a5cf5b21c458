"""The tokenizer of a checkpoint, and its comparison with the tokenizer of prepared data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from hlat.checkpoint import check_same_tokenizer, has_tokenizer, read_tokenizer
from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config.sections.data import DataConfig
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.runtime.errors import CheckpointError, DataError

TEXT = "one two three two one " * 40


def word_tokenizer(folder: Path, words: str, config: dict[str, Any] | None = None) -> Path:
    """Write a word-level tokenizer: three special tokens, then the words in the given order."""
    folder.mkdir()
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *words.split()])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def prepared_with(folder: Path, tokenizer: Path, **section: Any) -> PreparedData:
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    content: dict[str, Any] = {"path": str(folder / "text.txt"), "tokenizer": {"path": str(tokenizer), **section}}
    content["validation"] = {"fraction": 0}
    return prepare(DataConfig.model_validate(content), folder / "prepared", workers=1)


def checkpoint_with(folder: Path, tokenizer: Path | None, meta: dict[str, Any]) -> Path:
    files = {f"tokenizer/{file.name}": file for file in tokenizer.iterdir()} if tokenizer is not None else {}
    weights = replicated_chunks({"model.w": torch.zeros(2)})
    return CheckpointStore(folder / "checkpoints", 1).save(1, weights, meta, files)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return word_tokenizer(tmp_path / "tokenizer", "one two three")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Tokenizer of the same size with other ids for all words, so that using it would not crash."""
    return word_tokenizer(tmp_path / "other", "three two one")


@pytest.mark.parametrize("meta", [{"recipe": {}}, {"special_ids": {}}], ids=["run", "import"])
def test_a_checkpoint_with_another_tokenizer_than_the_data_is_refused(
    tmp_path: Path, tokenizer: Path, other: Path, meta: dict[str, Any]
) -> None:
    prepared = prepared_with(tmp_path / "data", tokenizer)
    files = (
        prepared.dir / "tokenizer" if "recipe" in meta else tokenizer
    )  # the checkpoint of a run has the tokenizer files of the prepared data
    same = checkpoint_with(tmp_path / "same", files, meta)
    differs = checkpoint_with(tmp_path / "differs", other, meta)
    check_same_tokenizer(same, prepared)
    with pytest.raises(DataError, match=rf"data\.tokenizer\.path={differs / 'tokenizer'}"):
        check_same_tokenizer(differs, prepared)


@pytest.mark.parametrize("eos", ["<s>", None])
def test_the_end_of_document_token_is_not_compared(tmp_path: Path, tokenizer: Path, eos: str | None) -> None:
    prepared = prepared_with(tmp_path / "data", tokenizer, eos_token=eos)
    check_same_tokenizer(checkpoint_with(tmp_path / "run", tokenizer, {"special_ids": {}}), prepared)


def test_a_tokenizer_without_the_end_of_document_token_is_another_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    prepared = prepared_with(tmp_path / "data", tokenizer, eos_token="three")
    without = checkpoint_with(tmp_path / "run", word_tokenizer(tmp_path / "short", "one two"), {"recipe": {}})
    with pytest.raises(DataError, match="another tokenizer"):
        check_same_tokenizer(without, prepared)


def test_a_checkpoint_without_a_tokenizer_passes(tmp_path: Path, tokenizer: Path) -> None:
    bare = checkpoint_with(tmp_path / "run", None, {})
    assert not has_tokenizer(bare)
    check_same_tokenizer(bare, prepared_with(tmp_path / "data", tokenizer))
    with pytest.raises(CheckpointError, match=r"has no tokenizer.*run hlat import again") as refused:
        read_tokenizer(bare)
    assert "data.tokenizer" not in str(refused.value), "there is no recipe to set it in"


def test_a_sentencepiece_model_and_its_conversion_are_the_same_tokenizer(tmp_path: Path) -> None:
    """The data is prepared from the .model, or from the tokenizer.json next to it in the checkpoint."""
    sentencepiece = pytest.importorskip("sentencepiece")
    source = tmp_path / "pieces"
    source.mkdir()
    (source / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(source / "text"), model_prefix=str(source / "tokenizer"), model_type="bpe", vocab_size=290,
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )  # fmt: skip
    from_pieces = prepared_with(tmp_path / "a", source / "tokenizer.model")
    run = checkpoint_with(tmp_path / "run", from_pieces.dir / "tokenizer", {"recipe": {}})
    assert (run / "tokenizer" / "tokenizer.json").is_file(), "both forms are in the checkpoint"
    from_json = prepared_with(tmp_path / "b", run / "tokenizer")
    assert from_json.manifest.tokenizer_sha256 != from_pieces.manifest.tokenizer_sha256
    check_same_tokenizer(run, from_pieces)
    check_same_tokenizer(run, from_json)
