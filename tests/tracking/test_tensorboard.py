"""TensorBoard's own reader finds every value, once per step, also after a resume."""

import io
import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from hlat.runtime.errors import StorageError
from hlat.tracking import tensorboard as writer_module
from hlat.tracking.tensorboard import (
    TensorBoard,
    crc32c,
    scalars,
    scalars_event,
    start_event,
    version_event,
    write_record,
)

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


def test_files_are_written_without_tensorboard_and_protobuf(tmp_path: Path) -> None:
    """They are not installed with hlat; here they cannot be imported."""
    code = """
import sys
from pathlib import Path
sys.modules.update(dict.fromkeys(("tensorboard", "google", "google.protobuf", "grpc", "tensorflow")))
from hlat.tracking.tensorboard import TensorBoard
TensorBoard(Path(sys.argv[1]), start_step=0).log({"step": 3, "loss": 0.5})
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path) == {"train/loss": [(3, 0.5)]}


class Sink:
    """File that takes at most 7 bytes per write, as a file may."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, data: bytes) -> int:
        self.content += bytes(data[:7])
        return min(len(data), 7)


FLOATS = st.floats(width=32, allow_nan=False)


@given(
    st.floats(min_value=1, max_value=1e11),
    st.integers(min_value=0, max_value=2**62),
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200), FLOATS, max_size=5),
)
@example(1.7e9, 0, {"train/loss": math.inf, "train/größe": -math.inf, "zero": 0.0})
def test_records_have_the_bytes_of_tensorboards_own_writer(time: float, step: int, values: dict[str, float]) -> None:
    theirs, ours = Sink(), Sink()
    points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    contents = (
        (version_event(time, step), {"file_version": "brain.Event:2"}),
        (start_event(time, step), {"session_log": SessionLog(status=SessionLog.START)}),
        (scalars_event(time, step, values), {"summary": Summary(value=points)}),
    )
    for event, content in contents:
        witness = Event(wall_time=time, step=step, **content).SerializeToString()
        # The witness stores a scalar of zero too: it is one of several alternatives of a value.
        assert event == witness
        write_record(ours, event)  # type: ignore[arg-type]
        whole = io.BytesIO()
        RecordWriter(whole).write(witness)
        theirs.content += whole.getvalue()
    assert ours.content == theirs.content


def test_a_checksum_is_that_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # check value of CRC-32C, RFC 3720
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4: 32 bytes of zeroes


def test_a_value_beyond_float32_is_infinite_and_nan_stays_nan(tmp_path: Path) -> None:
    writer = TensorBoard(tmp_path, start_step=0)
    writer.log({"step": 1, "loss": 1e300, "lr": -1e300, "grad_norm": math.nan})
    writer.close()
    found = read(tmp_path)
    assert found["train/loss"] == [(1, math.inf)] and found["train/lr"] == [(1, -math.inf)]
    assert math.isnan(found["train/grad_norm"][0][1])


def test_a_run_that_was_rolled_back_shows_each_step_once_with_its_last_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_FILES", itertools.count(9))  # as text, 10 is before 9
    writer = TensorBoard(tmp_path, start_step=0)
    for step in (1, 2, 3, 4):
        writer.log({"step": step, "loss": 0.5})
    writer.rewind(2)
    for step in (3, 4, 5):
        writer.log({"step": step, "loss": 2.5})
    writer.close()
    assert read(tmp_path)["train/loss"] == [(1, 0.5), (2, 0.5), (3, 2.5), (4, 2.5), (5, 2.5)]
