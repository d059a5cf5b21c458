"""Addresses: where rank 0 listens, how the other ranks reach it, and over which network they communicate.

MASTER_ADDR --resolve_addresses--> addresses --listen--> a socket on that address and no other          (rank 0)
                                             --wait_until_reachable--> its address, and the local one   (other ranks)
an address of this machine --interface_of--> name of its network interface, for gloo --address_of--> its address
"""

import ipaddress
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_ANY_EXTERNAL = ("192.0.2.1", 9)  # a network for documentation (RFC 5737): nothing is sent, only the route is looked up
_GET_ADDRESSES = 0x8912  # SIOCGIFCONF, linux/sockios.h
_ENTRY = 40  # bytes of one entry of its result, struct ifreq
_CONNECT = 5.0  # seconds for one attempt
_PAUSES = (0.01, 1.0)  # seconds between attempts: first, longest


def is_loopback(address: str) -> bool:
    """Return True if only this machine reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def resolve_addresses(host: str) -> list[str]:
    """Resolve a host name to addresses, most likely first; OSError for an unknown name."""
    if _is_address(host):  # saves a lookup
        return [host]
    found = list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    # Some systems resolve their own name to 127.0.1.1, where no other machine reaches them.
    if host != "localhost" and all(map(is_loopback, found)):
        found = [*_towards_the_network(), *found]
    return found


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address, and on no other one; OSError if it is not this machine's, or the port is taken."""
    last_error: OSError | None = None
    for address in resolve_addresses(host):
        try:
            return socket.create_server((address, port), family=_family(address), backlog=socket.SOMAXCONN)
        except OSError as error:
            last_error = last_error or error
    assert last_error is not None, "a name resolves to at least one address"
    raise last_error


def wait_until_reachable(host: str, port: int, seconds: float) -> tuple[str, str]:
    """Wait until a connection succeeds; return the address that answered, and this machine's on that connection.

    Raises:
        OSError: no connection succeeded in so many seconds.
    """
    deadline, pause = time.monotonic() + seconds, _PAUSES[0]
    while True:
        last_error: OSError = ConnectionRefusedError("no process listens there")
        try:
            for address in resolve_addresses(host):
                try:
                    left = max(_PAUSES[0], deadline - time.monotonic())
                    with socket.socket(_family(address)) as connection:
                        connection.settimeout(min(_CONNECT, left))
                        connection.connect((address, port))
                        return address, str(connection.getsockname()[0])
                except OSError as error:
                    last_error = error
        except OSError as error:  # the name is unknown, perhaps only until a machine has been added
            last_error = error
        if time.monotonic() + pause >= deadline:
            raise last_error
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])


def interface_of(address: str) -> str | None:
    """Name of the interface that has an address; None if there is none, or the system does not report it."""
    if is_loopback(address):
        return "lo0" if sys.platform == "darwin" else "lo"
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((name for name, found in _interfaces() if found == wanted), None)


def own_addresses() -> dict[str, list[str]]:
    """Return this machine's addresses by network interface; empty where the system does not report them."""
    found: dict[str, list[str]] = {}
    for name, address in _interfaces() if sys.platform == "linux" else ():
        found.setdefault(name, []).append(str(address))
    return found


def address_of(interface: str) -> str | None:
    """Address of a network interface, IPv4 first; None if unknown."""
    found = [address for name, address in _interfaces() if name == interface] if sys.platform == "linux" else []
    return str(min(found, key=lambda address: address.version)) if found else None


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
            asking.connect(_ANY_EXTERNAL)
            return [str(asking.getsockname()[0])]
    except OSError:  # there is no network
        return []


def _interfaces() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    import array  # noqa: PLC0415  (few runs need it)
    import fcntl  # noqa: PLC0415

    names = array.array("B", bytes(256 * _ENTRY))  # SIOCGIFCONF reports IPv4 only; IPv6 follows from /proc
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _GET_ADDRESSES, struct.pack("iL", len(names), names.buffer_info()[0]))
    for start in range(0, struct.unpack("iL", answer)[0], _ENTRY):
        entry = names[start : start + _ENTRY].tobytes()
        yield entry[:16].partition(b"\0")[0].decode().partition(":")[0], ipaddress.IPv4Address(entry[20:24])
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # no IPv6
        lines = []
    for line in lines:
        number, *_, name = line.split()
        yield name, ipaddress.IPv6Address(bytes.fromhex(number))
