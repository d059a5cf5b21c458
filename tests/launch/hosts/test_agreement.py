"""Records, liveness, election and blame: the agreements between supervisors of several hosts."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hlat.launch.hosts.network import accept_connections, blame_network, connect_all, link_problem, neighbours
from hlat.launch.hosts.records import (
    AttemptOrder,
    HostMember,
    HostStatus,
    HostTable,
    Instruction,
    NotLeaderError,
    Orders,
    RankStatus,
    claim,
    host_file,
    is_candidate,
    leader_is_alive,
    newest_term,
    parse_record,
    read_orders,
    write_record,
)
from hlat.launch.hosts_job import ClusterStops
from hlat.launch.supervision.cluster_attempts import ClusterAttempts
from hlat.launch.supervision.remote_ranks import Bulletin, host_limits
from hlat.launch.worker_process import ErrorReport
from tests.support.resilience.readings import reading


def status(index: int, incarnation: str = "a", count: int = 1, **fields) -> HostStatus:
    return HostStatus(index, incarnation, count, f"h{index}", f"10.0.0.{index + 1}", 1000 + index, 2, "1.0", **fields)


def members(count: int) -> list[HostMember]:
    return [HostMember(i, "a", f"h{i}", f"10.0.0.{i + 1}", 1000 + i, 2 * i, 2) for i in range(count)]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_records_come_back_as_they_were_written_and_only_this_user_may_read_them(tmp_path):
    report = ErrorReport("own", "a\nb", True, 1, -0.5)
    ranks = (RankStatus(2, None, None, reading(rank=2)), RankStatus(3, -9, report, None, False, "stack"))
    written = status(1, ranks=ranks, signals=(10,), unreachable={"0": 2.5}, link="down", findings=("x",))
    write_record(host_file(tmp_path, 1), written)
    assert parse_record(HostStatus, host_file(tmp_path, 1).read_bytes()) == written
    attempt = AttemptOrder(3, "l", tuple(members(2)), "10.0.0.1", 29500, "secret", {"A": "b"}, 60.0)
    orders = Orders(2, 0, "a", "l", attempt, (Instruction(1, "signal", (0, 1), 10.0),))
    write_record(tmp_path / "orders.json", orders)
    assert read_orders(tmp_path) == orders
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"term": 1}', '{"ranks": 3}'])
def test_a_record_of_another_version_or_half_a_one_is_none(tmp_path, text):
    host_file(tmp_path, 0).write_text(text)
    (tmp_path / "orders.json").write_text(text)
    assert parse_record(HostStatus, host_file(tmp_path, 0).read_bytes()) is None
    assert read_orders(tmp_path) is None


def test_a_host_is_alive_while_it_writes_and_a_file_left_behind_is_not(tmp_path):
    clock = Clock()
    table = HostTable(tmp_path, clock)
    write_record(host_file(tmp_path, 0), status(0, count=5))
    table.refresh()
    assert table.living(10) == {} and table.silence(0) == float("inf"), "it may be of an earlier launch"
    write_record(host_file(tmp_path, 0), status(0, count=6))
    clock.now += 1
    table.refresh()
    assert list(table.living(10)) == [0]
    clock.now += 7
    table.refresh()
    assert table.silence(0) == 7
    assert table.living(6) == {} and list(table.living(7)) == [0]
    write_record(host_file(tmp_path, 0), status(0, incarnation="b", count=1))
    table.refresh()
    assert table.silence(0) == 0, "started again, while this table looked"


def test_a_host_looks_at_the_hosts_that_it_is_told_to(tmp_path):
    table = HostTable(tmp_path, Clock())
    for count in (1, 2):
        for index in range(3):
            write_record(host_file(tmp_path, index), status(index, count=count))
        table.refresh({0, 2, 7})
    assert list(table.living(10)) == [0, 2]
    table.refresh()
    write_record(host_file(tmp_path, 1), status(1, count=3))
    table.refresh()
    assert list(table.living(10)) == [0, 1, 2]


def test_clocks_of_hosts_do_not_matter_because_no_record_has_a_time_of_day(tmp_path):
    """The table takes its own clock, and statuses have ages only."""
    rank = RankStatus(0, 1, ErrorReport("own", "x", True, 1, -0.5), None)
    write_record(host_file(tmp_path, 0), status(0, ranks=(rank,)))
    found = parse_record(HostStatus, host_file(tmp_path, 0).read_bytes())
    assert found is not None and found.ranks[0].report is not None
    assert found.ranks[0].report.time == -0.5


def test_of_hosts_that_claim_a_term_at_the_same_time_one_becomes_the_leader(tmp_path):
    won: list[int] = []
    barrier = threading.Barrier(16)

    def try_to(index: int) -> None:
        barrier.wait()
        if claim(tmp_path, 4):
            won.append(index)

    threads = [threading.Thread(target=try_to, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert newest_term(tmp_path) == 4
    assert claim(tmp_path, 5) and not claim(tmp_path, 5)


def test_the_living_host_with_the_lowest_number_is_to_lead_and_only_one_that_sees_itself_alive():
    assert [is_candidate(index, {2, 5, 7}) for index in (1, 2, 5, 7)] == [False, True, False, False]


def test_a_leader_whose_folder_does_not_list_the_new_term_yet_sees_it_in_the_orders(tmp_path):
    claim(tmp_path, 1)
    bulletin = Bulletin(tmp_path, Orders(1, 0, "a", "l"))
    bulletin.check()
    write_record(tmp_path / "orders.json", Orders(2, 1, "b", "l"))
    for write in (bulletin.check, bulletin.end, lambda: bulletin.finish(0), lambda: bulletin.instruct("kill")):
        with pytest.raises(NotLeaderError):
            write()
    assert read_orders(tmp_path) == Orders(2, 1, "b", "l")


def test_a_leader_is_alive_only_as_the_start_that_gave_the_orders(tmp_path):
    clock = Clock()
    table = HostTable(tmp_path, clock)
    for count in (1, 2):
        write_record(host_file(tmp_path, 0), status(0, count=count))
        table.refresh()
    orders = Orders(1, 0, "a", "l")
    assert leader_is_alive(orders, table, 10)
    assert not leader_is_alive(replace(orders, incarnation="b"), table, 10)
    assert not leader_is_alive(replace(orders, leader=1), table, 10)
    assert not leader_is_alive(None, table, 10)
    clock.now += 11
    assert not leader_is_alive(orders, table, 10)


def cut(count: int, *pairs: tuple[int, int], **links: str) -> dict[int, HostStatus]:
    """Statuses of hosts of which some do not reach others."""
    lost = {index: {str(b): 15.0 for a, b in pairs if a == index} for index in range(count)}
    return {i: status(i, unreachable=lost[i], link=links.get(f"h{i}", "")) for i in range(count)}


@pytest.mark.parametrize(
    ("statuses", "blamed"),
    [
        (cut(4), None),
        (cut(4, (0, 2), (1, 2), (3, 2)), ["h2"]),
        (cut(4, (2, 0), (2, 1), (2, 3)), ["h2"]),
        (cut(4, (0, 2)), ["h0", "h2"]),
        (cut(2, (0, 1), (1, 0)), ["h0", "h1"]),
        (cut(2, (0, 1), (1, 0), h0="eth0 has no link"), ["h0"]),
    ],
    ids=["all reach all", "nobody reaches h2", "h2 reaches nobody", "one pair", "two hosts", "no link"],
)
def test_the_host_to_blame_is_the_one_in_most_failing_pairs_or_without_link(statuses, blamed):
    found = blame_network(members(len(statuses)), statuses, 10.0)
    assert (found if found is None else [member.name for member in found[0]]) == blamed
    assert blame_network(members(len(statuses)), statuses, 20.0) is None, "15 s are less than 20"


@pytest.mark.parametrize("count", [2, 8, 9, 64, 256])
def test_every_host_is_looked_at_by_others_and_looks_at_few(count):
    indices = list(range(0, 3 * count, 3))
    seen = {index: neighbours(index, indices) for index in indices}
    assert all(index not in seen[index] for index in indices)
    assert all(any(index in seen[other] for other in indices) for index in indices)
    assert max(map(len, seen.values())) <= 8
    distances = range(1, count) if count <= 8 else [2**k for k in range(8) if 2**k < count]
    for place, index in enumerate(indices):
        assert sorted(seen[index]) == sorted(indices[(place + distance) % count] for distance in distances)


def test_a_connection_is_accepted_on_one_address_only_and_a_closed_port_is_not_reached():
    with accept_connections("127.0.0.1") as port:
        found = connect_all([("127.0.0.1", port), ("127.0.0.2", port)], 2.0)
    assert found == {("127.0.0.1", port): "", ("127.0.0.2", port): "Connection refused"}
    assert connect_all([("127.0.0.1", port)], 0.5) == {("127.0.0.1", port): "Connection refused"}
    assert connect_all([]) == {}


def test_the_link_of_loopback_is_up_and_an_address_of_another_machine_has_none():
    assert link_problem("127.0.0.1") == ""
    assert "no network interface has the address 192.0.2.7" in link_problem("192.0.2.7")


@pytest.mark.parametrize("hang_seconds", [10.0, 20.0, 120.0, 3600.0])
def test_a_loss_is_found_within_hang_seconds(hang_seconds):
    silence, outage = host_limits(hang_seconds)
    assert silence < hang_seconds and outage is not None and outage < hang_seconds
    assert silence <= 30
    assert host_limits(None)[1] is None


def test_one_signal_to_every_host_counts_once_and_a_second_to_any_counts():
    statuses = {0: status(0), 1: status(1)}
    stops = ClusterStops(lambda: statuses)
    assert stops.received == []
    statuses = {0: status(0, signals=(10,)), 1: status(1, signals=(10,))}
    assert stops.received == [10]
    statuses = {0: status(0, signals=(10,)), 1: status(1, signals=(10, 2))}
    assert stops.received == [10, 2]
    statuses = {0: status(0)}
    assert stops.received == [10, 2], "a host that is gone takes nothing back"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"findings": ("a slow link", "no memory"), "link": "down", "attempt": 3}, "a slow link; no memory"),
        ({"link": "down", "attempt": 3}, "down"),
        ({"attempt": 3}, "it still ends processes of the last attempt"),
        ({}, "it is being examined"),
        ({"examined": 2}, "it does not answer at 10.0.0.2 port 1001"),
    ],
)
def test_a_host_that_is_waited_for_is_named_with_the_first_reason(tmp_path, fields, reason):
    host = status(1, **fields)
    voice = SimpleNamespace(complain=print, show_event=print)
    supervision = SimpleNamespace(voice=voice, run_dir=tmp_path, recovery=SimpleNamespace(hang_seconds=9.0))
    run = SimpleNamespace(supervision=supervision, least=1, most=2)
    bulletin = Bulletin(tmp_path, Orders(1, 0, "a", "l"))
    bulletin.suspect(1, 2)
    attempts = ClusterAttempts(run, SimpleNamespace(living=lambda _: {0: status(0), 1: host}), bulletin)
    assert attempts._missing({0: status(0)}) == f"1 of 1 to 2 hosts are ready (h1: {reason})"
