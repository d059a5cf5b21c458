"""Addresses: where rank 0 listens, how the others reach it, and over which network they then talk.

MASTER_ADDR --candidates--> addresses --listen--> a socket on that address and no other        (rank 0)
                                      --reach---> the address that answers, and ours towards it (the others)
an address of this machine --interface_of--> the name of its network interface, for gloo
"""

import ipaddress
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_ELSEWHERE = ("192.0.2.1", 9)  # of a network for documentation (RFC 5737): nothing is sent there, only the way is asked
_GET_ADDRESSES = 0x8912  # SIOCGIFCONF, linux/sockios.h
_ENTRY = 40  # bytes of one entry of its answer, struct ifreq
_CONNECT = 5.0  # seconds for one attempt
_PAUSES = (0.01, 1.0)  # seconds between attempts: at first, at most


def is_loopback(address: str) -> bool:
    """Whether an address is one by which only this machine reaches itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def resolve_addresses(host: str) -> list[str]:
    """The addresses that a name stands for, most likely first; an address is itself.

    Some systems have their own name stand for 127.0.1.1, where no other machine reaches them: what is asked for by such
    a name is the address towards the network, so that comes first.

    Raises:
        OSError: nothing is known by that name.
    """
    if _is_address(host):  # also quicker: nothing has to be looked up
        return [host]
    found = list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    if host != "localhost" and all(map(is_loopback, found)):
        found = [*_towards_the_network(), *found]
    return found


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the address asked for, and on no other one.

    Raises:
        OSError: the name is not known, the address is not this machine's, or the port is taken.
    """
    refused: OSError | None = None
    for address in resolve_addresses(host):
        try:
            return socket.create_server((address, port), family=_family(address), backlog=socket.SOMAXCONN)
        except OSError as error:
            refused = refused or error
    assert refused is not None, "a name stands for one address at least"
    raise refused


def wait_until_reachable(host: str, port: int, seconds: float) -> tuple[str, str]:
    """Wait until somebody listens there; signals are heard meanwhile.

    Returns:
        The address that answers, and that of this machine by which it is reached.

    Raises:
        OSError: nobody does within so many seconds.
    """
    deadline, pause = time.monotonic() + seconds, _PAUSES[0]
    while True:
        refused: OSError = ConnectionRefusedError("nobody listens there")
        try:
            for address in resolve_addresses(host):
                try:
                    left = max(_PAUSES[0], deadline - time.monotonic())
                    with socket.socket(_family(address)) as connection:
                        connection.settimeout(min(_CONNECT, left))
                        connection.connect((address, port))
                        return address, str(connection.getsockname()[0])
                except OSError as error:
                    refused = error
        except OSError as error:  # the name is not known, or not yet: a machine may be about to be added
            refused = error
        if time.monotonic() + pause >= deadline:
            raise refused
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address; None if none does, or this system does not say."""
    if is_loopback(address):
        return "lo0" if sys.platform == "darwin" else "lo"
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((name for name, found in _interfaces() if found == wanted), None)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _towards_the_network() -> list[str]:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect(_ELSEWHERE)
            return [str(asking.getsockname()[0])]
    except OSError:  # there is no network
        return []


def _interfaces() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Interfaces of this machine and their addresses, as Linux tells them."""
    import array  # noqa: PLC0415  (few runs come here)
    import fcntl  # noqa: PLC0415

    names = array.array("B", bytes(256 * _ENTRY))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _GET_ADDRESSES, struct.pack("iL", len(names), names.buffer_info()[0]))
    for at in range(0, struct.unpack("iL", answer)[0], _ENTRY):
        entry = names[at : at + _ENTRY].tobytes()
        yield entry[:16].partition(b"\0")[0].decode().partition(":")[0], ipaddress.IPv4Address(entry[20:24])
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # no IPv6
        lines = []
    for line in lines:
        number, *_, name = line.split()
        yield name, ipaddress.IPv6Address(bytes.fromhex(number))
