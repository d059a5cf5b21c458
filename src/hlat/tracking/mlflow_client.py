"""MLflow: ``tracking.mlflow``; offline runs are written to the database <run.dir>/mlflow/mlflow.db."""

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from hlat.tracking.hosted import HostedRun

_MOST_PARAMETERS = 100  # of a request, by MLflow's REST API
_LONGEST = 500  # characters of a parameter's value: a limit that all releases of the server accept


class MlflowClient:
    """A run of an MLflow tracking server. Credentials come from the environment (``MLFLOW_TRACKING_TOKEN``, ...)."""

    def open(self, run: HostedRun, saved_id: str | None) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow  # noqa: PLC0415

        self._client = mlflow.MlflowClient(tracking_uri=_uri(run))
        if saved_id is None:
            self._id = self._create(run)
        else:
            self._id = saved_id
            self._client.update_run(self._id, status="RUNNING")
        self._metric = mlflow.entities.Metric
        return self._id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[self._metric(tag, value, now, step) for tag, value in values.items()])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")

    def _create(self, run: HostedRun) -> str:
        import mlflow  # noqa: PLC0415

        name = run.settings["experiment"]
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            artifacts = run.folder("mlflow").absolute().as_uri() if run.is_offline else None
            experiment_id = self._client.create_experiment(name, artifact_location=artifacts)
        created: str = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        # The fields of the recipe are the parameters of the run.
        parameters = [mlflow.entities.Param(name, str(value)[:_LONGEST]) for name, value in _fields(run.recipe)]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(created, params=parameters[first : first + _MOST_PARAMETERS])
        return created


def _uri(run: HostedRun) -> str:
    if run.is_offline:
        return f"sqlite:///{run.folder('mlflow').absolute() / 'mlflow.db'}"
    uri = run.settings["uri"] or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise ValueError("no server: give tracking.mlflow.uri, set MLFLOW_TRACKING_URI, or use mode=offline")
    return str(uri)


def _fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
