"""Let malloc keep freed memory of a training process instead of returning it to the kernel after every use.

step n:      temporaries are freed --> kept in the heap
step n + 1:  temporaries of the same sizes <-- the heap, without a page fault
"""

import ctypes

# Parameters of mallopt(3), from malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_MAPPED_FROM = 1 << 30  # bytes; larger blocks are mapped and unmapped separately
_OLD_LARGEST = 32 << 20  # bytes; the maximum of glibc before 2.35
_NEVER = (1 << 31) - 1  # bytes; the maximum of mallopt


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory, for the rest of this process.

    By default the GNU C library maps each large block separately and returns it to the kernel when it is freed. The
    temporaries of every training step are then mapped and zeroed again: 65,000 page faults per step of a 33.6 M model
    (docs/notebook/cpu-settings.md). The peak of memory does not change.

    Returns:
        True if the C library accepted the settings. Other libraries than GNU's, and replacements of malloc, do not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
    return kept and any(mallopt(_M_MMAP_THRESHOLD, size) for size in (_MAPPED_FROM, _OLD_LARGEST))
