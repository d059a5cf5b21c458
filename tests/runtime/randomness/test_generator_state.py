"""Generators resume from a saved state with the same draws."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hlat.runtime.errors import CheckpointError
from hlat.runtime.randomness import rng_state, set_rng_state

DRAWS: list[Callable[[], Any]] = [
    lambda: torch.rand(3).tolist(),
    lambda: torch.randn(5).tolist(),
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.sample(range(1000), 5),
    lambda: np.random.rand(3).tolist(),
    lambda: float(np.random.standard_normal()),
    lambda: float(np.random.randn()),
]


@pytest.fixture(autouse=True)
def restore_generators() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


@pytest.mark.parametrize("consumed", range(6))
def test_every_generator_resumes(consumed: int) -> None:
    """States saved at any point: also with a cached Gaussian, and in the middle of a block of words."""
    for draw in DRAWS * 40 + DRAWS[:consumed]:
        draw()
    state = rng_state()
    expected = [draw() for draw in DRAWS * 3]
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        random.gauss(0, 1)
        set_rng_state(state)
        assert [draw() for draw in DRAWS * 3] == expected


def test_reading_the_state_draws_nothing_and_copies() -> None:
    first, second = rng_state(), rng_state()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.rand(1)
    random.random()
    np.random.rand()
    third = rng_state()
    assert not any(torch.equal(first[name], third[name]) for name in ("torch", "python", "numpy"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_states_are_plain_tensors_on_the_cpu() -> None:
    for tensor in rng_state().values():
        assert tensor.dtype in (torch.uint8, torch.int64)
        assert tensor.device.type == "cpu"


def test_the_state_of_a_missing_accelerator_is_ignored() -> None:
    state = rng_state()
    if "accelerator" not in state:
        set_rng_state(state | {"accelerator": torch.zeros(16, dtype=torch.uint8)})
    random.random()
    set_rng_state({name: tensor for name, tensor in state.items() if name != "accelerator"})
    assert torch.equal(rng_state()["python"], state["python"])


@pytest.mark.parametrize("name", ["torch", "python", "numpy"])
def test_a_state_that_does_not_fit_is_refused(name: str) -> None:
    state = rng_state()
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.uint8), torch.zeros(9)):
        with pytest.raises(CheckpointError, match="does not fit"):
            set_rng_state(state | {name: wrong})
    with pytest.raises(CheckpointError, match="does not fit"):
        set_rng_state({key: tensor for key, tensor in state.items() if key != name})
