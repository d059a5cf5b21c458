"""Tracking: the metrics and events of a run, and their outputs: metrics.jsonl, events.jsonl, TensorBoard, console.

    training --> Tracker.log(metrics)   --> metrics.jsonl, TensorBoard, console
             --> Tracker.event(kind)    --> events.jsonl
             --> Tracker.message(text)  --> console

It receives plain numbers and does not depend on models, data or devices.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.tracking.console import *
    from hlat.tracking.hosted import *
    from hlat.tracking.jsonl import *
    from hlat.tracking.progress import *
    from hlat.tracking.records import *
    from hlat.tracking.tracker import *

__getattr__ = lazily(
    __name__,
    {
        "console": "event_line prepare_streams shows_a_line shows_progress",
        "hosted": "check_installed own_trackers",
        "jsonl": "decode_record flat_fields from_json_value iter_valid_records read_valid_records to_json_value",
        "progress": "StepLine show_data_progress show_progress show_stages",
        "records": (
            "EventLog GeneratedText MetricsFile SAMPLES_NAME append_samples metrics_table read_events "
            "read_last_metrics read_metrics read_samples"
        ),
        "tracker": "LAST_SAVE LogStream OtherRankTracker Tracker open_tracker",
    },
)
