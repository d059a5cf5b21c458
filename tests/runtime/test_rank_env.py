"""Rank and world size are read from the environment, or refused with a list of all problems."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hlat.runtime.backend.device import choose_device
from hlat.runtime.errors import LaunchError
from hlat.runtime.process import RankInfo, rank_info

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "1", "RANK": "0"}, {"RANK": "5"}])
def test_a_single_process_needs_no_variables(environment):
    assert rank_info(environment) == RankInfo(rank=0, world=1, local_rank=0)


@given(world=st.integers(2, 10_000), data=st.data())
def test_torchrun_variables_give_the_rank(world, data):
    rank = data.draw(st.integers(0, world - 1))
    local_rank = data.draw(st.integers(0, rank))
    environment = {**MASTER, "RANK": str(rank), "WORLD_SIZE": str(world)}
    assert rank_info({**environment, "LOCAL_RANK": str(local_rank)}) == RankInfo(rank, world, local_rank)
    assert rank_info(environment) == RankInfo(rank, world, rank)


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"WORLD_SIZE": "2", **MASTER}, ["RANK is not set"]),
        ({"WORLD_SIZE": "2", "RANK": "2", **MASTER}, ["RANK=2", "between 0 and 1"]),
        ({"WORLD_SIZE": "2", "RANK": "-1", **MASTER}, ["RANK=-1", "between 0 and 1"]),
        ({"WORLD_SIZE": "two", "RANK": "0", **MASTER}, ["WORLD_SIZE=two", "an integer"]),
        ({"WORLD_SIZE": "0", "RANK": "0", **MASTER}, ["WORLD_SIZE=0", "1 or more"]),
        ({"WORLD_SIZE": "2", "RANK": "0"}, ["MASTER_ADDR is not set", "MASTER_PORT is not set"]),
        ({"WORLD_SIZE": "2", "RANK": "0", **MASTER, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "65535"]),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "-3", **MASTER}, ["LOCAL_RANK=-3"]),
        (
            {"WORLD_SIZE": "2", "RANK": "x", "MASTER_PORT": "y"},
            ["RANK=x", "MASTER_PORT=y", "MASTER_ADDR is not set", "hlat train --nproc N"],
        ),
    ],
)
def test_incomplete_variables_are_refused_with_every_problem(environment, words):
    with pytest.raises(LaunchError) as refused:
        rank_info(environment)
    for word in words:
        assert word in str(refused.value)


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs, as reported by torch.accelerator; yields the list of chosen indexes."""
    chosen = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


def test_each_process_of_a_machine_gets_its_own_accelerator(two_gpus):
    assert choose_device("auto", RankInfo(5, 8, 1)) == torch.device("cuda", 1)
    assert two_gpus == [1]


def test_more_processes_than_accelerators_are_refused(two_gpus):
    with pytest.raises(LaunchError, match=r"there are 2. Start at most 2 processes per machine, or use run.device=cpu"):
        choose_device("cuda", RankInfo(2, 3, 2))
    assert choose_device("cpu", RankInfo(2, 3, 2)) == torch.device("cpu")


def test_a_single_process_takes_the_current_accelerator(two_gpus):
    assert choose_device("auto", RankInfo()) == torch.device("cuda") and two_gpus == []


def test_a_missing_device_type_is_refused(two_gpus):
    with pytest.raises(LaunchError, match=r"run.device=neuron.*only cuda"):
        choose_device("neuron", RankInfo())
