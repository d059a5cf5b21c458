"""Tracking: the metrics and events of a run, and their outputs: metrics.jsonl, events.jsonl, TensorBoard, console.

    training --> Tracker.log(metrics)   --> metrics.jsonl, TensorBoard, console
             --> Tracker.event(kind)    --> events.jsonl
             --> Tracker.message(text)  --> console

It receives plain numbers and does not depend on models, data or devices.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.tracking.display.console import prepare_streams as prepare_streams
    from hlat.tracking.display.console import shows_a_line as shows_a_line
    from hlat.tracking.display.console import shows_progress as shows_progress
    from hlat.tracking.display.data_progress import show_data_progress as show_data_progress
    from hlat.tracking.display.data_progress import show_progress as show_progress
    from hlat.tracking.display.start_display import show_stages as show_stages
    from hlat.tracking.events import EventLog as EventLog
    from hlat.tracking.events import read_events as read_events
    from hlat.tracking.hosted.table import check_installed as check_installed
    from hlat.tracking.json_console import event_line as event_line
    from hlat.tracking.jsonl import from_json_value as from_json_value
    from hlat.tracking.jsonl import iter_valid_records as iter_valid_records
    from hlat.tracking.jsonl import read_valid_records as read_valid_records
    from hlat.tracking.jsonl import to_json_value as to_json_value
    from hlat.tracking.log_stream import LogStream as LogStream
    from hlat.tracking.metrics import MetricsFile as MetricsFile
    from hlat.tracking.metrics import read_last_metrics as read_last_metrics
    from hlat.tracking.metrics import read_metrics as read_metrics
    from hlat.tracking.metrics_table import metrics_table as metrics_table
    from hlat.tracking.other_rank import OtherRankTracker as OtherRankTracker
    from hlat.tracking.samples import SAMPLES_NAME as SAMPLES_NAME
    from hlat.tracking.samples import GeneratedText as GeneratedText
    from hlat.tracking.samples import append_samples as append_samples
    from hlat.tracking.samples import read_samples as read_samples
    from hlat.tracking.tracker import Tracker as Tracker
    from hlat.tracking.tracker import open_tracker as open_tracker

__getattr__ = lazily(
    __name__,
    {
        "display.console": "prepare_streams shows_a_line shows_progress",
        "display.data_progress": "show_data_progress show_progress",
        "display.start_display": "show_stages",
        "events": "EventLog read_events",
        "hosted.table": "check_installed",
        "json_console": "event_line",
        "jsonl": "from_json_value iter_valid_records read_valid_records to_json_value",
        "log_stream": "LogStream",
        "metrics": "MetricsFile read_last_metrics read_metrics",
        "metrics_table": "metrics_table",
        "other_rank": "OtherRankTracker",
        "samples": "GeneratedText SAMPLES_NAME append_samples read_samples",
        "tracker": "Tracker open_tracker",
    },
)
