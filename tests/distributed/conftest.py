"""Pool of processes, shared by all tests of this package."""

from collections.abc import Iterator

import pytest

from tests.support.distributed.workers import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Pool of eight processes."""
    processes = Pool(8)
    yield processes
    processes.close()
