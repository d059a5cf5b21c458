"""The manifest of prepared data is damaged between two starts: an error is reported, or the run is unchanged."""

import json
from pathlib import Path

import pytest

from hlat.config import load_recipe
from hlat.runtime.errors import DataError
from hlat.training import run
from tests.support.same_runs import newest


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
