"""Process groups that lack an operation, or only seem to have it, are found before training."""

import pytest

from tests.support.neuron import jobs
from tests.support.neuron.running import RankError, on_neuron


def test_a_group_that_works_is_accepted() -> None:
    on_neuron(jobs.try_groups, "nothing", world=2, allow=["send"])


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (
            "dropped",
            r"LaunchError: all-reduce of torch.float32 gives a wrong result in the pipeline group of ranks 0, 1",
        ),
        ("send", r"LaunchError: send and receive does not work in the pipeline group of ranks 0, 1: no such operation"),
        ("bf16", r"LaunchError: all-reduce of torch.bfloat16 does not work in the pipeline group"),
    ],
)
def test_an_operation_that_fails_or_does_nothing_is_found(broken: str, says: str) -> None:
    with pytest.raises(RankError, match=says):
        on_neuron(jobs.try_groups, broken, world=2, allow=["send"])
