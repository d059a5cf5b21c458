"""Python's garbage collector, at moments that all ranks share.

Left to itself it runs in another step on each rank, for tens of milliseconds with the many objects that torch keeps,
and all others wait for that rank. Nothing in a step makes cycles that hold tensors, so rarely is enough.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY = 100  # steps


class Garbage:
    """Collects after every hundredth step."""

    def after_step(self, step: int) -> None:
        """Collect what has come up lately, if it is time."""
        if step % _EVERY == 0:
            gc.collect(1)


@contextmanager
def controlled_garbage() -> Iterator[Garbage]:
    """No collection inside but those asked for; what exists at the start is not looked at again."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield Garbage()
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
