"""The versions of the checkpoint format: each has a reader, in one table, and old checkpoints stay readable.

``versions/format-N.tar.xz`` is a small checkpoint of version N with its text and recipe. Version 1 was written by the
first commit of hlat that trained (31c6249), which also wrote ``model.safetensors``, its export, and
``metrics-3-4.jsonl``, the metrics of its own next two steps.
"""

import json
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hlat.checkpoint import export_hf, list_checkpoints
from hlat.checkpoint.format import FORMATS
from hlat.checkpoint.protocol.reader import open_checkpoint, resolve, verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config import load_recipe
from hlat.runtime.errors import CheckpointFormatError
from hlat.tracking import read_metrics
from hlat.training import run
from tests.support.checkpoint.format_2 import Format2
from tests.support.checkpoint.saved_states import assert_equal, save, state

FOLDER = Path(__file__).parent / "versions"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A run folder with the checkpoint of version 1, which is of step 2 of 4."""
    with tarfile.open(FOLDER / "format-1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "step-00000002").rename(tmp_path / "run" / "checkpoints" / "step-00000002")
    return tmp_path


def resume(old: Path) -> Path:
    """Train steps 3 and 4 in this process; return the last checkpoint."""
    overrides = [f"data.path={old / 'text.txt'}", f"run.dir={old / 'run'}", "tracking.console=none"]
    outcome = run(load_recipe(old / "recipe.yaml", [*overrides, "checkpoint.background=false"]))
    assert outcome.finished and outcome.checkpoint is not None
    return outcome.checkpoint


def test_every_version_has_a_checkpoint_here():
    assert sorted(path.name for path in FOLDER.glob("*.tar.xz")) == [f"format-{version}.tar.xz" for version in FORMATS]


def test_the_tensors_of_version_1_are_those_that_torch_reads(old: Path):
    """DCP's own reader is the witness; it unpickles the index, so only files that are trusted may go through it."""
    folder = old / "run" / "checkpoints" / "step-00000002"
    assert verify_checkpoint(folder) == []
    checkpoint = open_checkpoint(folder)
    theirs = {name: torch.empty(meta.shape, dtype=meta.dtype) for name, meta in checkpoint.tensors.items()}
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert_equal(checkpoint.load(""), theirs)


def test_version_1_exports_to_the_same_bytes(old: Path):
    exported = export_hf(old / "run", old / "hf")
    assert (exported / "model.safetensors").read_bytes() == (old / "model.safetensors").read_bytes()


def test_a_run_resumes_from_version_1(old: Path):
    resume(old)
    assert [entry.state for entry in list_checkpoints(old / "run" / "checkpoints")] == ["committed"] * 2
    ours, theirs = read_metrics(old / "run" / "metrics.jsonl"), read_metrics(old / "metrics-3-4.jsonl")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [3, 4]
    for line, recorded in zip(ours, theirs, strict=True):
        assert line["samples"] == recorded["samples"]
        # Products of at most 18 terms and sums of 64 losses in fp32, on another processor: 82 roundings of 2^-24 are
        # 5e-6. Another batch, or a state without the optimizer's moments, changes the loss by more.
        assert line["loss"] == pytest.approx(recorded["loss"], rel=5e-6)


def test_a_later_version_takes_a_new_file_and_a_line_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With version 2 in the table all of hlat writes it, and reads both."""
    store = CheckpointStore(tmp_path / "checkpoints", 3)
    first = save(store, 1)
    monkeypatch.setitem(FORMATS, 2, Format2())
    second = save(store, 2)
    assert [json.loads((path / "manifest.json").read_text())["format"] for path in (first, second)] == [1, 2]
    assert not (second / ".metadata").exists()
    for step, path in enumerate((first, second), 1):
        assert verify_checkpoint(path) == []
        assert_equal(open_checkpoint(path).load(""), state(step))
    assert [entry.state for entry in list_checkpoints(store.root)] == ["committed"] * 2
    about = second / "about.json"
    about.write_bytes(about.read_bytes() + b" ")
    assert [entry.state for entry in list_checkpoints(store.root)] == ["committed", "damaged"]
    assert store.newest_step() == 1, "damage of version 2 is found by the same protocol"


def test_a_run_of_version_1_goes_on_in_version_2(old: Path, monkeypatch: pytest.MonkeyPatch):
    """The same bits as in version 1: resumed from it, saved, and exported."""
    begin = old / "begin"
    (old / "run").rename(begin)
    weights = []
    for version in (1, 2):
        if version == 2:
            monkeypatch.setitem(FORMATS, 2, Format2())
        (old / "run").mkdir()
        _copy(begin / "checkpoints", old / "run" / "checkpoints")
        last = resume(old)
        assert json.loads((last / "manifest.json").read_text())["format"] == version
        weights.append((export_hf(last, old / f"hf-{version}") / "model.safetensors").read_bytes())
        states = open_checkpoint(last).load("optimizer.")
        weights.append({name: tensor.numpy().tobytes() for name, tensor in states.items()})
        (old / "run").rename(old / f"run-{version}")
    assert weights[:2] == weights[2:]


def _copy(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            new = target / path.relative_to(source)
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(path.read_bytes())


def test_a_checkpoint_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path):
    store = CheckpointStore(tmp_path / "checkpoints", 3)
    save(store, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, 2, Format2())
        newer = save(store, 2)
    before = sorted(store.root.rglob("*"))
    for opening in (store.newest, lambda: resolve(tmp_path), lambda: resolve(newer), lambda: open_checkpoint(newer)):
        with pytest.raises(CheckpointFormatError, match=r"step-00000002.*format 2 is newer than format 1") as refused:
            opening()
        assert "Use the version of hlat that wrote it" in str(refused.value)
    assert sorted(store.root.rglob("*")) == before, "it was not set aside as damaged"
    entry = list_checkpoints(store.root)[1]
    assert entry.state == "newer format" and "format 2" in entry.problem
    assert store.prune() == [] and newer.exists()
