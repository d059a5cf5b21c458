"""Metrics of a run for Prometheus: names, units and explanations (docs/operators.md lists them).

Quantities that a rollback or a restart takes back, such as steps and tokens, are gauges: Prometheus would take a
counter that falls for one that began anew at zero.
"""

from hlat.launch.metrics_server.exposition import MetricFamily
from hlat.launch.metrics_server.run_observer import ObservedRun, RunObservation
from hlat.runtime import version

_FROM_METRICS = {
    "step": ("hlat_logged_step", "Optimizer steps done at the last line of metrics, which the values below belong to."),
    "tokens": ("hlat_tokens", "Tokens of the steps done, at the last line of metrics."),
    "loss": ("hlat_loss", "Training loss in nats per token."),
    "val_loss": ("hlat_validation_loss", "Validation loss in nats per token, of the last validation."),
    "val_bits_per_byte": ("hlat_validation_bits_per_byte", "Validation loss in bits per byte of text."),
    "grad_norm": ("hlat_gradient_norm", "Global L2 norm of the gradient before clipping."),
    "lr": ("hlat_learning_rate", "Learning rate."),
    "tokens_per_second": ("hlat_tokens_per_second", "Training rate since the line of metrics before."),
    "mfu": ("hlat_mfu_ratio", "Model FLOP/s utilization, attention counted as causal."),
    "memory_bytes": ("hlat_memory_peak_bytes", "Peak device memory of the process that used most."),
    "memory_reserved_bytes": ("hlat_memory_reserved_bytes", "Peak that torch's allocator has reserved of it."),
    "memory_retries": ("hlat_memory_retries", "Times that the allocator gave memory back to find room."),
}


def metric_families(run: ObservedRun, status: RunObservation) -> list[MetricFamily]:
    """Return the metrics of a run; those that are not known yet have no series."""
    return [
        _gauge("hlat_run_info", "The run, as labels; always 1.", 1.0, name=run.name, version=version.hlat_version()),
        _gauge("hlat_healthy", "1 if the run is alive, as /healthz says.", float(status.trouble is None)),
        _gauge("hlat_training", "1 if every process has begun to train.", float(status.is_training)),
        _gauge("hlat_target_steps", "Optimizer steps of the recipe.", run.total_steps),
        *_progress(status),
        *_recovery(status),
        *(_gauge(name, text, _number(status.metrics.get(key))) for key, (name, text) in _FROM_METRICS.items()),
    ]


def _progress(status: RunObservation) -> list[MetricFamily]:
    steps = [beat.step for beat in status.beats]
    states = (beat.start_step if beat.durable_step is None else beat.durable_step for beat in status.beats)
    durable = [step for step in states if step is not None]  # a process starts from a durable state
    ages = [({"rank": str(rank)}, age) for rank, age in status.heartbeat_ages.items()]
    return [
        _gauge("hlat_step", "Optimizer steps done, now.", max(steps, default=_number(status.metrics.get("step")))),
        _gauge("hlat_durable_step", "Newest step that survives a failure.", max(durable, default=None)),
        _gauge("hlat_processes", "Processes of the run that have a heartbeat.", len(status.beats)),
        MetricFamily("hlat_heartbeat_age_seconds", "gauge", "Time since the last heartbeat of a rank.", ages),
        _gauge("hlat_checkpoint_age_seconds", "Time since the newest checkpoint.", status.checkpoint_age),
    ]


def _recovery(status: RunObservation) -> list[MetricFamily]:
    total = sum(status.goodput.values())
    parts = [({"part": part}, seconds) for part, seconds in status.goodput.items()]
    events = [({"event": kind}, float(count)) for kind, count in sorted(status.events.items())]
    share = status.goodput["productive"] / total if total > 0 else None
    return [
        MetricFamily("hlat_restarts_total", "counter", "Restarts by this command.", [({}, status.attempts - 1.0)]),
        MetricFamily("hlat_events_total", "counter", "Events in the history of the run.", events),
        MetricFamily("hlat_goodput_seconds", "gauge", "Time of this command by what it was spent on.", parts),
        _gauge("hlat_goodput_ratio", "Productive share of the time of this command.", share),
    ]


def _gauge(name: str, text: str, value: float | None, /, **labels: str) -> MetricFamily:
    return MetricFamily(name, "gauge", text, [] if value is None else [(labels, value)])


def _number(value: object) -> float | None:
    """Return a metric as a number; None if it is missing, or another program wrote something else."""
    return float(value) if isinstance(value, int | float) else None
