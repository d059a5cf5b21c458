"""The metric stream of a run and who reads it: metrics.jsonl, events.jsonl, TensorBoard, the console.

    training --> Tracker.log(metrics)   --> metrics.jsonl, TensorBoard, console
             --> Tracker.event(kind)    --> events.jsonl
             --> Tracker.message(text)  --> console

It receives plain numbers and knows nothing of models, data or devices.
"""

from hlat.tracking.events import EventLog, read_events
from hlat.tracking.jsonl import expressible, with_non_finite
from hlat.tracking.metrics import Metrics, MetricsFile, read_metrics
from hlat.tracking.other_rank import OtherRank
from hlat.tracking.tracker import Tracker, open_tracker

__all__ = [
    "EventLog",
    "Metrics",
    "MetricsFile",
    "OtherRank",
    "Tracker",
    "expressible",
    "open_tracker",
    "read_events",
    "read_metrics",
    "with_non_finite",
]
