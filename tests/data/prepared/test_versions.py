"""Prepared data of every format version stays readable, and all versions are in one table.

``versions/format-3.tar.xz`` was written by the last commit before format 4 (3f0fb2f).
"""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from hlat.config import load_recipe
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared import manifest as record_formats
from hlat.data.prepared.manifest import read_data_manifest, write_data_manifest
from hlat.data.prepared.prepared_folder import open_prepared
from hlat.runtime.errors import DataError

RECIPE = """
model: {vocab_size: 18, layers: 1, hidden_size: 8, intermediate_size: 16, heads: 2}
data: {sequence_length: 16, tokenizer: {train: char}, validation: {fraction: 0.1, by: tail}}
training: {steps: 1}
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder with data of format 3 in ``data``, and its text."""
    with tarfile.open(Path(__file__).parent / "versions" / "format-3.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_format_3_has_the_tokens_of_its_text(old: Path):
    """The witness is the text: the tokenizer has one token per character."""
    prepared = open_prepared(old / "data")
    tokens = np.concatenate(
        [np.fromfile(old / "data" / f"{name}-00000.bin", "<u2") for name in ("train", "validation")]
    )
    assert prepared.tokenizer.decode(tokens.tolist()) == (old / "text.txt").read_text()
    assert prepared.manifest.format_version == 3 and not prepared.manifest.has_checksum
    assert "no checksum" in prepared.advice[0]


def test_format_4_of_the_same_text_has_the_same_fingerprint(old: Path):
    """So that a run whose data is prepared again can resume."""
    (old / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(old / "recipe.yaml", [f"data.path={old / 'text.txt'}"])
    new = prepare(recipe.data, old / "new")
    assert new.manifest.format_version == record_formats.FORMAT_VERSION
    assert new.fingerprint == open_prepared(old / "data").fingerprint


def test_a_later_version_is_one_entry_of_the_table(old: Path, monkeypatch: pytest.MonkeyPatch):
    upside_down = record_formats.RecordFormat(
        5,
        lambda record: {"format_version": 5, "content": record},
        lambda stored: stored["content"],
        has_checksum=False,
    )
    monkeypatch.setitem(record_formats.RECORD_FORMATS, 5, upside_down)
    monkeypatch.setattr("hlat.data.prepared.manifest.FORMAT_VERSION", 5)
    manifest = read_data_manifest(old / "data")
    write_data_manifest(old / "data", manifest)
    assert set(json.loads((old / "data" / "manifest.json").read_text())) == {"format_version", "content"}
    again = read_data_manifest(old / "data")
    assert again.model_dump() == manifest.model_dump() | {"format_version": 5}
    assert not again.has_checksum


def test_a_newer_version_is_refused_by_number(old: Path):
    path = old / "data" / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 3', '"format_version": 9'))
    with pytest.raises(DataError, match="data format 9; this version reads 3 and 4"):
        read_data_manifest(old / "data")
