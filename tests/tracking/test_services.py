"""Offline runs of the services, read back by the services' own libraries.

Skipped where a library is not installed: pip install -e '.[wandb,mlflow,trackio]'.
"""

import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from hlat.config.load import parse_recipe
from hlat.tracking import read_metrics
from hlat.tracking.tensorboard import scalars
from hlat.training import run

TIMES = re.compile("train/(tokens_per_second|mfu|memory_bytes|seconds)")

Rows = list[tuple[int, dict[str, float]]]


def wandb_records(file: Path) -> Iterator[bytes]:
    """Split a .wandb file into records: LevelDB's log format after a header of 7 bytes, in blocks of 32 KiB.

    wandb 0.31 has no reader of its own in Python. A chunk has a checksum of 4 bytes, its length in 2 and its kind in 1:
    1 a complete record, 2, 3 and 4 the first, a middle and the last part of one. Fewer than 7 bytes at the end of a
    block are padding.
    """
    data, at, record = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (rest := -at % (32 << 10)) and rest < 7:
            at += rest
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def read_wandb(run_dir: Path) -> tuple[set[str], Rows]:
    """Read the ids and the history rows of all files, as the records of wandb's own protocol."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    ids, rows = set(), []
    for file in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        for data in wandb_records(file):
            record = records.Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                rows.append((row["_step"], {key: value for key, value in row.items() if not key.startswith("_")}))
    return ids, rows


def read_mlflow(run_dir: Path) -> tuple[set[str], Rows]:
    """Read the ids of the finished runs, and the histories of all metrics, with MLflow's client."""
    mlflow = importlib.import_module("mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run_dir / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("hlat")
    runs = client.search_runs([experiment.experiment_id])
    assert [each.info.status for each in runs] == ["FINISHED"]
    assert runs[0].data.params["optimizer.lr"] == "0.003" and runs[0].info.run_name == "tiny"
    rows: dict[int, dict[str, float]] = {}
    for key in runs[0].data.metrics:
        for metric in client.get_metric_history(runs[0].info.run_id, key):
            assert key not in rows.setdefault(metric.step, {}), (metric.step, key)
            rows[metric.step][key] = metric.value
    return {each.info.run_id for each in runs}, sorted(rows.items())


def read_trackio(run_dir: Path) -> tuple[set[str], Rows]:
    """Read the rows of all runs from Trackio's database with its own code, which finds its folder when imported."""
    program = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s; "
        "print(json.dumps({name: s.get_logs('hlat', name) for name in s.get_runs('hlat')}))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(run_dir / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, timeout=300
    )
    found = json.loads(done.stdout.splitlines()[-1])
    rows = [
        (row["step"], {key: value for key, value in row.items() if key not in ("step", "timestamp")})
        for run_rows in found.values()
        for row in run_rows
    ]
    return set(found), rows


READERS: dict[str, Callable[[Path], tuple[set[str], Rows]]] = {
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


def without(row: dict[str, float], tags: set[str]) -> dict[str, float]:
    return {tag: value for tag, value in row.items() if tag not in tags}


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A credential of each service in the environment, that may be in no file."""
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, "cafe" * 10)
    yield "cafe" * 10


@pytest.mark.parametrize("service", READERS)
def test_a_service_has_every_line_of_metrics_once_after_a_kill(
    service: str, tiny_recipe: str, corpus: Path, tmp_path: Path, secrets: str
) -> None:
    """The run goes on under the same id; steps that a kill repeats are not logged again."""
    pytest.importorskip(service, reason=f"pip install '.[{service}]': too large for every test environment")
    content = yaml.safe_load(tiny_recipe)
    run_dir = tmp_path / "run"
    content["run"] = {"name": "tiny", "dir": str(run_dir)}
    content["data"] |= {"path": str(corpus), "prepared_dir": str(tmp_path / "data")}
    content["training"] = {"steps": 8, "log_every": 1, "seed": 3, "stop_after": 5}
    content["checkpoint"] = {"every_steps": 3, "keep_last": 9, "background": False}
    content["tracking"] = {"tensorboard": False, service: {"mode": "offline"}, "flush_seconds": 300.0}
    said = io.StringIO()
    run(parse_recipe(content), stream=said)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000005")  # as if the run had been killed after its step 5
    content["training"]["stop_after"] = None
    run(parse_recipe(content), stream=said)
    assert "the run continues" not in said.getvalue() and "were not logged" not in said.getvalue(), said.getvalue()
    ids, rows = READERS[service](run_dir)
    assert len(ids) == 1 and ids == {json.loads((run_dir / "trackers" / f"{service}.json").read_text())["id"]}
    assert [step for step, _ in rows] == list(range(1, 9))
    lines = {line["step"]: scalars(line) for line in read_metrics(run_dir / "metrics.jsonl")}
    for step, row in rows:
        # steps 4 and 5 ran twice: metrics.jsonl has the times of the second, the service those of the first
        left_out = {tag for tag in {*row, *lines[step]} if step in (4, 5) and TIMES.match(tag)}
        assert without(row, left_out) == without(lines[step], left_out), step
    for file in (file for file in run_dir.rglob("*") if file.is_file()):
        assert secrets.encode() not in file.read_bytes(), file
