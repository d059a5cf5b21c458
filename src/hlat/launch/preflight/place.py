"""A host as checks see it: the request, the tools that they measure with, and the other hosts once they are known."""

import fcntl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hlat.launch.preflight.host_memory import available_memory
from hlat.launch.preflight.request import PreflightRequest
from hlat.runtime.backend.faults.device_monitors import device_reports
from hlat.runtime.distributed.addresses import resolve_addresses


@dataclass(frozen=True)
class HostTools:
    """Functions of the system that checks of a host use.

    Attributes:
        clock: seconds since 1970.
        flock: locks an open file, as ``fcntl.flock``.
        available_memory: bytes of memory that processes of this host can still allocate.
        resolve: returns the addresses of a host name.
        device_reports: returns the faults that devices of this host have reported.
    """

    clock: Callable[[], float] = time.time
    flock: Callable[[int, int], None] = fcntl.flock
    available_memory: Callable[[], int] = available_memory
    resolve: Callable[[str], list[str]] = resolve_addresses
    device_reports: Callable[[], list[str]] = device_reports


@dataclass(frozen=True)
class Peer:
    """Another host of the examination, or this one.

    Attributes:
        name: name in the report.
        hostname: name that the machine itself has.
        address: address on which it listens.
        addresses: all addresses of its interfaces.
        port: port of its link server; 0 if it could not listen.
        token: word that its link server expects.
    """

    name: str
    hostname: str
    address: str
    addresses: tuple[str, ...]
    port: int
    token: str


@dataclass(frozen=True)
class HostView:
    """Place of measurements on a host.

    Attributes:
        request: what is examined.
        tools: functions to measure with.
        listen_error: reason why this host cannot listen on its address; empty if it does.
        peers: hosts by index, this one included; empty before they have met.
        lock_file: file that host 0 has locked; None before the hosts have met, and on host 0.
    """

    request: PreflightRequest
    tools: HostTools = HostTools()
    listen_error: str = ""
    peers: Mapping[int, Peer] = field(default_factory=dict)
    lock_file: Path | None = None

    def others(self) -> dict[int, Peer]:
        """Return the other hosts by index."""
        return {node: peer for node, peer in self.peers.items() if node != self.request.node}
