"""Metrics of long runs: what is read from a million lines, and the memory that takes."""

import json
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlat.reporting import read_overview
from hlat.tracking import metrics_table


def _write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _lines(count: int) -> list[dict[str, Any]]:
    draw = random.Random(0).random
    return [
        {
            "step": step,
            "tokens": step * 512,
            "loss": draw(),
            "lr": draw(),
            "seconds": {"data": draw(), "forward": draw()},
        }
        for step in range(1, count + 1)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_a_table_has_the_last_line_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Rows are converted a few at a time; a line that goes back drops rows of parts that were converted before."""
    monkeypatch.setattr(sys.modules["hlat.tracking.records"], "_ROWS", 3)
    draw, step, lines = random.Random(seed), 0, []
    for _ in range(60):
        step = max(1, step + draw.choice([1, 1, 1, 2, -1, -7]))
        line: dict[str, Any] = {"step": step, "whole": draw.randrange(1 << 60), "some": draw.choice([3, 0.5, "NaN"])}
        if draw.random() < 0.2:
            line |= {"rare": draw.random(), "nested": {"text": "x"}}
        lines.append(line)
    expected: list[dict[str, Any]] = []
    for line in lines:
        expected = [row for row in expected if row["step"] < line["step"]] + [line]
    table = metrics_table(_write(tmp_path / "run", lines))
    assert table.column("step").to_pylist() == [row["step"] for row in expected]
    assert table.column("whole").to_pylist() == [row["whole"] for row in expected]
    assert str(table.column("some").to_pylist()) == str([float(row["some"]) for row in expected])
    if "rare" in table.column_names:
        assert table.column("rare").to_pylist() == [row.get("rare") for row in expected]
        assert table.column("nested.text").to_pylist() == [row.get("nested", {}).get("text") for row in expected]


@pytest.mark.parametrize(("read", "bytes_per_line"), [(read_overview, 40), (metrics_table, 80)])
def test_a_line_takes_little_memory_while_and_after_it_is_read(
    tmp_path: Path, read: Callable[[Path], Any], bytes_per_line: int
) -> None:
    """As an object of Python a line of these takes about a thousand bytes."""
    peaks = []
    for count in (5_000, 20_000):
        run = _write(tmp_path / str(count), _lines(count))
        read(run)  # what is imported on first use
        tracemalloc.start()
        read(run)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 15_000 * bytes_per_line
