"""The quickstart on a standard library of twelve files: every step runs and leaves its files."""

import json
import sysconfig
from pathlib import Path

import pytest

from hlat.quickstart import run_quickstart, standard_library
from hlat.runtime.errors import LaunchError


def test_the_standard_library_of_this_machine_is_found():
    sources = standard_library()
    assert any(source["path"].endswith("*.py") for source in sources)
    assert not any("site-packages" in source["path"] for source in sources)


def test_a_python_without_source_text_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    with pytest.raises(LaunchError, match=r"data\.path"):
        standard_library()


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    real = Path(sysconfig.get_paths()["stdlib"])
    root = tmp_path / "lib"
    (root / "json").mkdir(parents=True)
    (root / "site-packages" / "other").mkdir(parents=True)
    (root / "site-packages" / "other" / "not_ours.py").write_bytes(b"\xff not text")
    for file in sorted(real.glob("*.py"))[:40]:
        (root / file.name).write_bytes(file.read_bytes())
    for file in (real / "json").glob("*.py"):
        (root / "json" / file.name).write_bytes(file.read_bytes())
    paths = sysconfig.get_paths()  # libraries that are imported meanwhile ask for the others
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_, **__: {**paths, "stdlib": str(root)})


@pytest.mark.usefixtures("small_library")
def test_quickstart_goes_from_text_to_a_hugging_face_folder(tmp_path):
    said: list[str] = []
    result = run_quickstart(tmp_path / "quickstart", said.append, steps=4)
    metrics = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 4 and metrics[-1]["val_loss"] > 0
    assert (result.export_dir / "model.safetensors").is_file() and (result.export_dir / "tokenizer.json").is_file()
    assert (result.run_dir / "sample.txt").read_text().startswith("def read")
    page = result.report.read_text(encoding="utf-8")
    assert (
        f"{result.report}   what happened" in said[-1]
        and "Loss of training and validation" in page
        and "After the prompt" in page
    )
    assert str(result.export_dir) in said[-1] and "hlat generate" in said[-1]
    again = run_quickstart(tmp_path / "quickstart", said.append, steps=4)
    assert again.evaluation == result.evaluation, "a second call finds the work done"


def test_an_export_folder_from_elsewhere_is_refused_and_left_unchanged(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "my_model.txt").write_text("precious")
    with pytest.raises(LaunchError, match="--to"):
        run_quickstart(tmp_path, lambda line: None, steps=2)
    assert (tmp_path / "hf" / "my_model.txt").read_text() == "precious"
