"""A stage of a pipeline, and the messages that it sends."""

from hlat.parallel.pipeline.outbox import Outbox
from hlat.parallel.pipeline.stage import ReportingStage

__all__ = ["Outbox", "ReportingStage"]
