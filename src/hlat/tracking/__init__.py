"""Tracking: the metrics and events of a run, and their outputs: metrics.jsonl, events.jsonl, TensorBoard, console.

    training --> Tracker.log(metrics)   --> metrics.jsonl, TensorBoard, console
             --> Tracker.event(kind)    --> events.jsonl
             --> Tracker.message(text)  --> console

It receives plain numbers and does not depend on models, data or devices.
"""

from hlat.tracking.events import EventLog, read_events
from hlat.tracking.json_console import event_line
from hlat.tracking.jsonl import from_json_value, iter_valid_records, read_valid_records, to_json_value
from hlat.tracking.log_stream import LogStream
from hlat.tracking.metrics import MetricsFile, read_last_metrics, read_metrics
from hlat.tracking.metrics_table import metrics_table
from hlat.tracking.other_rank import OtherRankTracker
from hlat.tracking.samples import SAMPLES_NAME, GeneratedText, append_samples, read_samples
from hlat.tracking.tracker import Tracker, open_tracker

__all__ = [
    "SAMPLES_NAME",
    "EventLog",
    "GeneratedText",
    "LogStream",
    "MetricsFile",
    "OtherRankTracker",
    "Tracker",
    "append_samples",
    "event_line",
    "from_json_value",
    "iter_valid_records",
    "metrics_table",
    "open_tracker",
    "read_events",
    "read_last_metrics",
    "read_metrics",
    "read_samples",
    "read_valid_records",
    "to_json_value",
]
