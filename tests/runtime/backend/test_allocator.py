"""Freed memory is reused without page faults."""

import resource
import subprocess
import sys

import pytest

from hlat.runtime.backend.cpu import keep_freed_memory

PROGRAM = """
import resource, sys, torch
from hlat.runtime.distributed.join import join_run
if sys.argv[1] == "keep":
    join_run("cpu")
def allocate():
    torch.ones(16 << 20)
for _ in range(8):  # the heap grows until an aligned block fits next to small ones
    allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    allocate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    """Page faults of ten temporaries of 64 MiB, one after the other, after a warm-up of eight."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not keep_freed_memory(), reason="the C library of this machine has no mallopt")
def test_freed_temporaries_are_reused_without_page_faults() -> None:
    """Ten temporaries cause fewer page faults than one block has pages.

    Ten blocks of 64 MiB that are mapped again fault once per page each, unless the kernel uses huge pages; blocks that
    malloc keeps do not fault. The fewest of three attempts count: the kernel may reclaim idle memory of a busy machine.
    """
    pages = (64 << 20) // resource.getpagesize()
    assert min(page_faults("keep") for _ in range(3)) < pages
