"""The garbage collector runs at the scheduled steps, and is restored afterwards."""

import gc
import weakref

import pytest

from hlat.training.process import scheduled_gc


class Knot:
    """Reference cycle, which only the collector can remove."""

    def __init__(self) -> None:
        self.itself = self


def test_it_collects_at_its_steps_only_and_is_restored_afterwards() -> None:
    with pytest.raises(ZeroDivisionError), scheduled_gc() as garbage:
        assert not gc.isenabled()
        knot = weakref.ref(Knot())
        for step in range(1, 100):
            garbage.after_step(step)
        assert knot() is not None
        garbage.after_step(100)
        assert knot() is None
        raise ZeroDivisionError
    assert gc.isenabled() and gc.get_freeze_count() == 0
