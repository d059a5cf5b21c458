"""Network of a run: where rank 0 listens and how the others reach it, and the secret without which nobody joins.

    MASTER_ADDR --resolve_addresses--> addresses --listen--> a socket on that address and no other        (rank 0)
                                                 --wait_until_reachable--> its address, and the local one (other ranks)
    an address of this machine --interface_of--> name of its network interface, for gloo --address_of--> its address

    HLAT_RUN_SECRET, from the launcher ---+
    <run.dir>/.secret-PORT-ROUND, 0600 ---+--Signer--> HMAC-SHA256 of the messages of the rendezvous
    neither: nothing is authenticated ----+

A process without the secret cannot join a run or forge a message. The first process creates the file, and rank 0
removes it after the rendezvous. It proves that a process can read the run's folder as the same user.
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hlat.runtime.errors import LaunchError, StorageError

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
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((name for name, found in _interfaces() if found == wanted), None)


def own_addresses() -> dict[str, list[str]]:
    """Return this machine's addresses by network interface; empty where the system does not report them."""
    found: dict[str, list[str]] = {}
    for name, address in _interfaces():
        found.setdefault(name, []).append(str(address))
    return found


def address_of(interface: str) -> str | None:
    """Address of a network interface, IPv4 first; None if unknown."""
    found = [address for name, address in _interfaces() if name == interface]
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

    if sys.platform != "linux":  # which does not report them in this way
        return
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


RUN_SECRET_ENV = "HLAT_RUN_SECRET"
"""Environment variable of a run's secret: any text, the same for all of its processes."""

_DIGITS = 64  # hexadecimal digits of a secret in a file: 256 bits
_WRITING = 10.0  # seconds to wait for the process that writes the file


class Signer:
    """Signs and verifies messages with the key of a run (HMAC-SHA256); with an empty key, any process can."""

    SIZE = 32
    """Bytes of a signature."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, *fields: bytes) -> bytes:
        """Signature of byte strings and their boundaries: 32 bytes."""
        # With lengths: two sequences with the same concatenation have different signatures.
        framed = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
        return hmac.new(self._key, framed, hashlib.sha256).digest()

    def is_valid(self, signature: bytes, *fields: bytes) -> bool:
        return hmac.compare_digest(signature, self.sign(*fields))  # in constant time

    def derive(self, *fields: bytes) -> "Signer":
        return Signer(self.sign(*fields))

    def __repr__(self) -> str:
        return "Signer"  # the key must not get into a log


def run_signer(file: Path | None) -> Signer:
    """Return the signer of this run; LaunchError for a file without a secret, StorageError if it cannot be read."""
    # The launcher's secret, else that of a file in a folder that all processes share.
    given = os.environ.get(RUN_SECRET_ENV, "")
    if given or file is None:
        return Signer(given.encode("utf-8", "surrogateescape"))
    return Signer(_shared_secret(file).encode())


def _shared_secret(file: Path) -> str:
    try:
        with suppress(FileExistsError):
            # O_EXCL: the first process creates it, the others read it.
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "w") as new:
                new.write(secrets.token_hex(_DIGITS // 2))
        deadline = time.monotonic() + _WRITING
        while len(text := file.read_text()) < _DIGITS and time.monotonic() < deadline:
            time.sleep(0.01)  # the process that created it has not written it yet
    except OSError as error:
        raise StorageError(f"{file}: cannot be created and read: {error.strerror}. Give another run.dir.") from error
    if len(text) != _DIGITS:
        raise LaunchError(f"{file}: contains no secret of a run. Remove it, and start all processes again.")
    return text
