"""NCCL's limits and dumps agree with the detection of hangs; a named pipe and files stand for the library."""

import io
import os
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hlat.resilience import HEARTBEAT_FOLDER, Watchdog
from hlat.runtime.backend.device import restored_settings
from hlat.runtime.backend.faults import collect_dumps, request_dumps
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed import join
from hlat.runtime.distributed.join import device_group
from hlat.training import loop


@pytest.mark.parametrize("seconds", [60.0, 120.0, 7200.0])
def test_collectives_wait_longer_than_the_watchdog(seconds, tmp_path, monkeypatch):
    monkeypatch.delenv(HEARTBEAT_FOLDER, raising=False)
    watchdog = Watchdog(seconds)
    limits = watchdog.collective_limits(tmp_path)
    assert limits.patience is not None and limits.requests is None
    for phase in ("data", "forward", "reduce", "device", "saving"):
        assert limits.patience.total_seconds() > watchdog.limit(phase)
    assert Watchdog(None).collective_limits(tmp_path).patience == timedelta(days=1)


def set_for_cuda(limits, **chosen: str) -> dict[str, str]:
    """Variables that a process has then, in addition."""
    before = dict(os.environ)
    with restored_settings():
        os.environ.update(chosen)
        backend_of("cuda").configure_collectives(limits)
        return dict(os.environ.items() - before.items())


def test_the_flight_recorder_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv(HEARTBEAT_FOLDER, str(tmp_path / "beats"))
    limits = Watchdog(120.0).collective_limits(tmp_path / "logs")
    found = set_for_cuda(limits)
    assert found == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/logs/collectives-rank-",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/logs/collectives-rank-",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/beats/dump-",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2100",
    }
    kept = set_for_cuda(limits, TORCH_NCCL_DUMP_ON_TIMEOUT="0", TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="9")
    assert kept["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0" and kept["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "9"


def test_a_request_reaches_the_library_and_its_dump_is_kept_with_the_incident(tmp_path: Path):
    """As ProcessGroupNCCL.hpp reads: the rank and .pipe after the prefix, opened for reading without waiting."""
    assert not request_dumps(tmp_path), "nobody listens"
    pipe = tmp_path / "dump-3.pipe"
    os.mkfifo(pipe)
    assert not request_dumps(tmp_path), "its process has ended"
    library = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert request_dumps(tmp_path) and len(os.read(library, 128)) > 0
    finally:
        os.close(library)
    assert collect_dumps(tmp_path) is None
    for attempt in (1, 2):
        (tmp_path / "collectives-rank-3").write_text(f"attempt {attempt}")
        folder = collect_dumps(tmp_path)
        assert folder == tmp_path / f"incident-{attempt:04d}"
        assert (folder / "collectives-rank-3").read_text() == f"attempt {attempt}"
    assert collect_dumps(tmp_path) is None


def test_dumps_of_an_earlier_command_are_kept_but_not_counted_to_the_next_incident(tmp_path: Path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "collectives-rank-1").write_text("of a command whose incident nobody has recorded")
    with ExitStack() as stack:
        loop._take_lock(stack, SimpleNamespace(run_dir=tmp_path), io.StringIO())
    (logs / "collectives-rank-0").write_text("of this one")
    (logs / "incident-0001.tar.gz").touch()  # as users make to send one
    assert collect_dumps(logs) == logs / "incident-0002"
    found = [[file.name for file in folder.iterdir()] for folder in sorted(logs.glob("incident-000?"))]
    assert found == [["collectives-rank-1"], ["collectives-rank-0"]]


def test_every_group_for_devices_has_the_patience_of_the_run(monkeypatch):
    """Torch would give each new group of NCCL ten minutes."""
    asked = {}
    group = dist.ProcessGroup(0, 2)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: asked.update(options) or group)
    monkeypatch.setattr(join, "_patience", [timedelta(seconds=2100)])
    assert device_group([0, 2]) is group
    assert asked == {"timeout": timedelta(seconds=2100), "use_local_synchronization": True}
