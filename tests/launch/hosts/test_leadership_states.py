"""The laws of leadership, in every reachable state of two and three hosts.

A host may be stopped between any two of its steps and go on at any later time; each may think that any other is dead.

    look at the orders -> claim the next term -> read what the last leader left -> check | write -> check | write -> ...
                                                                                  ^ a stop here leaves a late write

States are explored breadth first with the code that decides (Follower, Bulletin, first_number, is_candidate); the
folder and the processes are replaced. Witness is the list of laws in ``World.carry_out`` and ``converges``.
"""

from collections import deque
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace

import pytest

from hlat.launch.hosts.records import AttemptOrder, Follower, NotLeaderError, Orders, is_candidate
from hlat.launch.supervision import remote_ranks as bulletin_module
from hlat.launch.supervision.remote_ranks import Bulletin


@dataclass
class Host:
    """A host: whom it follows, its processes, and how far it is as a leader."""

    follower: Follower = field(default_factory=Follower)
    running: tuple[int, str] | None = None  # number and secret of the attempt
    done: int = 0  # number of the last instruction carried out
    carried_out: frozenset[tuple[int, int]] = frozenset()  # term and number of each
    claiming: int | None = None
    term: int = 0  # the last that it has claimed
    bulletin: Bulletin | None = None
    written: int | None = None  # writes as a leader; None if it does not lead
    pending: Orders | None = None  # checked, and not written yet

    def key(self) -> tuple:
        orders = self.follower.orders
        own = None if self.bulletin is None else summary(self.bulletin.orders)
        ranks = (self.running, self.done, self.carried_out)
        follows = (self.follower.term, summary(orders))
        return (follows, ranks, self.claiming, self.term, own, self.written, summary(self.pending))


def summary(orders: Orders | None) -> tuple | None:
    if orders is None:
        return None
    attempt = None if orders.attempt is None else (orders.attempt.number, orders.attempt.secret)
    return (orders.term, orders.leader, attempt, tuple(each.number for each in orders.instructions))


class World:
    """The shared folder and the hosts. It is passed to the code as the folder."""

    def __init__(self, hosts: int, terms: int, writes: int) -> None:
        self.term, self.orders, self.hosts = 0, None, [Host() for _ in range(hosts)]
        self.most = terms, writes  # writes of a leader: first orders, an attempt, an instruction or the attempt's end
        self.begun: frozenset[tuple[int, str]] = frozenset()
        self.captured: Orders | None = None

    def __truediv__(self, name: str) -> "World":
        return self

    def key(self) -> tuple:
        return (self.term, summary(self.orders), tuple(host.key() for host in self.hosts))

    def changed(self, index: int) -> tuple["World", Host]:
        """Return a copy in which a host may change."""
        world = copy(self)
        world.hosts = [copy(host) for host in self.hosts]
        host = world.hosts[index]
        host.follower, host.bulletin = copy(host.follower), copy(host.bulletin)
        if host.bulletin is not None:
            host.bulletin._folder = world
        return world, host

    def look(self, index: int, alive: bool) -> "World":
        world, host = self.changed(index)
        before = host.follower.term
        orders = host.follower.accept(world.orders, alive)
        assert host.follower.term >= before, "no host goes back to an earlier leader"
        assert alive or host.follower.term == before, "nobody begins to follow a leader who gives no sign of life"
        if orders is not None:
            assert orders.term >= host.term, "no host obeys those that it has succeeded"
            world.carry_out(host, orders)
        return world

    def carry_out(self, host: Host, orders: Orders) -> None:
        """Do as ``HostAgent._follow`` and ``HostRanks.follow``; check that nothing is mistaken for something else."""
        attempt = orders.attempt
        if host.running is not None and (attempt is None or attempt.number != host.running[0]):
            host.running, host.done = None, 0
        if attempt is None:
            return
        if host.running is None:
            host.running = (attempt.number, attempt.secret)
        assert host.running == (attempt.number, attempt.secret), "one number is one attempt"
        for each in orders.instructions:
            identity = (orders.term, each.number)
            if identity not in host.carried_out:
                assert each.number > host.done, "an instruction of a new leader is not taken for one that was done"
                host.done, host.carried_out = each.number, host.carried_out | {identity}

    def claim(self, index: int) -> "World":
        world, host = self.changed(index)
        assert host.claiming is not None
        if host.claiming > world.term:  # O_EXCL: terms are claimed in turn, so it is free if it is above the newest
            world.term = host.term = host.claiming
            host.written, host.bulletin = 0, None
            host.follower.lead(host.claiming)
        host.claiming = None
        return world

    def lead(self, index: int, *, only_check: bool = False) -> "World":
        """Take the next step as a leader, up to the write."""
        world, host = self.changed(index)
        world.captured = None
        try:
            if host.bulletin is None:
                first = Orders(host.term, index, f"start-{index}", "launch")
                earlier = world.orders
                runs = {each.running for each in world.hosts}
                if earlier and earlier.attempt and (earlier.attempt.number, earlier.attempt.secret) in runs:
                    first = replace(first, attempt=earlier.attempt)
                host.bulletin = Bulletin(world, first)
            elif only_check:
                host.bulletin.check()
            elif host.bulletin.orders.attempt is None:
                number = host.bulletin.first_number + host.written
                secret = f"{index}-{host.term}-{host.written}"
                host.bulletin.begin(AttemptOrder(number, "launch", (), "", 0, secret, {}, None), {})
            elif not host.bulletin.orders.instructions:
                host.bulletin.instruct("kill")
            else:
                host.bulletin.end()
            host.written += 0 if only_check else 1
        except NotLeaderError:
            host.bulletin = host.written = None
        host.pending = world.captured
        return world

    def land(self, index: int) -> "World":
        """Let a write that was checked earlier reach the folder."""
        world, host = self.changed(index)
        world.orders, host.pending = host.pending, None
        return world

    def successors(self) -> Iterator["World"]:
        """Yield every state to which one step of one host leads."""
        terms, writes = self.most
        for index, host in enumerate(self.hosts):
            for alive in (True, False):
                yield self.look(index, alive)
            if host.claiming is not None:
                yield self.claim(index)
            elif host.written is None and self.term < terms:
                world, changed = self.changed(index)
                changed.claiming = world.term + 1
                yield world
            if host.pending is not None:
                yield self.land(index)
            elif host.written is not None:
                if host.written < writes:
                    yield self.lead(index)
                if host.bulletin is not None:
                    yield self.lead(index, only_check=True)

    def converges(self, dead: int | None) -> bool:
        """Let all hosts but one go on in turn; return True if they come to follow one leader, who is alive."""
        world = self
        living = [index for index in range(len(self.hosts)) if index != dead]
        for _ in range(8):
            for index in living:
                host = world.hosts[index]
                if host.pending is not None:
                    world = world.land(index)
                elif host.claiming is not None:
                    world = world.claim(index)
                elif host.written is not None:
                    world = world.lead(index, only_check=True)
                led = world.orders is not None and world.orders.leader in living and world.orders.term >= world.term
                world = world.look(index, led)
                host = world.hosts[index]
                if not led and host.written is None and host.claiming is None and is_candidate(index, living):
                    world, host = world.changed(index)
                    host.claiming = world.term + 1
        terms = {world.term, world.orders.term, *(world.hosts[index].follower.term for index in living)}
        return len(terms) == 1 and world.hosts[world.orders.leader].written is not None


def explore(world: World) -> Iterator[World]:
    """Yield every reachable state once."""
    seen, waiting = {world.key()}, deque([world])
    while waiting:
        state = waiting.popleft()
        yield state
        for following in state.successors():
            if following.key() not in seen:
                seen.add(following.key())
                waiting.append(following)


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    def write(world: World, orders: Orders) -> None:
        world.captured = orders

    monkeypatch.setattr(bulletin_module, "newest_term", lambda world: world.term)
    monkeypatch.setattr(bulletin_module, "read_orders", lambda world: world.orders)
    monkeypatch.setattr(bulletin_module, "write_record", write)


@pytest.mark.parametrize(
    ("hosts", "terms", "writes"),
    [(2, 2, 3), pytest.param(2, 3, 3, marks=pytest.mark.slow), pytest.param(3, 2, 2, marks=pytest.mark.slow)],
)
def test_in_every_state_hosts_follow_the_newest_leader_and_come_to_agree(hosts, terms, writes):
    for state in explore(World(hosts, terms, writes)):
        for dead in (None, *range(hosts)):
            assert state.converges(dead), state.key()
