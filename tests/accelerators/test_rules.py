"""The stand-in keeps the rules of a Neuron device; each can be turned off, and what it allows then works."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.neuron import jobs
from tests.support.neuron.process_group import is_aligned
from tests.support.neuron.rules import RULES
from tests.support.neuron.running import RankError, on_neuron

CASES: dict[str, tuple[str, int, Callable[..., Any], tuple[Any, ...]]] = {
    # name -> rule, processes, job, its arguments
    "float64": ("float64", 1, jobs.compute, ("float64",)),
    "unsigned": ("unsigned", 1, jobs.compute, ("uint16",)),
    "determinism": ("determinism", 1, jobs.compute_deterministically, ()),
    "tensor first": ("start-order", 2, jobs.start_before_the_group, ("tensor",)),
    "select first": ("start-order", 2, jobs.start_before_the_group, ("select",)),
    "one-device": ("one-device", 2, jobs.use_device_of_another, ()),
    "int64-collectives": ("int64-collectives", 2, jobs.collect, ("int64",)),
    "barrier": ("barrier", 3, jobs.collect, ("barrier",)),
    "equal-splits": ("equal-splits", 2, jobs.collect, ("unequal",)),
    "send": ("send", 2, jobs.collect, ("send",)),
    "groups": ("groups", 4, jobs.collect, ("group",)),
    "coalesced": ("coalesced", 2, jobs.collect, ("coalesced",)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rule_holds_and_can_be_turned_off(case: str) -> None:
    rule, world, job, arguments = CASES[case]
    says = "No backend type associated" if rule == "send" else rf"\[{rule}\]"  # torch itself refuses to send
    with pytest.raises(RankError, match=says):
        on_neuron(job, *arguments, world=world)
    on_neuron(job, *arguments, world=world, allow=["groups", rule] if rule == "barrier" else [rule])


def test_each_rule_is_tested() -> None:
    elsewhere = {"fork", "broadcast", "local-index"}
    assert {rule for rule, *_ in CASES.values()} | elsewhere == set(RULES)


def test_a_forked_process_cannot_use_the_runtime() -> None:
    assert on_neuron(jobs.use_after_fork) == [3]
    assert on_neuron(jobs.use_after_fork, allow=["fork"]) == [0]


def test_a_broadcast_is_zero_and_sum() -> None:
    assert on_neuron(jobs.collect, "broadcast", world=2) == ["[0.0]", "[0.0]"]
    assert on_neuron(jobs.collect, "broadcast", world=2, allow=["broadcast"]) == ["[-0.0]", "[-0.0]"]


def test_a_process_sees_its_device_as_releases_do() -> None:
    assert on_neuron(jobs.see_devices, world=2) == [(2, 0), (2, 1)]
    assert on_neuron(jobs.see_devices, world=2, allow=["local-index"]) == [(1, 0), (1, 0)]


def test_collectives_that_a_device_has_give_what_they_are_defined_to() -> None:
    assert on_neuron(jobs.regular, "mean", world=2) == [[1.5, 1.5]] * 2
    gathered = [1.0, 1.0, 2.0, 2.0]
    assert on_neuron(jobs.regular, "all", world=2) == [(gathered, [2.0, 2.0]), (gathered, [4.0, 4.0])]


def test_gradients_are_those_of_the_cpu() -> None:
    """Torch computes attention and SiLU there from their parts: 16 fp32 terms of about 1, in another order."""
    assert max(on_neuron(jobs.gradients)[0]) <= 16 * 2.0**-24


@pytest.mark.parametrize(
    ("ranks", "aligned"),
    [
        ([0, 1], True),
        ([2, 3], True),
        ([1, 2], False),
        ([0, 2], True),
        ([1, 3], True),
        ([2, 4], False),
        ([0, 1, 3], False),
        ([0, 6], True),
        ([5], True),
        ([4, 5, 6, 7], True),
    ],
)
def test_a_group_is_a_tile_of_the_world(ranks: list[int], aligned: bool) -> None:
    assert is_aligned(ranks) is aligned
