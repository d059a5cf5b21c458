"""A tracker of memory reads parameters and gradients between operations only."""

import torch

from hlat.rehearsal.observers import MemoryTracker


def test_state_is_not_read_while_a_storage_is_being_freed() -> None:
    """A storage is often freed while a gradient is being replaced: reading that gradient then is a use after free."""
    freeing, asked = [False], []

    def categories() -> dict[int, str]:
        asked.append(freeing[0])
        return {}

    tracker = MemoryTracker(categories)
    tensor = torch.empty(1000)
    tracker.assign(tensor, "activations")
    freeing[0] = True
    del tensor
    freeing[0] = False
    assert tracker.total == 0 and tracker.peak == 4000
    assert tracker.at_peak()["activations"] == 4000
    assert asked == [False]
