"""Joining: one process pays nothing, and processes that do not find each other are told what to look at."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hlat.runtime import HlatError, LaunchError
from hlat.runtime.distributed import AsyncMax, HostGroup, check_consistent, join_run, joined_run
from hlat.runtime.distributed import rendezvous as meeting
from hlat.runtime.distributed.join import leave_run


@pytest.fixture
def store(monkeypatch):
    """A store on loopback, as a launcher serves it, for two processes of which this one is rank 0."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(meeting, "ARRIVAL_TIMEOUT", timedelta(seconds=0.3))
    environment = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port}
    for name, value in {**environment, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    return server


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_one_process_joins_nothing(alone):
    with joined_run("cpu") as runtime:
        assert (runtime.rank, runtime.world, runtime.local_rank) == (0, 1, 0)
        assert runtime.device == torch.device("cpu") and not dist.is_initialized()
    leave_run(join_run("cpu"))


def test_one_process_is_a_run_like_any_other():
    ranks = HostGroup()
    assert ranks.is_first and ranks.broadcast("a") == "a"
    assert ranks.gather(1) == ranks.all_gather(1) == [1]
    ranks.barrier()
    assert ranks.run_on_rank0(lambda: 2) == ranks.run_on_all(lambda: 2) == 2
    for talk in (ranks.run_on_rank0, ranks.run_on_all):
        with pytest.raises(KeyError):
            talk(lambda: {}["x"])
    check_consistent(ranks, {"recipe": {"seed": 1}})


def test_a_vote_of_one_is_its_own_and_is_counted_once():
    vote = AsyncMax(HostGroup())
    vote.start(15)
    with pytest.raises(AssertionError):
        vote.start(2)
    assert vote.result() == 15
    with pytest.raises(AssertionError):
        vote.result()


def test_processes_that_do_not_arrive_are_counted(store):
    with pytest.raises(LaunchError, match=r"only 1 of 2 processes joined.*WORLD_SIZE, MASTER_ADDR and MASTER_PORT"):
        join_run("cpu")
    assert not dist.is_initialized()
    with pytest.raises(LaunchError, match="only 1 of 2"):
        join_run("cpu")  # which is no second process of rank 0


def test_two_processes_with_the_same_rank_are_told(store, monkeypatch):
    with pytest.raises(LaunchError, match=r"only 1 of 2"):
        join_run("cpu")
    meeting._joins.clear()  # as another process counts
    with pytest.raises(LaunchError, match=r"two processes have rank 0 of 2.*own RANK"):
        join_run("cpu")


def test_a_store_that_is_not_there_is_named(store, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))  # nobody listens there any more
    with pytest.raises(LaunchError, match=rf"cannot reach rank 0 at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"):
        join_run("cpu")


def test_a_port_that_is_taken_is_named(store, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")  # rank 0 opens the store, on a port that is not free
    with pytest.raises(LaunchError, match=rf"cannot open the store .* MASTER_PORT={store.port}"):
        join_run("cpu")


def test_where_an_error_comes_from_is_not_known_unless_it_was_told():
    assert HlatError("x").from_rank is None
