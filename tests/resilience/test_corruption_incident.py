"""Corruption incidents: suspects by majority, wrong ranks by the repeated step."""

import json

import pytest

from hlat.resilience import CorruptionIncident, Mismatch

HOSTS = ("a", "a", "b", "b")


@pytest.mark.parametrize(
    ("digests", "outvoted"),
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
def test_a_majority_of_replicas_outvotes_the_others(digests, outvoted):
    assert Mismatch("w", tuple(digests)).outvoted == outvoted


def incident(*copies, step=8, before=None, hosts=HOSTS):
    return CorruptionIncident.from_mismatches(step, "one layout", [Mismatch("w", copies)], hosts, before)


def test_both_of_two_replicas_are_suspects_until_the_repeated_step_tells_which_was_wrong():
    found = incident((0, 11), (1, 22))
    assert (found.outvoted, found.suspects, found.suspect_hosts) == ([], [0, 1], ["a", "a"])
    assert found.wrong_ranks({"w": 11}) == [1] and found.wrong_ranks({"w": 22}) == [0]
    assert found.wrong_ranks({"w": 33}) == [], "both replicas used the wrong one's gradients"


def test_one_of_three_replicas_is_outvoted_even_if_all_used_its_wrong_gradients():
    found = incident((0, 11), (1, 22), (2, 11))
    assert found.suspects == [1] and found.wrong_ranks({"w": 11}) == [1] and found.wrong_ranks({"w": 33}) == []


def test_incidents_of_the_same_ranks_in_a_row_are_counted():
    first = incident((0, 1), (1, 2), (2, 1))
    again = incident((0, 5), (1, 6), (2, 5), step=6, before=first)
    assert (first.repeated, again.repeated, incident((0, 5), (1, 6), (2, 5), before=again).repeated) == (1, 2, 3)
    assert incident((0, 5), (1, 5), (2, 6), before=again).repeated == 1
    moved = incident((0, 5), (1, 6), (2, 5), before=first, hosts=("a", "c", "b"))
    assert moved.repeated == 1, "the rank is on another machine now"


def test_an_incident_is_read_back_from_json_and_invalid_json_is_refused():
    found = incident((0, -(2**63)), (1, 2**63 - 1), before=incident((0, 1), (1, 2)))
    state = json.loads(json.dumps(found.state()))
    assert CorruptionIncident.from_state(state) == found
    for wrong in ({}, {**state, "copies": {}}, {**state, "copies": {"w": [[9, 1]]}}, {**state, "step": None}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            CorruptionIncident.from_state(wrong)
