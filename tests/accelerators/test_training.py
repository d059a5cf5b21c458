"""Training on the stand-in with every rule: the losses of the CPU, static shapes, one wait for the device per step.

Bounds of losses. In fp32 the device sums attention and norms in another order. A loss of 6 nats has an error of a few
units in its last place, 2^-21, and the update of a step amplifies a difference by less than 2 here: 2^-21 * 2^STEPS is
below 4e-5. In bf16 products have a rounding of 2^-9 in each operand, where this CPU may compute in fp32; the errors of
a token's 320 logits are independent, and a loss is a mean over 256 tokens: 6 nats * 2^-9 / sqrt(256) is 7e-4.
"""

from pathlib import Path

import pytest

from hlat.runtime.backend.table import backend_of
from tests.accelerators.conftest import STEPS, Runs, losses

BOUND = {"fp32": 4e-5, "bf16": 7e-4}


def assert_close(run: Path, reference: Path, mode: str) -> None:
    """Every loss is within the bound, those of validations too."""
    for name, count in (("loss", STEPS), ("val_loss", STEPS // 3)):
        ours, theirs = losses(run, name), losses(reference, name)
        assert len(ours) == len(theirs) == count, name
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < BOUND[mode], (name, ours, theirs)


def assert_steady(counts: list[dict], waits: int = 1) -> None:
    """From the second step on no operator meets a new shape, none is left to the host, and the host waits once."""
    assert len(counts) == STEPS
    for step in counts[1:]:
        assert (step["shapes"], step["fallbacks"], step["waits"]) == (0, 0, waits), step


def assert_read_at_once(counts: list[dict]) -> None:
    """The metrics of a logged step that neither saves nor validates are one read: step 1, 2, 4, and 5 of 6."""
    assert [step["waits before"] for step in counts if step["step"] - 1 in (1, 2, 4, 5)] == [1, 1, 1, 1]


def test_a_process_trains_as_on_the_cpu(runs: Runs) -> None:
    run = runs.on_neuron("one")
    assert_close(run, runs.on_cpu("cpu"), "fp32")
    assert_steady(runs.counts("one"))
    assert_read_at_once(runs.counts("one"))


def test_bf16_with_stochastic_rounding_trains_as_on_the_cpu(runs: Runs) -> None:
    run = runs.on_neuron("sr", "precision.mode=bf16-sr")
    assert_close(run, runs.on_cpu("cpu-sr", "precision.mode=bf16-sr"), "bf16")
    assert_steady(runs.counts("sr"))
    kinds = runs.counts("sr")[-1]["kinds"]
    # One launch per tensor: 6 of each of 2 blocks, embedding, norm and head. Keys are computed on the host.
    assert kinds["graph"] == 15 and "aten::bitwise_xor" not in kinds


@pytest.mark.parametrize("seen", ["local rank", "only visible"])
def test_two_processes_train_as_one(runs: Runs, seen: str) -> None:
    """With the index of the local rank, as in the beta, and with the only visible device, as in other programs."""
    allow = [] if seen == "local rank" else ["local-index"]
    run = runs.on_neuron(f"two-{seen}", "--nproc", "2", allow=allow)
    assert_close(run, runs.on_cpu("cpu"), "fp32")
    assert_steady(runs.counts(f"two-{seen}", 1))
    assert_read_at_once(runs.counts(f"two-{seen}", 1))
    collectives = runs.counts(f"two-{seen}")[-1]["collectives"]
    assert collectives["all_reduce int32"] == 1, "the number of tokens"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["parallel.pipeline=2"], r"parallel.pipeline=2: the process group of neuron devices has no send and receive"),
        (["optimizer.kind=muon"], r"optimizer.kind=muon: it exchanges whole matrices"),
    ],
)
def test_a_recipe_that_the_process_group_cannot_run_is_refused(runs: Runs, options: list[str], says: str) -> None:
    done = runs.try_on_neuron(f"refused-{options[0]}", "--nproc", "2", *options)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_the_refusals_of_groups_are_those_of_the_stand_in() -> None:
    neuron, cuda = backend_of("neuron"), backend_of("cuda")
    for ranks in ([0, 1], [1, 3], [0, 6], [5]):
        assert neuron.group_refusal(ranks) == ""
    for ranks in ([1, 2], [2, 4], [0, 1, 3]):
        assert "are not evenly spaced and aligned" in neuron.group_refusal(ranks)
        assert cuda.group_refusal(ranks) == ""
