"""Tracking: the metrics and events of a run, and their outputs: metrics.jsonl, events.jsonl, TensorBoard, console.

    training --> Tracker.log(metrics)   --> metrics.jsonl, TensorBoard, console
             --> Tracker.event(kind)    --> events.jsonl
             --> Tracker.message(text)  --> console

It receives plain numbers and does not depend on models, data or devices.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.tracking.console import event_line as event_line
    from hlat.tracking.console import prepare_streams as prepare_streams
    from hlat.tracking.console import shows_a_line as shows_a_line
    from hlat.tracking.console import shows_progress as shows_progress
    from hlat.tracking.hosted import check_installed as check_installed
    from hlat.tracking.jsonl import from_json_value as from_json_value
    from hlat.tracking.jsonl import iter_valid_records as iter_valid_records
    from hlat.tracking.jsonl import read_valid_records as read_valid_records
    from hlat.tracking.jsonl import to_json_value as to_json_value
    from hlat.tracking.progress import show_data_progress as show_data_progress
    from hlat.tracking.progress import show_progress as show_progress
    from hlat.tracking.progress import show_stages as show_stages
    from hlat.tracking.records import SAMPLES_NAME as SAMPLES_NAME
    from hlat.tracking.records import EventLog as EventLog
    from hlat.tracking.records import GeneratedText as GeneratedText
    from hlat.tracking.records import MetricsFile as MetricsFile
    from hlat.tracking.records import append_samples as append_samples
    from hlat.tracking.records import metrics_table as metrics_table
    from hlat.tracking.records import read_events as read_events
    from hlat.tracking.records import read_last_metrics as read_last_metrics
    from hlat.tracking.records import read_metrics as read_metrics
    from hlat.tracking.records import read_samples as read_samples
    from hlat.tracking.tracker import LogStream as LogStream
    from hlat.tracking.tracker import OtherRankTracker as OtherRankTracker
    from hlat.tracking.tracker import Tracker as Tracker
    from hlat.tracking.tracker import open_tracker as open_tracker

__getattr__ = lazily(
    __name__,
    {
        "console": "event_line prepare_streams shows_a_line shows_progress",
        "hosted": "check_installed",
        "jsonl": "from_json_value iter_valid_records read_valid_records to_json_value",
        "progress": "show_data_progress show_progress show_stages",
        "records": (
            "EventLog GeneratedText MetricsFile SAMPLES_NAME append_samples metrics_table read_events "
            "read_last_metrics read_metrics read_samples"
        ),
        "tracker": "LogStream OtherRankTracker Tracker open_tracker",
    },
)
