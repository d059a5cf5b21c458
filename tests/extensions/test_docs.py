"""docs/extend.md: its examples are one module, and its table is a recipe that trains with all of them."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
from hlat.config import load_recipe
from hlat.data import open_prepared
from hlat.data.prepare.preparation import prepare
from hlat.training import run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extend.md").read_text(encoding="utf-8")


@pytest.fixture
def mine(content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe as the table has it, and beside it the module of the examples."""
    (tmp_path / "mine.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    rows = [row.split("|") for row in PAGE.splitlines() if row.startswith("| ") and "`hlat." in row]
    assert len(rows) == 8
    for name in ("architecture", "residual_scale"):
        del content["model"][name]
    content["optimizer"], content["schedule"], content["tracking"]["trackers"] = {}, {"warmup_steps": 2}, {}
    content["training"] |= {"loss_terms": {}, "components": {}}
    for row in rows:
        for section, fields in yaml.safe_load(row[2].strip(" `")).items():
            content[section] |= fields
    content["training"]["components"]["mine:LargestWeight"] = {"every_steps": 3}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path / "recipe.yaml"


def test_the_examples_train(mine: Path) -> None:
    recipe, stream = load_recipe(mine), io.StringIO()
    names = ["Lion", "inverse_sqrt", "label_smoothing", "PARALLEL", "Paragraphs", "LargestWeight", "Lines", "colours"]
    assert {f"mine:{name}" for name in names} <= set(recipe.own_parts)
    run(recipe, stream=stream)
    assert stream.getvalue().count("largest weight ") == 2
    tensors = open_checkpoint(resolve(recipe.run_dir)).tensors
    assert any(name.startswith("largest-weight.model.") for name in tensors)
    assert any(name.startswith("optimizer.momentum.model.") for name in tensors)
    assert len((recipe.run_dir / "lines.txt").read_text().splitlines()) == recipe.total_steps
    sys.modules.pop("mine")


def test_the_format_of_the_examples_reads_what_jsonl_has(mine: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(mine.read_text())
    texts = [f"the cat sees river {number} and tree {number % 7}." for number in range(300)]
    tokens = []
    for ending, body in (
        ("para", "\n\n".join(texts)),
        ("jsonl", "\n".join(json.dumps({"text": text}) for text in texts)),
    ):
        (tmp_path / f"corpus.{ending}").write_text(body)
        data = content["data"] | {"path": str(tmp_path / f"corpus.{ending}"), "prepared_dir": str(tmp_path / ending)}
        config = load_recipe(mine, [f"data={json.dumps(data)}"]).data
        prepared = prepare(config, tmp_path / ending, workers=2)
        tokens.append((prepared.train_tokens, prepared.validation_tokens, prepared.tokenizer.sha256))
        assert open_prepared(tmp_path / ending, config)
    assert tokens[0] == tokens[1] and tokens[0][0] > 1000
    sys.modules.pop("mine")
