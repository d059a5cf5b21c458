"""The pool of processes, one for all tests here."""

from collections.abc import Iterator

import pytest

from tests.support.distributed.workers import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight processes."""
    processes = Pool(8)
    yield processes
    processes.close()
