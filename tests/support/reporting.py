"""Folders of runs as ``hlat train`` writes them, with values that a test chooses, without training."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hlat.config import load_recipe

BEGIN = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()


def resolved_recipe(*overrides: str) -> dict[str, Any]:
    """A resolved recipe of 100 steps as JSON values."""
    words = ("data.path=none", "training.steps=100", "run.name=books", *overrides)
    return load_recipe("quickstart", words).model_dump(mode="json")


def event(kind: str, after: float, /, **fields: Any) -> dict[str, Any]:
    """An event, some seconds after the start of the run."""
    when = datetime.fromtimestamp(BEGIN + after, UTC).isoformat(timespec="milliseconds")
    return {"time": when, "event": kind, **fields}


def line(step: int, **more: Any) -> dict[str, Any]:
    """A line of metrics; a step takes 2 seconds and has 1,000 tokens."""
    values = {"step": step, "tokens": 1000 * step, "samples": 4 * step, "loss": 8.0 - step / 50, "lr": 1e-3}
    values |= {"grad_norm": 1.0, "param_norm": 50.0 + step / 100, "tokens_per_second": 500.0, "mfu": 0.4}
    values |= {"mfu_full": 0.45, "memory_bytes": 3 << 30, "seconds": {"forward": 6.0, "backward": 14.0}}
    return values | more


def write_run(
    folder: Path, lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] | None = None
) -> Path:
    """Write the folder of a run; by default it began once and goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = [event("start", 0, step=0, parameters=1_000_000, processes=1, device="cpu", recipe=resolved_recipe())]
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "events.jsonl", begun if events is None else events)
    return folder


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def figures(page: str) -> dict[str, dict[str, Any]]:
    """Contents that Plotly is given for each chart of a page, by title."""
    found = re.findall(r"<figcaption>(.*?)</figcaption>.*?application/json\">(.*?)</script>", page, re.DOTALL)
    return {title: json.loads(content) for title, content in found}


def curves(page: str, title: str) -> dict[str, dict[str, Any]]:
    """Curves of a chart by name: ``places`` on each horizontal axis, and ``y``."""
    return {trace["name"]: trace for trace in figures(page)[title]["data"] if trace.get("smooth")}
