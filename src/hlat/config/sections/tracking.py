"""The section ``tracking``: console, TensorBoard, and services that get the metrics too."""

from typing import Annotated, Literal

from pydantic import Field

from hlat.config.sections.base import Section


class _HostedConfig(Section):
    """A service that gets the metrics of a run; credentials come from the environment."""

    mode: Literal["online", "offline"] = "online"
    """offline uses no network and writes files in the run's folder."""


class TrackingConfig(Section):
    """Outputs of the metrics besides metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Write TensorBoard event files to <run.dir>/tensorboard."""
    console: Literal["auto", "rich", "plain", "none"] = "auto"
    """Progress bar (rich), plain lines, or nothing; auto takes the bar on a terminal."""
    flush_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """Seconds that the end of a run may wait for these services."""
