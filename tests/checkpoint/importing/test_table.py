"""Formats are found by the files in a folder; a folder of none of them is refused with all that are known."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from hlat.checkpoint import has_tokenizer, import_model
from hlat.config.sections.model import ModelConfig
from hlat.model import build
from hlat.model.hf.folder import write_hf
from hlat.runtime.errors import CheckpointError
from tests.support.model.canonical import to_canonical

CONFIG = ModelConfig(
    vocab_size=40, layers=1, hidden_size=16, intermediate_size=24, heads=2, kv_heads=1, max_sequence_length=8
)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    weights = to_canonical(CONFIG, dict(build(CONFIG, device="cpu", seed=1).named_parameters()))
    return write_hf(tmp_path / "hf", CONFIG, weights, dtype=torch.float32, eos_id=None, bos_id=None)


def test_a_folder_of_no_known_format_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for folder, reason in ((tmp_path, "nothing in it is recognised"), (tmp_path / "absent", "no such folder")):
        with pytest.raises(CheckpointError, match=reason) as refused:
            import_model(folder, tmp_path / "out")
        assert all(name in str(refused.value) for name in ("config.json", "tp_rank_XX_pp_rank_XX.pt", ".metadata"))


def test_a_checkpoint_of_hlat_is_not_taken_for_one_of_torchtitan(tmp_path: Path, hf: Path) -> None:
    imported = import_model(hf, tmp_path / "imported")
    with pytest.raises(CheckpointError, match="nothing in it is recognised"):
        import_model(imported, tmp_path / "out", model="llama-2-7b")


def test_a_model_beside_config_json_is_refused(tmp_path: Path, hf: Path) -> None:
    with pytest.raises(CheckpointError, match="leave out --model"):
        import_model(hf, tmp_path / "out", model="llama-2-7b")


def test_a_tokenizer_may_come_from_elsewhere(tmp_path: Path, hf: Path) -> None:
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")).save(str(file))
    assert not has_tokenizer(import_model(hf, tmp_path / "without"))
    assert has_tokenizer(import_model(hf, tmp_path / "with", tokenizer=file))
    stored = tmp_path / "with" / "tokenizer" / "tokenizer.json"
    assert json.loads(stored.read_text()) == json.loads(file.read_text())
    with pytest.raises(CheckpointError, match="no tokenizer there"):
        import_model(hf, tmp_path / "out", tokenizer=tmp_path / "with")
