"""Memory of the C library that a training process keeps, instead of giving it back to the kernel after every use.

step n:      temporaries are freed --> kept in the heap
step n + 1:  temporaries of the same sizes <-- the heap, without a page fault
"""

import ctypes

# Parameters of mallopt(3), from malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_MAPPED_FROM = 1 << 30  # bytes; blocks of this size and more are mapped and unmapped one by one
_OLD_LARGEST = 32 << 20  # bytes; the most that glibc before 2.35 takes
_NEVER = (1 << 31) - 1  # the largest value that mallopt takes, in bytes


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed, for the rest of this process.

    By default the GNU C library maps large blocks one by one and gives each back to the kernel when it is freed, so
    that the temporaries of every training step are mapped, zeroed and entered into the page table again: 65,000 page
    faults a step of a 33.6 M model (docs/experiments.md). The peak of memory stays as it is.

    Returns:
        Whether the C library took the settings. Others than GNU's, and allocators that replace malloc, do not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
    return kept and any(mallopt(_M_MMAP_THRESHOLD, size) for size in (_MAPPED_FROM, _OLD_LARGEST))
