"""Memory that a process has freed is used again without asking the kernel for it."""

import resource
import subprocess
import sys

import pytest

from hlat.runtime.backend import keep_freed_memory

PROGRAM = """
import resource, sys, torch
from hlat.runtime.distributed import join_run
if sys.argv[1] == "keep":
    join_run("cpu")
def turn():
    torch.ones(16 << 20)
for _ in range(8):  # the heap grows until an aligned block fits into it beside small ones
    turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Page faults of ten temporaries of 64 MiB, one after the other, after eight of them."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not keep_freed_memory(), reason="the C library of this machine has no mallopt")
def test_temporaries_of_a_step_are_not_mapped_anew_in_the_next() -> None:
    """Ten blocks of 64 MiB mapped anew fault once per page each time, unless the kernel gives huge pages; kept, they
    fault for none of theirs: the bound is the pages of a single block.
    """
    pages = (64 << 20) // resource.getpagesize()
    assert faults("keep") < pages
