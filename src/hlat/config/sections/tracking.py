"""The section ``tracking``: console, TensorBoard, and services that get the metrics too."""

from ipaddress import IPv4Address
from typing import Annotated, Literal

from pydantic import Field, IPvAnyAddress

from hlat.config.sections.base import Section
from hlat.config.sections.quantities import Duration


class _HostedConfig(Section):
    """A service that gets the metrics of a run; credentials come from the environment."""

    mode: Literal["online", "offline"] = "online"
    """offline uses no network and writes files in the run's folder."""


class WandbConfig(_HostedConfig):
    """Weights & Biases (pip install 'hlat[wandb]'); offline files are in <run.dir>/wandb, for wandb sync."""

    project: str = "hlat"
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the project; null for the default of the API key."""
    group: str | None = None
    """Group of runs; null for none."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""


class MlflowConfig(_HostedConfig):
    """MLflow (pip install 'hlat[mlflow]'); offline a database in <run.dir>/mlflow, for mlflow server."""

    experiment: str = "hlat"
    """Experiment of the run; created if it does not exist."""
    uri: str | None = None
    """URL of the tracking server; null takes MLFLOW_TRACKING_URI from the environment."""


class TrackioConfig(_HostedConfig):
    """Trackio (pip install 'hlat[trackio]'); offline databases are in <run.dir>/trackio, for trackio show."""

    project: str = "hlat"
    """Project of the run."""
    space: str | None = None
    """Hugging Face Space (owner/name) that shows the run; null for Trackio's folder on this machine."""


class PrometheusConfig(Section):
    """Server of /metrics for Prometheus, and of /healthz and /readyz for probes (docs/operators.md)."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """TCP port; 0 takes a free one, which is printed."""
    address: IPvAnyAddress = IPv4Address("127.0.0.1")
    """IP address to listen on; 0.0.0.0 for every interface, as Kubernetes' HTTP probes need."""


class TrackingConfig(Section):
    """Outputs of the metrics besides metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Write TensorBoard event files to <run.dir>/tensorboard."""
    console: Literal["auto", "rich", "plain", "json", "warnings", "none"] = "auto"
    """Progress bar (rich), plain lines, JSON lines, warnings only, or nothing; auto takes the bar on a terminal."""
    prometheus: PrometheusConfig | None = None
    """Metrics for Prometheus and health for probes, over HTTP; null for none."""
    wandb: WandbConfig | None = None
    """Weights & Biases; null for none."""
    mlflow: MlflowConfig | None = None
    """MLflow; null for none."""
    trackio: TrackioConfig | None = None
    """Trackio; null for none."""
    flush_seconds: Annotated[Duration, Field(ge=0, le=3600)] = 30.0
    """Seconds that the end of a run may wait for these services."""
