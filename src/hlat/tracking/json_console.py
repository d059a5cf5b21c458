"""Console output of a run as JSON lines, for log collectors (docs/operators.md).

logged step --> event "step", its metrics as values      message --> event "message"
event of events.jsonl --> the same event, its fields as values
"""

from collections.abc import Mapping
from typing import Any, TextIO

from hlat.runtime.process.json_output import json_line
from hlat.tracking.jsonl import to_json_value
from hlat.tracking.metrics import Metrics
from hlat.tracking.metrics_text import progress, values

_LEVELS = {
    **dict.fromkeys(("error", "incident", "hang", "corruption", "checkpoint_failed", "snapshot_failed"), "error"),
    **dict.fromkeys(
        (
            "anomaly",
            "checkpoint_damaged",
            "checkpoint_prune_failed",
            "checkpoint_retry",
            "component_dropped",
            "corruption_explained",
            "evaluation_failed",
            "export_failed",
            "leader",
            "metrics_damaged",
            "output_lost",
            "record_restored",
            "resized",
            "remote_failed",
            "rollback",
            "saver_lost",
            "slow_rank",
            "storage_slow",
            "tensorboard_dropped",
            "tracker_failed",
            "tracker_lost",
        ),
        "warning",
    ),
}
_LONG = ("recipe", "stack")  # fields of events.jsonl that are left out: thousands of characters


def event_line(kind: str, fields: Mapping[str, Any], rank: int | None) -> str:
    """Return the log line of an event.

    Args:
        kind: name of the event.
        fields: its fields in events.jsonl; ``step`` and ``message`` have places of their own.
        rank: rank that reports it; None for the supervisor, whose events name the rank that they are about.
    """
    rest = {name: value for name, value in fields.items() if name not in ("step", "message", *_LONG)}
    about = rest.get("rank") if rank is None else rank
    message = str(fields.get("message", fields.get("detail", kind.replace("_", " "))))
    level, values_ = _LEVELS.get(kind, "info"), to_json_value(rest)
    return json_line(kind, message, level=level, rank=about, step=fields.get("step"), values=values_)


class JsonConsole:
    """Console of rank 0 with one JSON object per line, flushed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Print the line of a logged step."""
        found = {**metrics, "total_steps": total_steps, "eta_seconds": eta_seconds}
        text = f"{progress(metrics['step'], total_steps, eta_seconds)}  {values(metrics)}"
        self._print(json_line("step", text, rank=0, step=found.pop("step"), values=to_json_value(found)))

    def step(self, step: int, total_steps: int, eta_seconds: float | None) -> None:
        """Print nothing: a logged step has a line."""

    def message(self, text: str) -> None:
        """Print the line of a message."""
        self._print(json_line("message", text, rank=0))

    def warning(self, text: str) -> None:
        """Print the line of a warning."""
        self._print(json_line("message", text, rank=0, level="warning"))

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Print the line of an event."""
        self._print(event_line(kind, fields, rank=0))

    def close(self) -> None:
        """Do nothing: the stream stays open."""

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
