"""Helpers to prepare small corpora: settings, a record of the tokenized units, and a process that can be killed."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from hlat.config.sections.data import DataConfig
from hlat.data.prepare.work_units import WorkUnit
from hlat.data.prepare.worker import WorkerPool
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.samples.training_data import TrainingData

SMALL: dict[str, Any] = {"tokenizer": {"vocab_size": 400}, "validation": {"fraction": 0.2}, "shard_tokens": 5000}
LARGE: dict[str, Any] = {"tokenizer": {"vocab_size": 400, "train_bytes": 100_000}, "shard_tokens": 60_000}
UNIT = 50_000


class Watched(NamedTuple):
    """The files of an uninterrupted preparation, and the numbers of its units."""

    files: dict[str, bytes]
    units: set[int]


def data_config(path: Path | str, **more: Any) -> DataConfig:
    """Return a data section for a small corpus."""
    return DataConfig.model_validate({"path": str(path), **SMALL, **more})


def training_data(prepared: PreparedData, length: int, seed: int, shuffle: bool = True, **more: Any) -> TrainingData:
    """Open the samples of prepared data, with more settings of the data section."""
    section = {"path": "unused", "sequence_length": length, "shuffle": shuffle, **more}
    if "sources" in more:
        del section["path"]
    return TrainingData(prepared, DataConfig.model_validate(section), seed)


def watch_units(patch: pytest.MonkeyPatch) -> set[int]:
    """Return a set that collects the numbers of the units tokenized from now on."""
    seen: set[int] = set()
    run = WorkerPool.run

    def watched(pool: WorkerPool, units: Iterator[WorkUnit]) -> Iterator[int]:
        for number in run(pool, units):
            seen.add(number)
            yield number

    patch.setattr(WorkerPool, "run", watched)
    return seen


# Code for ``start``: finishes so many units and waits, as a busy machine may leave little time to kill it at work.
STUCK = """
import time
from hlat.data.prepare.worker import WorkerPool
run = WorkerPool.run
def stuck(pool, units):
    for done, number in enumerate(run(pool, units), start=1):
        yield number
        while done >= 6:
            time.sleep(0.01)
WorkerPool.run = stuck
"""


def start(config: DataConfig, out: Path, before: str = "") -> "subprocess.Popen[str]":
    """Start a preparation as a separate process in a new session; the code ``before`` is run first."""
    program = f"""
import sys
from hlat.config.sections.data import DataConfig
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.samples.training_data import TrainingData
from hlat.data.prepare.preparation import prepare
from hlat.runtime.errors import HlatError
import hlat.data.prepare.preparation
hlat.data.prepare.preparation._SMALLEST_UNIT = {UNIT}
{before}
try:
    prepare(DataConfig.model_validate_json(sys.argv[1]), sys.argv[2], workers=2)
except HlatError as error:
    print(error)
    sys.exit(error.exit_code)
"""
    command = [sys.executable, "-c", program, config.model_dump_json(), str(out)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def wait(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    """Wait until a condition holds, while the process is running; at most ten minutes."""
    deadline = time.monotonic() + 600
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def workers() -> list[psutil.Process]:
    """Return the tokenizing child processes of this process."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            found += [child] if "hlat.data.prepare.worker" in child.cmdline() else []
    return found


def finished_units(out: Path) -> list[Path]:
    """Return the index files of the finished units of an unfinished preparation."""
    return sorted((out / "partial" / "units").glob("*.json"))
