"""Measurement of this machine, and its use as a catalog."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml

from hlat.hardware import MeasuredMachine, load_catalog, machine, measure_machine, parse_cluster
from hlat.runtime.errors import LaunchError


def test_a_measured_machine_becomes_a_catalog(tmp_path: Path) -> None:
    machine = measure_machine(torch.device("cpu"), budget_seconds=0.05)
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(machine.catalog("desk")), encoding="utf-8")
    cluster = parse_cluster("desk:3", load_catalog(str(file)))
    assert cluster.devices == 3
    assert cluster.memory_bytes == pytest.approx(machine.memory_bytes, rel=0.01)
    assert cluster.chip.flops("float32") == pytest.approx(machine.flops["float32"], rel=0.01)
    assert machine.link_rate is not None and machine.link_rate > 0 and machine.memory_rate > 0


def test_a_copy_counts_bytes_read_and_written() -> None:
    """Three seconds on a clock that advances one second per reading: 256 MiB per copy, read and written."""
    ticks = count()
    assert machine._copy_rate(torch.device("cpu"), 3.0, lambda: float(next(ticks))) == 2 * 256 * 2**20


def test_an_all_reduce_sends_twice_the_share_of_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(receive=lambda seconds: 0.5, kill=lambda: None)
    monkeypatch.setattr(machine, "start_program", lambda *_, **__: process)
    assert machine._all_reduce_rate("cpu", 4) == 2 * 3 / 4 * 32 * 2**20 / 0.5


def test_an_error_of_the_library_that_reduces_is_one_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(receive=Mock(side_effect=RuntimeError("gloo: no route")), kill=lambda: None)
    monkeypatch.setattr(machine, "start_program", lambda *_, **__: process)
    with pytest.raises(LaunchError, match="gloo: no route"):
        machine._all_reduce_rate("cpu", 2)


def test_a_cluster_has_the_measured_rates(tmp_path: Path) -> None:
    measured = MeasuredMachine("here", 2, {"bfloat16": 1e12, "float32": 5e11}, 24 << 30, 80e9, 3e9)
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(measured.catalog("desk")), encoding="utf-8")
    cluster = parse_cluster("desk:3", load_catalog(str(file)))
    assert (cluster.devices, cluster.memory_rate, cluster.link_rate) == (6, pytest.approx(80e9), pytest.approx(3e9))
