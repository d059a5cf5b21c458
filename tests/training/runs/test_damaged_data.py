"""The manifest of prepared data is damaged between two starts: an error is reported, or the run is unchanged."""

import json
from pathlib import Path

import pytest

from hlat.config import load_recipe
from hlat.runtime.errors import DataError
from hlat.training import run
from tests.support.same_runs import assert_same_run, newest


@pytest.fixture(scope="module")
def settings(corpus: Path, tiny_recipe: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "recipe.yaml").write_text(tiny_recipe)
    fewer = ["training.steps=8", "training.log_every=1", "checkpoint.every_steps=4", "evaluation.every_steps=8"]
    fewer += ["schedule.warmup_steps=2", "tracking.console=none", f"data.path={corpus}", "tracking.tensorboard=false"]
    return [str(folder / "recipe.yaml"), *fewer]


def train(settings: list[str], folder: Path, *more: str) -> None:
    run(load_recipe(settings[0], [*settings[1:], f"run.dir={folder}", *more]))


def change(folder: Path, old: bytes, new: bytes) -> None:
    file = folder / "data" / "manifest.json"
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new))


def test_a_run_does_not_resume_with_a_damaged_manifest(settings: list[str], tmp_path: Path) -> None:
    train(settings, tmp_path, "training.stop_after=4")
    manifest = (tmp_path / "data" / "manifest.json").read_bytes()
    tokens = json.loads(manifest)["splits"]["train"]["tokens"]
    fewer = tokens - 1000
    change(tmp_path, f'"tokens": {tokens}'.encode(), f'"tokens": {fewer}'.encode())
    with pytest.raises(DataError, match=r"manifest\.json: damaged: its content does not match the checksum in it"):
        train(settings, tmp_path)
    assert newest(tmp_path).meta["step"] == 4
    (tmp_path / "data" / "manifest.json").write_bytes(manifest)
    train(settings, tmp_path)
    assert newest(tmp_path).meta["step"] == 8


def test_a_run_resumes_with_data_prepared_before_there_were_checksums(settings: list[str], tmp_path: Path) -> None:
    train(settings, tmp_path / "straight")
    train(settings, tmp_path / "stopped", "training.stop_after=4")
    file = tmp_path / "stopped" / "data" / "manifest.json"
    stored = json.loads(file.read_bytes())
    del stored["checksum"]
    file.write_text(json.dumps(stored | {"format_version": 3}))
    train(settings, tmp_path / "stopped")
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
    fingerprint = newest(tmp_path / "straight").meta["data_fingerprint"]
    assert newest(tmp_path / "stopped").meta["data_fingerprint"] == fingerprint
