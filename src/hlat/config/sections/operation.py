"""The sections of a recipe about the operation of a run: saving, recovery, faults, and tracking.

    checkpoint, recovery, anomalies, integrity, faults    what is saved, and what happens when something fails
    tracking                                              console, TensorBoard, and services that get the metrics too

One sentence per field: this file is the manual.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address
from typing import Annotated, Any, Literal

from pydantic import Field, IPvAnyAddress

from hlat.config.errors import Problem, RecipeError
from hlat.config.sections.base import Count, Duration, OwnName, Positive, Seconds, Section, Whole
from hlat.runtime.terminal import listed


class LocalSnapshotsConfig(Section):
    """Frequent copies of the state on each machine, besides the checkpoints of the run."""

    dir: str
    """Folder on each machine, on its own disk or in its memory (/dev/shm/...); {node} in it is the machine's number."""
    every_seconds: Seconds = 60.0
    """Seconds between two snapshots, by the clock of rank 0."""
    replicate: bool = True
    """Copy each machine's snapshot to another machine too, so that losing one machine loses nothing."""


class ExportConfig(Section):
    """Hugging Face weights beside checkpoints, written by a process of its own while training continues."""

    every_steps: Positive
    """Steps between two exports; a checkpoint is saved at each of them."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the files; null for that of the weights."""
    weights: Literal["model", "ema"] = "model"
    """The weights, or their average (training.ema)."""
    dir: str | None = None
    """Folder of the exports, each in a folder of its step; null means <run.dir>/exports."""


class CheckpointConfig(Section):
    """Saving the state of the run, and how many checkpoints are kept."""

    every_steps: Positive | None = 500
    """Steps between two checkpoints; null saves only at the end."""
    keep_last: Positive = 3
    """Number of newest checkpoints that are kept."""
    keep_every_steps: Positive | None = None
    """Checkpoints at multiples of this are kept for ever."""
    init_from: str | None = None
    """Checkpoint, Hugging Face folder or id of a model of the Hub whose weights the run starts from; null starts from
    random weights. model.from sets it together with the model and its tokenizer."""
    background: bool = True
    """Write checkpoints in a helper process of each rank; costs a second copy of the state in host memory."""
    retries: Count = 3
    """Retries of a save that failed, after 1, 2, 4, ... seconds, at most a minute."""
    failures: Positive = 5
    """Saves in a row that may fail, each with its retries, before the run ends."""
    remote: str | None = None
    """URL (s3://bucket/prefix) of an object store where every checkpoint is kept too; null for none."""
    local: LocalSnapshotsConfig | None = None
    """Snapshots on each machine, more frequent than checkpoints; null for none."""
    export: ExportConfig | None = None
    """Hugging Face weights beside checkpoints at chosen steps; null for none."""


class RecoveryConfig(Section):
    """Restarts, detection of hangs, and deadlines."""

    restarts: Count = 3
    """Restarts in a row that may bring no new checkpoint before the run is given up; 0 never restarts."""
    backoff_seconds: Annotated[Duration, Field(ge=0)] = 1.0
    """Pause before a restart; doubled after each in a row without a new checkpoint, up to a minute."""
    hang_seconds: Seconds | None = 120.0
    """A phase of a step longer than this and than ten times its longest so far is a hang, and so is a save without
    progress for this long; a slow disk is none. null for no check."""
    slow_factor: Annotated[float, Field(gt=1)] = 2.0
    """A rank whose steps take this many times as long as the others' is reported as a straggler."""
    deadline_seconds: Seconds | None = None
    """Seconds after the start of the command at which the run saves and stops, to be queued again; null for none."""


class AnomalyConfig(Section):
    """Reaction to numbers that are not finite, to spikes of the loss or the gradient norm, and to losses off course."""

    non_finite: Literal["skip", "stop"] = "skip"
    """skip leaves weights and moments as they are and goes on with the next batch; stop ends the run."""
    spike: Literal["ignore", "warn", "skip", "rollback"] = "warn"
    """skip does not apply the update; rollback returns to the checkpoint before it and leaves those samples out."""
    threshold: Annotated[float, Field(gt=0)] = 20.0
    """Robust standard deviations above the median of the window at which a value is a spike."""
    window: Annotated[Whole, Field(ge=8)] = 128
    """Steps in the window of the statistics; nothing counts as a spike before a quarter of them has run."""
    budget: Positive = 10
    """Steps within one window that may be skipped or rolled back before the run stops."""
    forecast: Literal["ignore", "warn", "stop"] = "warn"
    """Reaction to a validation loss that is above the forecast (run.ladder) for longer than noise explains."""


class IntegrityConfig(Section):
    """Comparison of replicas of weights and optimizer state, which must be equal, to find silent corruption."""

    every_steps: Positive | None = None
    """Steps between two comparisons; null compares before every checkpoint only."""
    before_saves: bool = True
    """Compare replicas before every save."""


ProcessFault = Literal[
    "kill", "stop", "hang", "deadlock", "exception", "oom", "slow", "nan", "spike", "bitflip", "sigterm", "sigusr1"
]
StorageFault = Literal["enospc", "eio", "torn_write", "corrupt", "slow_disk", "unavailable"]


class FaultConfig(Section):
    """A fault that is injected on purpose; the command needs --allow-faults."""

    kind: Literal[ProcessFault, StorageFault]
    """Kind of fault; docs/recovery.md describes each."""
    at_step: Positive
    """Optimizer step, counted from 1, in which it happens; for a storage fault the first step whose saves it hits."""
    rank: Count = 0
    """Rank that it happens on."""
    phase: Literal["data", "forward", "backward", "reduce", "optimizer", "evaluation", "checkpoint"] = "forward"
    """Phase of the step in which it happens; ignored by spikes and storage faults."""
    seconds: Seconds = 3600.0
    """Seconds that a hang lasts, or by which slow delays the rank in each step."""
    steps: Positive = 1
    """Steps that slow lasts, or saves that a storage fault lasts."""


def refuse_faults(faults: Sequence[FaultConfig], allowed: bool) -> None:
    """Raise RecipeError for injected faults that the user has not allowed."""
    # A recipe from elsewhere must not make a run fail.
    if faults and not allowed:
        kinds = listed(f"{fault.kind} at step {fault.at_step}" for fault in faults)
        remedy = "Give --allow-faults if the run is to fail in these ways, or remove them."
        raise RecipeError([Problem("faults", f"the recipe asks for faults: {kinds}.", remedy)])


class _HostedConfig(Section):
    """A service that gets the metrics of a run; credentials come from the environment."""

    mode: Literal["online", "offline"] = "online"
    """offline uses no network and writes files in the run's folder."""


class WandbConfig(_HostedConfig):
    """Weights & Biases (the extra wandb, docs/install.md); offline files are in <run.dir>/wandb, for wandb sync."""

    project: str = "hlat"
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the project; null for the default of the API key."""
    group: str | None = None
    """Group of runs; null for none."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""


class MlflowConfig(_HostedConfig):
    """MLflow (the extra mlflow, docs/install.md); offline a database in <run.dir>/mlflow, for mlflow server."""

    experiment: str = "hlat"
    """Experiment of the run; created if it does not exist."""
    uri: str | None = None
    """URL of the tracking server; null takes MLFLOW_TRACKING_URI from the environment."""


class TrackioConfig(_HostedConfig):
    """Trackio (the extra trackio, docs/install.md); offline databases are in <run.dir>/trackio, for trackio show."""

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
    trackers: dict[OwnName, dict[str, Any]] = {}
    """Trackers of your own, by name (package.module:Name, or an entry point of hlat.trackers), with options."""
    flush_seconds: Annotated[Duration, Field(ge=0, le=3600)] = 30.0
    """Seconds that the end of a run may wait for these services."""
