"""Rendezvous: a process without the secret cannot join, and values that it writes into the store are rejected."""

import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from hlat.runtime.distributed import network, rendezvous
from hlat.runtime.distributed.network import (
    Signer,
    interface_of,
    listen,
    resolve_addresses,
    run_signer,
    wait_until_reachable,
)
from hlat.runtime.distributed.rendezvous import Rendezvous, ask_for_round
from hlat.runtime.errors import LaunchError
from hlat.runtime.process import RankInfo
from tests.support.launch.ports import free_port

IPV6 = (
    Path("/proc/net/if_inet6").exists() and "00000000000000000000000000000001" in Path("/proc/net/if_inet6").read_text()
)


@pytest.fixture
def server(monkeypatch):
    """A store that anybody may write to."""
    monkeypatch.setattr(rendezvous, "ARRIVAL_TIMEOUT", timedelta(seconds=600))
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def arrive(server, *signers, name="run"):
    """Let processes (threads with a connection each) join with these signers; return the store or error of each."""

    def join(rank):
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        try:
            return rendezvous._arrive(client, Rendezvous(name, signers[rank]), RankInfo(rank, len(signers)))[0]
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(signers)) as pool:
        return list(pool.map(join, range(len(signers))))


def test_processes_with_the_secret_exchange_values(server):
    first, second, third = arrive(server, *[Signer(b"secret")] * 3)
    first.set("0/peer", b"\0address")
    second.set("text", "words")
    assert second.get("0/peer") == third.get("0/peer") == b"\0address"
    assert first.multi_get(["text", "0/peer"]) == [b"words", b"\0address"]


@pytest.mark.parametrize("stranger", [0, 1, 2])
@pytest.mark.parametrize("known", [b"", b"wrong"])
def test_a_process_without_the_secret_ends_the_rendezvous_for_all(server, stranger, known):
    signers = [Signer(known if rank == stranger else b"secret") for rank in range(3)]
    errors = arrive(server, *signers)
    assert all(isinstance(error, str) for error in errors)
    others = f"rank {stranger}" if stranger else "ranks 1-2"
    assert errors[0].startswith(f"the secret of this run is unknown to {others}:") and "HLAT_RUN_SECRET" in errors[0]
    assert all("a process that does not know the secret" in error for error in errors[1:])


def test_rank_0_must_know_the_secret(server):
    store = dist.PrefixStore("run", server)
    with ThreadPoolExecutor(1) as pool:
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        other = pool.submit(rendezvous._arrive, client, Rendezvous("run", Signer(b"secret")), RankInfo(1, 2))
        store.set("verdict", bytes(Signer.SIZE) + bytes(16) + store.get("hello/1")[:16])
        with pytest.raises(LaunchError, match="unknown to rank 0"):
            other.result()


def test_forged_values_are_rejected(server):
    first, second = arrive(server, Signer(b"secret"), Signer(b"secret"))
    first.set("0/peer", b"10.0.0.1")
    outside = dist.PrefixStore("run", dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False))
    signed = outside.get("0/peer")
    for forged in (b"", b"10.6.6.6", signed[:32] + b"10.6.6.6", Signer(b"").sign(b"0/peer", b"10.6.6.6") + b"10.6.6.6"):
        outside.set("0/peer", forged)
        with pytest.raises(LaunchError, match="no process of the run has written"):
            second.get("0/peer")
    outside.set("0/other", signed)  # copied to another key
    with pytest.raises(LaunchError):
        second.get("0/other")


def test_replayed_messages_of_an_earlier_rendezvous_are_rejected(server):
    """A stranger replays all messages of rank 1: it passes as rank 1, but cannot write values that rank 0 accepts."""
    before, _ = arrive(server, Signer(b"secret"), Signer(b"secret"))
    before.set("0/peer", b"x")
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A waiting client blocks its connection, so rank 0 and rank 1 have one each.
    own = dist.TCPStore("127.0.0.1", other.port, is_master=False, wait_for_workers=False)
    old, new = dist.PrefixStore("run", server), dist.PrefixStore("run", own)
    found = []
    first = threading.Thread(
        target=lambda: found.append(rendezvous._arrive(other, Rendezvous("run", Signer(b"secret")), RankInfo(0, 2)))
    )
    first.start()
    new.set("hello/1", old.get("hello/1"))
    if new.add("arrived", 1) == 2:
        new.set("complete", "")
    first.join()
    [(store, _)] = found
    guessed = Signer(b"").derive(b"session", b"run", new.get("verdict")[Signer.SIZE :]).sign(b"0/peer", b"x") + b"x"
    for forged in (guessed, old.get("0/peer")):
        new.set("0/peer", forged)
        with pytest.raises(LaunchError, match="no process of the run"):
            store.get("0/peer")


def test_processes_started_again_meet_in_a_store_with_keys_of_earlier_attempts(server, tmp_path, monkeypatch):
    """As under torchrun: keys of all attempts are in one store, and a process ended while it asked."""
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(server.port))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv(network.RUN_SECRET_ENV, raising=False)

    def join(rank):
        time.sleep(0.2 * (2 - rank))  # rank 0 comes last
        return rendezvous.rendezvous_ranks(RankInfo(rank, 3), tmp_path)[0]

    for attempt in range(3):
        rendezvous._joins.clear()  # as in new processes
        with ThreadPoolExecutor(3) as pool:
            stores = list(pool.map(join, range(3)))
        stores[0].set("text", f"attempt {attempt}")
        assert stores[2].get("text") == f"attempt {attempt}".encode()
        ask_for_round(server, 0.0)  # a process that ended while it asked
    assert not list(tmp_path.iterdir()), "the files of secrets are removed"


def test_an_answer_that_is_no_round_is_refused(server, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.PrefixStore("hlat/rounds", server)
    store.set("round/1", "../../elsewhere")
    with pytest.raises(LaunchError, match="no process of the run has written"):
        rendezvous._ask_for_round(server, RankInfo(1, 2))


def test_the_secret_comes_from_the_launcher_or_a_private_file(tmp_path, monkeypatch):
    file = tmp_path / ".secret-1-0"
    monkeypatch.setenv(network.RUN_SECRET_ENV, "given")
    assert run_signer(file).sign(b"a") == Signer(b"given").sign(b"a") and not file.exists()
    monkeypatch.delenv(network.RUN_SECRET_ENV)
    with ThreadPoolExecutor(8) as pool:  # the first one creates it
        signed = set(pool.map(lambda _: run_signer(file).sign(b"a"), range(8)))
    assert len(signed) == 1 and signed != {run_signer(tmp_path / "other").sign(b"a")}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(file.read_text()) == 64
    assert run_signer(None).sign(b"a") == Signer(b"").sign(b"a")
    monkeypatch.setattr(network, "_WRITING", 0.0)
    file.write_text("")
    with pytest.raises(LaunchError, match=r"contains no secret of a run\. Remove it"):
        run_signer(file)


def test_a_signature_depends_on_boundaries_and_repr_hides_the_key():
    assert Signer(b"k").sign(b"ab", b"c") != Signer(b"k").sign(b"a", b"bc")
    assert "key" not in repr(Rendezvous("m", Signer(b"key")))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not IPV6, reason="no IPv6"))]
)
def test_rank_0_listens_on_the_given_address_only(host, monkeypatch):
    port = free_port()
    with listen(host, port) as listener:
        assert listener.getsockname()[:2] == (host, port)
        assert wait_until_reachable(host, port, 600.0) == (host, host)
    monkeypatch.setattr(rendezvous, "ARRIVAL_TIMEOUT", timedelta(seconds=600))
    store = rendezvous._serve(host, port)
    store.set("a", "b")
    assert rendezvous._client(host, port, 1).get("a") == b"b"
    others = {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)} - {host}
    for address in others:
        with pytest.raises(OSError), socket.create_connection((address, port), 600.0):
            pass


def test_another_machines_address_is_refused(monkeypatch):
    with pytest.raises(LaunchError, match=r"MASTER_ADDR=192\.0\.2\.7 .*belongs to this machine"):
        rendezvous._serve("192.0.2.7", 29500)


@pytest.mark.parametrize("listens", [False, True], ids=["nobody listens", "the listener is silent"])
def test_a_helper_gives_up_soon_on_a_store_that_has_gone(monkeypatch: pytest.MonkeyPatch, listens: bool):
    """Found by killing a supervisor before the savers had connected: the ranks waited 20 minutes for them."""
    with listen("127.0.0.1", free_port()) as listener:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        monkeypatch.setattr(rendezvous, "_HELPER_TIMEOUT", timedelta(seconds=1))
        if not listens:
            listener.close()
        with pytest.raises(LaunchError, match="rank 1 cannot reach rank 0"):
            rendezvous.rendezvous_helpers("saver", Rendezvous("run"), RankInfo(1, 2, 1))


def test_a_client_waits_until_the_server_listens():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(wait_until_reachable, "127.0.0.1", port, 600.0)
        time.sleep(0.5)
        with listen("127.0.0.1", port):
            assert found.result() == ("127.0.0.1", "127.0.0.1")


def test_names_resolve_to_addresses_that_others_reach(monkeypatch):
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    known = {"here": ["127.0.1.1"], "there": ["10.0.0.5", "10.0.0.5"], "localhost": ["127.0.0.1"]}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(*entry, (a, 0)) for a in known[host]])
    assert resolve_addresses("there") == ["10.0.0.5"] and resolve_addresses("localhost") == ["127.0.0.1"]
    assert resolve_addresses("here")[-1] == "127.0.1.1", (
        "Debian's address of its own name comes after the one towards the network"
    )
    assert resolve_addresses("10.9.8.7") == ["10.9.8.7"]


def test_the_interface_of_an_address_is_known():
    assert interface_of("127.0.0.1") == interface_of("::1") == "lo"
    assert interface_of("192.0.2.7") is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        own = probe.getsockname()[0]
    assert interface_of(own) in [path.name for path in Path("/sys/class/net").iterdir()]
