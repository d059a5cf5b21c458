"""TensorBoard's own reader finds every value, once per step, also after a resume."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hlat.runtime import StorageError
from hlat.tracking import tensorboard
from hlat.tracking.tensorboard import TensorBoard, scalars

LINE = {
    "step": 10,
    "loss": 2.5,
    "val_loss": 2.75,
    "val_bits_per_byte": 1.9,
    "lr": 3e-4,
    "memory_bytes": 1 << 30,
    "batch_crc32": 12345,
    "seconds": {"data": 0.5, "optimizer": 0.25},
}


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_line_of_metrics_becomes_scalars_under_train_and_validation() -> None:
    assert scalars(LINE) == {
        "train/loss": 2.5,
        "validation/loss": 2.75,
        "validation/bits_per_byte": 1.9,
        "train/lr": 3e-4,
        "train/memory_bytes": float(1 << 30),
        "train/seconds/data": 0.5,
        "train/seconds/optimizer": 0.25,
    }


def test_a_resumed_run_shows_each_step_once_with_its_last_value(tmp_path: Path) -> None:
    for start, last, offset in ((0, 5, 0.0), (2, 4, 100.0), (3, 6, 200.0)):
        writer = TensorBoard(tmp_path, start_step=start)
        for step in range(start + 1, last + 1):
            writer.log({"step": step, "loss": step / 7 + offset})
        writer.close()
    expected = {1: 0.0, 2: 0.0, 3: 100.0, 4: 200.0, 5: 200.0, 6: 200.0}
    # TensorBoard stores float32.
    wanted = [(step, float(np.float32(step / 7 + offset))) for step, offset in expected.items()]
    assert read(tmp_path)["train/loss"] == wanted


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="tensorboard: cannot write TensorBoard events"):
        TensorBoard(tmp_path / "tensorboard", start_step=0)


def test_tensorboard_is_imported_only_when_used() -> None:
    code = "import sys, hlat.tracking; sys.exit(any(name.startswith('tensorboard') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_that_was_rolled_back_shows_each_step_once_with_its_last_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "_FILES", itertools.count(9))  # as text, 10 is before 9
    writer = TensorBoard(tmp_path, start_step=0)
    for step in (1, 2, 3, 4):
        writer.log({"step": step, "loss": 0.5})
    writer.rewind(2)
    for step in (3, 4, 5):
        writer.log({"step": step, "loss": 2.5})
    writer.close()
    assert read(tmp_path)["train/loss"] == [(1, 0.5), (2, 0.5), (3, 2.5), (4, 2.5), (5, 2.5)]
