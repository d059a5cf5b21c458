"""Connections between hosts: a small server on each, which tells the time and receives data.

    connect --token--> server of another host          time:  ask_time --> difference of clocks
                                                       data:  measure_rate --> bytes per second

The server listens on the address of its host only, for the seconds of an examination. A client that does not know its
token, which hosts exchange through the run's folder, is cut off.
"""

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from hlat.launch.preflight.place import Peer
from hlat.runtime.distributed.addresses import listen

_TIMEOUT = 3.0  # seconds for a connection, and for an answer
_TOKEN = 32  # characters
_TIME, _DATA = b"T", b"D"
_SENT = 4 << 20  # bytes: a third of a second at 100 Mbit/s
_CHUNK = 1 << 18
_REPEATS = (3, 8)  # the fastest counts: other programs can only slow a message down; more if all were slow
_FAST = 100e6  # bytes per second
_QUESTIONS = 5


class LinkServer:
    """Server of this host for the other hosts.

    Args:
        address: address to listen on.
        port: port; 0 for a free one.
        clock: seconds since 1970.

    Attributes:
        port: port that it listens on.
        token: word that clients have to send.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """

    def __init__(self, address: str, port: int, clock: Callable[[], float]) -> None:
        self._listener = listen(address, port)
        self.port, self.token = int(self._listener.getsockname()[1]), secrets.token_hex(_TOKEN // 2)
        self._clock = clock
        threading.Thread(target=self._accept, name="link-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), name="link", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError), connection:
            connection.settimeout(2 * _TIMEOUT)
            if not hmac.compare_digest(_receive(connection, _TOKEN), self.token.encode()):
                return
            connection.sendall(b"+")
            while order := connection.recv(1):
                if order == _DATA:
                    _receive(connection, _SENT)
                    connection.sendall(b"+")
                else:
                    connection.sendall(struct.pack("!d", self._clock()))


def connect(peer: Peer) -> socket.socket:
    """Connect to the server of a host, and prove that this one takes part.

    Raises:
        OSError: no connection within three seconds, or the server does not answer.
    """
    connection = socket.create_connection((peer.address, peer.port), timeout=_TIMEOUT)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(peer.token.encode())
        _receive(connection, 1)
    except EOFError as error:
        connection.close()
        raise ConnectionResetError("another program answers there") from error
    except OSError:
        connection.close()
        raise
    return connection


def ask_time(peer: Peer, clock: Callable[[], float]) -> tuple[float, float]:
    """Return how far the clock here is ahead of another host's, and the bound of that measurement's error, in seconds.

    Raises:
        OSError: the host does not answer.
    """
    best = (0.0, float("inf"))
    with connect(peer) as connection:
        for _ in range(_QUESTIONS):
            begin, asked_at = time.perf_counter(), clock()
            connection.sendall(_TIME)
            (there,) = struct.unpack("!d", _receive(connection, 8))
            elapsed = time.perf_counter() - begin
            best = min(best, (asked_at + elapsed / 2 - there, elapsed / 2), key=lambda found: found[1])
    return best


def measure_rate(peer: Peer) -> float:
    """Return the bytes per second that the other host receives from this one.

    Raises:
        OSError: the host does not answer.
    """
    content, best = bytes(_CHUNK), float("inf")
    with connect(peer) as connection:
        for attempt in range(_REPEATS[1]):
            if attempt >= _REPEATS[0] and _SENT / best > _FAST:
                break
            begin = time.perf_counter()
            connection.sendall(_DATA)
            for _ in range(_SENT // _CHUNK):
                connection.sendall(content)
            _receive(connection, 1)
            best = min(best, time.perf_counter() - begin)
    return _SENT / max(best, 1e-9)


def _receive(connection: socket.socket, count: int) -> bytes:
    """Receive so many bytes.

    Raises:
        EOFError: the other end closed the connection before.
        OSError: nothing came in time.
    """
    content = bytearray(min(count, _CHUNK))
    left = count
    while left:
        received = connection.recv_into(memoryview(content)[: min(left, len(content))])
        if not received:
            raise EOFError("the connection was closed")
        left -= received
    return bytes(content[:count])
