"""Reachability: every host accepts connections from the others, and connects to some of them again and again.

    Responder   accepts on the address of this host, and closes at once
    Prober      a connection per second to each target --> seconds since a target last answered

Training itself cannot tell which host has lost its network: every rank waits for another one. Supervisors speak through
files, so they still hear from each other, and each says whom it does not reach.
"""

import errno
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hlat.runtime.distributed.addresses import interface_of, listen

_EVERY = 1.0  # seconds between two connections to a host
_CONNECT = 3.0  # seconds for a connection: a lost packet is sent again after one
_ALL = 8  # hosts up to which each connects to all others

Target = tuple[str, int]
"""Address and port."""


@contextmanager
def accept_connections(address: str) -> Iterator[int]:
    """Accept connections on an address within the block, and on no other address; yield the port.

    Raises:
        OSError: this host does not have the address.
    """
    with listen(address, 0) as listener:
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
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                time.sleep(_EVERY)
                continue
            return  # closed
        connection.close()


def neighbours(index: int, indices: list[int]) -> list[int]:
    """Return the hosts that a host connects to: all others if they are few, else those 1, 2, 4, ... places after it."""
    if len(indices) <= _ALL:
        return [other for other in indices if other != index]
    place, distance, found = indices.index(index), 1, []
    while distance < len(indices):
        found.append(indices[(place + distance) % len(indices)])
        distance *= 2
    return found


class Prober:
    """Connects to other hosts on a thread."""

    def __init__(self) -> None:
        self._targets: Mapping[int, Target] = {}
        self._answered: dict[Target, float] = {}
        self._failing: dict[Target, float] = {}
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator["Prober"]:
        """Connect within the block."""
        thread = threading.Thread(target=self._run, name="prober", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join(2 * _CONNECT)

    def set_targets(self, targets: Mapping[int, Target]) -> None:
        """Set the hosts to connect to, by index."""
        self._targets = dict(targets)

    def unreachable(self) -> dict[str, float]:
        """Return the hosts that answered once and do not answer now, with the seconds since they last did."""
        now, targets = time.monotonic(), self._targets
        return {
            str(index): now - self._answered[target]
            for index, target in targets.items()
            if target in self._failing and target in self._answered
        }

    def _run(self) -> None:
        while not self._stop.is_set():
            begin = time.monotonic()
            targets = list(dict.fromkeys(self._targets.values()))
            reached = can_connect(targets, _CONNECT)
            for target in targets:
                if target in reached:
                    self._answered[target] = begin
                    self._failing.pop(target, None)
                else:
                    self._failing.setdefault(target, begin)
            self._stop.wait(max(0.0, _EVERY - (time.monotonic() - begin)))


def can_connect(targets: list[Target], seconds: float) -> set[Target]:
    """Connect to all targets at the same time; return those that answered within ``seconds``."""
    poller, waiting, reached = select.poll(), {}, set()
    deadline = time.monotonic() + seconds
    try:
        for target in targets:
            family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM)
            waiting[connection.fileno()] = (connection, target)
            connection.setblocking(False)
            if connection.connect_ex(target) in (0, errno.EINPROGRESS):
                poller.register(connection, select.POLLOUT)
        pending = len(waiting)
        while pending and (left := deadline - time.monotonic()) > 0:
            for number, _ in poller.poll(1000 * left):
                poller.unregister(number)
                pending -= 1
                connection, target = waiting[number]
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    reached.add(target)
            if not pending:
                break
    finally:
        for connection, _ in waiting.values():
            connection.close()
    return reached


def link_problem(address: str) -> str:
    """Return why the network interface with an address does not work; an empty text if nothing is known against it."""
    name = interface_of(address)
    if name is None:
        return f"no network interface has the address {address}"
    with suppress(OSError):
        if (Path("/sys/class/net") / name / "carrier").read_text().strip() == "0":
            return f"its network interface {name} has no link"
    return ""
