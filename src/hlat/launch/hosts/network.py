"""The network between the hosts of a run: who does not reach whom, and which hosts are to blame.

    accept_connections   on the address of this host, each closed at once
    Prober               a connection per second to each target --> seconds since a target last answered
    statuses of all hosts: pairs that fail, links that are down --blame_network--> hosts whose network fails, and why

Training itself cannot tell which host has lost its network: every rank waits for another one. Supervisors speak through
files, so they still hear from each other, and each says whom it does not reach.
"""

import errno
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from hlat.launch.hosts.records import HostMember, HostStatus
from hlat.runtime.distributed.network import interface_of, listen
from hlat.runtime.terminal import listed

_PROBE_EVERY = 1.0  # seconds between two connections to a host
_CONNECT = 3.0  # seconds for a connection: a lost packet is sent again after one
_FEW_HOSTS = 8  # hosts up to which each connects to all others

Target = tuple[str, int]
"""Address and port."""


@contextmanager
def accept_connections(address: str, port: int = 0) -> Iterator[int]:
    """Accept connections on this address only, and yield the port; 0 takes a free one.

    OSError: the address is not this host's, or the port is taken.
    """
    with listen(address, port) as listener:
        thread = threading.Thread(target=_accept, args=(listener,), name="reachability", daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
    thread.join(_CONNECT)


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):  # these pass
                time.sleep(_PROBE_EVERY)
                continue
            return  # closed
        connection.close()


def neighbours(index: int, indices: list[int]) -> list[int]:
    """Return the hosts that a host connects to: all others if they are few, else those 1, 2, 4, ... places after it."""
    if len(indices) <= _FEW_HOSTS:
        return [other for other in indices if other != index]
    # Few connections per host, and yet several others look at each host.
    place, count = indices.index(index), len(indices)
    return [indices[(place + (1 << doubled)) % count] for doubled in range((count - 1).bit_length())]


class Prober:
    """Connects to other hosts on a thread."""

    def __init__(self) -> None:
        self.targets: Mapping[int, Target] = {}  # by number of the host
        self._answered: dict[Target, float] = {}
        self._failing: dict[Target, float] = {}
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator["Prober"]:
        thread = threading.Thread(target=self._run, name="prober", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join(2 * _CONNECT)

    def unreachable(self) -> dict[str, float]:
        """Return the hosts that answered once and do not answer now, with the seconds since they last did."""
        now, targets = time.monotonic(), self.targets
        return {
            str(index): now - self._answered[target]
            for index, target in targets.items()
            if target in self._failing and target in self._answered
        }

    def _run(self) -> None:
        while not self._stop.is_set():
            begin = time.monotonic()
            for target, problem in connect_all(set(self.targets.values())).items():
                if problem:
                    self._failing.setdefault(target, begin)
                else:
                    self._answered[target] = begin
                    self._failing.pop(target, None)
            self._stop.wait(max(0.0, _PROBE_EVERY - (time.monotonic() - begin)))


def connect_all(targets: Collection[Target], seconds: float = _CONNECT) -> dict[Target, str]:
    """Connect to all targets at the same time; return why each has not answered in time, an empty text if it has."""

    def attempt(target: Target) -> str:
        try:
            socket.create_connection(target, timeout=seconds).close()
        except OSError as error:
            return str(error.strerror or error) or type(error).__name__
        return ""

    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        return dict(zip(targets, pool.map(attempt, targets), strict=True))


def link_problem(address: str) -> str:
    """Return why the network interface with an address does not work; an empty text if nothing is known against it."""
    name = interface_of(address)
    if name is None:
        return f"no network interface has the address {address}"
    with suppress(OSError):
        if (Path("/sys/class/net") / name / "carrier").read_text().strip() == "0":
            return f"its network interface {name} has no link"
    return ""


_LISTED_PAIRS = 6  # pairs in a message, at most


def blame_network(
    members: Sequence[HostMember], statuses: Mapping[int, HostStatus], seconds: float
) -> tuple[list[HostMember], str] | None:
    """Return the hosts that have lost their network, and the reason; None if all reach each other.

    A host whose link is down is to blame. Else it is the one that takes part in the most failing pairs; hosts that
    share the first place have lost the network between them. A pair fails if one side has not reached the other for
    ``seconds``. ``statuses`` are the newest of each host, by index.
    """
    by_index = {member.index: member for member in members}
    pairs = {
        frozenset((index, int(other)))
        for index, status in statuses.items()
        for other, since in status.unreachable.items()
        if since > seconds and index in by_index and int(other) in by_index
    }
    if not pairs:
        return None
    down = [by_index[index] for index, status in sorted(statuses.items()) if index in by_index and status.link]
    if down:
        return down, listed((f"{each.describe()}: {statuses[each.index].link}" for each in down), between="; ")
    counts = {index: sum(index in pair for pair in pairs) for index in sorted(by_index)}
    most = max(counts.values())
    blamed = [by_index[index] for index, count in counts.items() if count == most]
    if len(blamed) == 1:
        others = sorted(by_index[index].name for pair in pairs for index in pair if index != blamed[0].index)
        return (
            blamed,
            f"{blamed[0].describe()} cannot be reached over the network from {', '.join(others[:_LISTED_PAIRS])}",
        )
    named = sorted(" and ".join(sorted(by_index[index].name for index in pair)) for pair in pairs)
    return blamed, f"hosts do not reach each other over the network: {'; '.join(named[:_LISTED_PAIRS])}"
