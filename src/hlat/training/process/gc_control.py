"""Python's garbage collector, run after the same steps on every rank.

By default each rank collects in a different step, for tens of milliseconds with the many objects that torch keeps, and
all other ranks wait for it. No step creates reference cycles that hold tensors, so collecting rarely is enough.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY = 100  # steps


class GarbageCollection:
    """Collects after every 100th step."""

    def after_step(self, step: int) -> None:
        """Collect the two younger generations, if this step is a multiple of 100."""
        if step % _EVERY == 0:
            gc.collect(1)


@contextmanager
def scheduled_gc() -> Iterator[GarbageCollection]:
    """Disable automatic collection inside the block, and freeze the objects that exist at its start."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield GarbageCollection()
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
