"""Settings of the calling process, restored after a function of the API has computed something."""

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored() -> Iterator[None]:
    """Restore the settings of the process and its random generators at the end of the block."""
    python_state = random.getstate()  # first: modules that are imported now may draw a number
    from hlat.runtime.backend.settings import restored_settings
    from hlat.runtime.randomness.generator_state import rng_state, set_rng_state

    state = rng_state()
    try:
        with restored_settings():
            yield
    finally:
        set_rng_state(state)
        random.setstate(python_state)
