"""Memory that processes of this host can still allocate: the smallest of the machine, its control groups and a limit.

/proc/meminfo, control groups (versions 1 and 2), ulimit -v --> bytes
"""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_FILES = (  # limit, usage, and the part of the usage that is only a cache of files
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory() -> int:
    """Return the bytes that this process and its children can still allocate."""
    return min([_machine(), *(left for _, left in _groups()), *_limit()])


def memory_limit() -> int:
    """Return the bytes that processes can have at most, by the machine, its control groups and a limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(most for most, _ in _groups()), *_limit()])


def _machine() -> int:
    """Memory that is free, or used by caches that the system gives back."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _groups() -> Iterator[tuple[int, int]]:
    """Limit of each control group of this process that has one, and the memory left in it."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = _GROUPS / "memory" if controllers else _GROUPS
            folder = root / path.lstrip("/")
            for group in (folder, *folder.parents):
                if group == root.parent:
                    break
                yield from _group(group)


def _group(folder: Path) -> Iterator[tuple[int, int]]:
    for limit, usage, cache in _FILES:
        with suppress(OSError, ValueError, StopIteration):
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            cached = next((int(line.split()[1]) for line in lines if line.split()[0] == cache), 0)
            yield most, max(0, most - used + cached)


def _limit() -> Iterator[int]:
    """Address space left under ``ulimit -v``: the limit is per process."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        yield most
