"""Fixtures of runs whose checkpoints are copied to a real S3-protocol server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hlat.checkpoint import object_store as objects
from hlat.runtime.errors import CheckpointError, HlatError
from hlat.runtime.storage.object_stores import open_filesystem
from tests.support.checkpoint.remote_runs import Run
from tests.support.object_store import ObjectStore


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """S3 server with an empty bucket."""
    with ObjectStore(tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture
def s3(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The server without injected faults, and environment variables that point to it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    # One connection per test: connecting takes longer than most tests.
    backend = open_filesystem("s3://corpus", CheckpointError)[0]

    def connected(url: str, wrong: type[HlatError]) -> tuple[Any, str]:
        return backend, url.removeprefix("s3://")

    monkeypatch.setattr(objects, "open_filesystem", connected)
    yield server
    server.misbehave()


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """URL of a prefix that no other test uses."""
    return f"s3://corpus/{abs(hash(request.node.nodeid))}"


@pytest.fixture
def run(tmp_path: Path, url: str, s3: ObjectStore) -> Run:
    return Run(tmp_path / "run", url)
