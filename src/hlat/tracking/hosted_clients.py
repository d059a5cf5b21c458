"""Clients of the hosted trackers, which run in a helper process (``hosted.py``).

    tracking.wandb    Weights & Biases; offline runs are written to <run.dir>/wandb and sent by ``wandb sync``
    tracking.mlflow   MLflow; offline runs are written to the database <run.dir>/mlflow/mlflow.db
    tracking.trackio  Trackio; offline runs are written to databases in <run.dir>/trackio, for ``trackio show``

Each library is imported when its client is opened.
"""

import os
import time
import uuid
from collections.abc import Mapping

from hlat.tracking.hosted import HostedRun
from hlat.tracking.jsonl import flat_fields


class WandbClient:
    """A run of Weights & Biases. The API key comes from the environment or from ``wandb login``."""

    def open(self, run: HostedRun, saved_id: str | None) -> str:
        import wandb  # noqa: PLC0415

        run_id = saved_id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            id=run_id,
            name=run.name,
            project=run.settings["project"],
            entity=run.settings["entity"],
            group=run.settings["group"],
            tags=list(run.settings["tags"]),
            config=dict(run.recipe),
            dir=run.run_dir,
            mode=run.settings["mode"],
            resume=None if run.is_offline else "allow",
            # Nothing of this process's console, code or git state is recorded.
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True),
        )
        return run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


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
        parameters = [
            mlflow.entities.Param(name, str(value)[:_LONGEST]) for name, value in flat_fields(run.recipe).items()
        ]
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


class TrackioClient:
    """A run of Trackio. The Hugging Face token for a Space comes from the environment or from ``hf auth login``."""

    def open(self, run: HostedRun, saved_id: str | None) -> str:
        if run.is_offline:
            os.environ["TRACKIO_DIR"] = str(run.folder("trackio"))
        import trackio  # noqa: PLC0415

        # Trackio identifies a run by its name, which gets a suffix for that.
        name = saved_id or f"{run.name}-{os.urandom(4).hex()}"
        self._run = trackio.init(
            project=run.settings["project"],
            name=name,
            space_id=None if run.is_offline else run.settings["space"],
            config=dict(run.recipe),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()
