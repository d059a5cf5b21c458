"""The garbage collector runs when it is asked, and is as it was afterwards."""

import gc
import weakref

import pytest

from hlat.training.process import scheduled_gc


class Knot:
    """Something only the collector can remove."""

    def __init__(self) -> None:
        self.itself = self


def test_it_collects_at_its_steps_only_and_is_put_back() -> None:
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
