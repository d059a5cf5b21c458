"""Fixture of the launch tests: a launcher in its own process, killed after the test."""

from pathlib import Path

import pytest

from tests.support.launch.launching import start_launcher, wait_for


@pytest.fixture
def stepping(tmp_path: Path):
    """Start the launcher on a scenario that steps until it is stopped; return it when every rank is stepping."""
    started = []

    def start(nproc: int = 2, **environment: str):
        process = start_launcher("wait_to_stop", tmp_path, nproc, environment)
        started.append(process)
        wait_for(*(tmp_path / f"pid-{rank}" for rank in range(nproc)))
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
