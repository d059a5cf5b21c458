"""Who is named for a mismatch: by majority, by the step done again, and never without a reason."""

import json

import pytest

from hlat.resilience import CorruptionIncident, Mismatch

HOSTS = ("a", "a", "b", "b")


@pytest.mark.parametrize(
    ("copies", "outvoted"),
    [
        ([(0, 1), (1, 2)], set()),
        ([(0, 1), (1, 2), (2, 1)], {1}),
        ([(0, 1), (1, 2), (2, 3)], set()),
        ([(0, 1), (1, 2), (2, 1), (3, 2)], set()),
        ([(0, 1), (1, 2), (2, 1), (3, 3)], set()),
        ([(0, 2), (1, 1), (2, 1), (3, 1)], {0}),
        ([(0, 1), (1, 2), (2, 1), (3, 3), (4, 1)], {1, 3}),
        ([(3, 1), (3, 2)], {3}),
    ],
)
def test_more_than_half_of_the_copies_name_the_others(copies, outvoted):
    assert Mismatch("w", tuple(copies)).outvoted == outvoted


def incident(*copies, step=8, before=None, hosts=HOSTS):
    return CorruptionIncident.from_mismatches(step, "one layout", [Mismatch("w", copies)], hosts, before)


def test_of_two_both_are_named_and_the_step_done_again_tells_them_apart():
    found = incident((0, 11), (1, 22))
    assert (found.outvoted, found.suspects, found.suspect_hosts) == ([], [0, 1], ["a", "a"])
    assert found.wrong_ranks({"w": 11}) == [1] and found.wrong_ranks({"w": 22}) == [0]
    assert found.wrong_ranks({"w": 33}) == [], "both had gone on with what the wrong one had sent"


def test_of_three_one_is_named_even_if_all_have_gone_on_with_what_it_sent():
    found = incident((0, 11), (1, 22), (2, 11))
    assert found.suspects == [1] and found.wrong_ranks({"w": 11}) == [1] and found.wrong_ranks({"w": 33}) == []


def test_the_same_ranks_again_are_counted_and_others_are_not():
    first = incident((0, 1), (1, 2), (2, 1))
    again = incident((0, 5), (1, 6), (2, 5), step=6, before=first)
    assert (first.repeated, again.repeated, incident((0, 5), (1, 6), (2, 5), before=again).repeated) == (1, 2, 3)
    assert incident((0, 5), (1, 5), (2, 6), before=again).repeated == 1
    moved = incident((0, 5), (1, 6), (2, 5), before=first, hosts=("a", "c", "b"))
    assert moved.repeated == 1, "the rank is another machine now"


def test_it_comes_back_from_a_file_and_nonsense_does_not():
    found = incident((0, -(2**63)), (1, 2**63 - 1), before=incident((0, 1), (1, 2)))
    state = json.loads(json.dumps(found.state()))
    assert CorruptionIncident.from_state(state) == found
    for wrong in ({}, {**state, "copies": {}}, {**state, "copies": {"w": [[9, 1]]}}, {**state, "step": None}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            CorruptionIncident.from_state(wrong)
