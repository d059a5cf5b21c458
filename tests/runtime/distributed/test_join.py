"""Joining a run: a single process joins nothing, and failures of the rendezvous give precise errors."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hlat.runtime.distributed import rendezvous
from hlat.runtime.distributed.host_collectives import AsyncMax, HostGroup
from hlat.runtime.distributed.join import check_consistent, join_run, joined_run, leave_run
from hlat.runtime.errors import HlatError, LaunchError
from hlat.runtime.process import LAUNCHER_ENV
from tests.support.launch.ports import free_port


@pytest.fixture
def store(monkeypatch):
    """A store on loopback, as a launcher serves it, for two processes of which this one is rank 0."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(rendezvous, "ARRIVAL_TIMEOUT", timedelta(seconds=0.3))
    environment = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port}
    for name, value in {**environment, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    return server


@pytest.fixture
def patient(monkeypatch):
    """On a busy machine it takes long to connect: only the wait for the other process is short."""
    connect = rendezvous._client
    monkeypatch.setattr(rendezvous, "_client", lambda *place: connect(*place, timedelta(minutes=10)))


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_a_single_process_joins_nothing(alone):
    with joined_run("cpu") as runtime:
        assert (runtime.rank, runtime.world, runtime.local_rank) == (0, 1, 0)
        assert runtime.device == torch.device("cpu") and not dist.is_initialized()
    leave_run(join_run("cpu"))


def test_collectives_of_a_single_process_are_trivial():
    ranks = HostGroup()
    assert ranks.is_first and ranks.broadcast("a") == "a"
    assert ranks.gather(1) == ranks.all_gather(1) == [1]
    ranks.barrier()
    assert ranks.run_on_rank0(lambda: 2) == ranks.run_on_all(lambda: 2) == 2
    for run_action in (ranks.run_on_rank0, ranks.run_on_all):
        with pytest.raises(KeyError):
            run_action(lambda: {}["x"])
    check_consistent(ranks, {"recipe": {"seed": 1}})


def test_the_maximum_of_a_single_process_is_its_value():
    maximum = AsyncMax(HostGroup())
    maximum.start(15)
    with pytest.raises(AssertionError):
        maximum.start(2)
    assert maximum.result() == 15
    with pytest.raises(AssertionError):
        maximum.result()


def test_missing_processes_are_counted(store, patient):
    with pytest.raises(LaunchError, match=r"only 1 of 2 processes joined.*WORLD_SIZE, MASTER_ADDR and MASTER_PORT"):
        join_run("cpu")
    assert not dist.is_initialized()
    with pytest.raises(LaunchError, match="only 1 of 2"):
        join_run("cpu")  # the second attempt does not count as a second rank 0


def test_two_processes_with_the_same_rank_are_refused(store, patient, monkeypatch):
    monkeypatch.setenv(LAUNCHER_ENV, str(os.getpid()))  # a store of one attempt: torchrun's has the keys of others
    with pytest.raises(LaunchError, match=r"only 1 of 2"):
        join_run("cpu")
    rendezvous._joins.clear()  # as in another process
    with pytest.raises(LaunchError, match=r"two processes have rank 0 of 2.*own RANK"):
        join_run("cpu")


def test_an_unreachable_store_is_named(store, monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(LaunchError, match=rf"cannot reach rank 0 at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"):
        join_run("cpu")


def test_a_port_in_use_is_named(store, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")  # rank 0 opens the store itself, on a port in use
    with pytest.raises(LaunchError, match=rf"cannot open the store .* MASTER_PORT={store.port}"):
        join_run("cpu")


def test_an_error_has_no_rank_by_default():
    assert HlatError("x").from_rank is None
