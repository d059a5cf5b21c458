"""Register a backend during a test, as a line in the table of accelerators would."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hlat.runtime.backend import table


@contextmanager
def registered(device_type: str, module: str) -> Iterator[None]:
    """Let a module describe a device type within the block.

    Args:
        device_type: name of the type in torch; also one that the table has already.
        module: dotted name of the module with ``BACKEND``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(table.BACKENDS, device_type, module)
        table._backend.cache_clear()
        try:
            yield
        finally:
            table._backend.cache_clear()
