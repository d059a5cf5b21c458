"""What is measured of this machine can be planned with, as it stands."""

from pathlib import Path

import pytest
import torch
import yaml

from hlat.hardware import load_catalog, measure_machine, parse_cluster


def test_a_measured_machine_is_a_catalog(tmp_path: Path) -> None:
    machine = measure_machine(torch.device("cpu"), budget_seconds=0.05)
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(machine.catalog("desk")), encoding="utf-8")
    cluster = parse_cluster("desk:3", load_catalog(str(file)))
    assert cluster.devices == 3
    assert cluster.memory_bytes == pytest.approx(machine.memory_bytes, rel=0.01)
    assert cluster.chip.flops("float32") == pytest.approx(machine.flops["float32"], rel=0.01)
    assert machine.link_rate is not None
    # Two processes exchange through memory: each byte is copied several times, and cannot be faster than one copy.
    assert 0 < machine.link_rate < machine.memory_rate
