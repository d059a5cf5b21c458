"""The meeting of the hosts: they exchange reports as files in a folder of the run, and connect to each other.

    <run.dir>/doctor/knock-00001      "host 1 is here", with a number that it drew
    <run.dir>/doctor/current          name of the folder of the present meeting, which host 0 made
      <name>/members.json             hosts that host 0 has admitted, by the number that each drew
      <name>/alive-00001              a counter that grows every second
      <name>/ranks-00001.json         report of host 1 for the stage "ranks"

    connect --token--> LinkServer of another host      time:  ask_time --> difference of clocks
                                                       data:  measure_rate --> bytes per second

Files of an earlier meeting do not disturb: its numbers are others. No clocks are compared to see who is alive: a host
is alive while its counter grows, as seen on the clock of the host that looks.

The server listens on the address of its host only, for the seconds of an examination. A client that does not know its
token, which hosts exchange through the run's folder, is cut off.
"""

import hmac
import json
import os
import secrets
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hlat.launch.preflight.request import Peer
from hlat.runtime.distributed.addresses import listen
from hlat.runtime.storage.local_files import write_atomic

_MEETING_FOLDER = "doctor"
_POLL = 0.05  # seconds between looks, at first
_LONGEST_POLL = 0.5
_BEAT = 1.0  # seconds between counts
_SILENCE = 15.0  # seconds without a count until a host is lost
_LEAVING = 5.0  # seconds for the other hosts to read the verdict

Report = dict[str, Any]


class Meeting(Protocol):
    """Exchange of reports between hosts."""

    folder: Path | None
    """Folder that all hosts share; None for a single host."""

    def post(self, stage: str, report: Report) -> None:
        """Publish the report of this host."""

    def gather(self, stage: str, nodes: Iterable[int]) -> dict[int, Report]:
        """Wait for the reports of hosts; return those that came. A host without one gave no sign of life."""

    def read_first(self, stage: str) -> Report | None:
        """Wait for the report of host 0; None if it gives no sign of life."""

    def leave(self) -> None:
        """End the meeting; host 0 removes its files."""


class Alone:
    """The meeting of a single host: nothing is written."""

    folder: Path | None = None

    def __init__(self) -> None:
        self._posts: dict[str, Report] = {}

    def post(self, stage: str, report: Report) -> None:
        self._posts[stage] = report

    def gather(self, stage: str, nodes: Iterable[int]) -> dict[int, Report]:
        return dict.fromkeys(nodes, self._posts[stage])

    def read_first(self, stage: str) -> Report | None:
        return self._posts[stage]

    def leave(self) -> None:
        """Leave nothing behind: there are no files."""


class SharedFolder:
    """The meeting of several hosts in the folder of the run.

    ``patience``: seconds to wait for a host to arrive, and for a report of one that is alive. OSError: the folder
    cannot be written. TimeoutError: host 0 did not open a meeting in time.
    """

    def __init__(self, run_dir: Path, node: int, nodes: int, patience: float) -> None:
        self._root, self._node, self._nodes, self._patience = run_dir / _MEETING_FOLDER, node, nodes, patience
        self._number = secrets.token_hex(8)
        self._stop, self._counts = threading.Event(), _Counts()
        self._arrived: set[int] = set()
        self._root.mkdir(parents=True, exist_ok=True)
        self.folder: Path | None = self._open() if node == 0 else self._join()
        self._folder = self.folder
        self._beat(0)
        self._beating = threading.Thread(target=self._keep_beating, name="alive", daemon=True)
        self._beating.start()

    def post(self, stage: str, report: Report) -> None:
        write_atomic(self._file(stage, self._node), json.dumps(report).encode())

    def gather(self, stage: str, nodes: Iterable[int]) -> dict[int, Report]:
        found: dict[int, Report] = {}
        waiting, deadline, pause = set(nodes), time.monotonic() + self._patience, _POLL
        while waiting:
            self._admit()
            for node in sorted(waiting):
                if (report := _read_json(self._file(stage, node))) is not None:
                    found[node] = report
            waiting -= set(found)
            self._arrived.update(found)
            now = time.monotonic()
            if now > deadline:
                break
            waiting = {node for node in waiting if not self._is_silent(node, now)}
            time.sleep(pause if waiting else 0.0)
            pause = min(1.5 * pause, _LONGEST_POLL)
        return found

    def read_first(self, stage: str) -> Report | None:
        """Wait for the report of host 0, as long as it is alive; it waits for every other host in turn."""
        pause = _POLL
        while (report := _read_json(self._file(stage, 0))) is None:
            if self._is_silent(0, time.monotonic(), unseen=_SILENCE):
                return None
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_POLL)
        return report

    def leave(self) -> None:
        """End the meeting; host 0 waits until the others have read the verdict, and removes its files."""
        self._stop.set()
        self._beating.join()
        if self._node != 0:
            with suppress(OSError):
                (self._root / f"knock-{self._node:05d}").unlink(missing_ok=True)
                self._file("left", self._node).write_text("{}")
        else:
            deadline = time.monotonic() + _LEAVING
            others = self._arrived - {0}
            while time.monotonic() < deadline and not all(self._file("left", node).exists() for node in others):
                time.sleep(_POLL)
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):
                (self._root / "current").unlink(missing_ok=True)
                self._root.rmdir()  # unless another host has knocked for the next meeting

    # --- opening and joining

    def _open(self) -> Path:
        folder = self._root / self._number
        folder.mkdir(mode=0o700)  # reports have the tokens of the hosts
        write_atomic(self._root / "current", self._number.encode())
        return folder

    def _join(self) -> Path:
        """Knock until host 0 has admitted this host, by its number, to a meeting."""
        knock = self._root / f"knock-{self._node:05d}"
        write_atomic(knock, self._number.encode())
        deadline, pause = time.monotonic() + self._patience, _POLL
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                folder = self._root / (self._root / "current").read_text(encoding="ascii")
                members = _read_json(folder / "members.json") or {}
                if members.get(str(self._node)) == self._number:
                    return folder
                if not knock.exists():  # the end of an earlier meeting removed it
                    write_atomic(knock, self._number.encode())
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_POLL)
        with suppress(OSError):
            knock.unlink(missing_ok=True)
            self._root.rmdir()
        raise TimeoutError(f"no sign of life from host 0 in {self._root}")

    def _admit(self) -> None:
        """On host 0, admit hosts that have knocked."""
        if self._node != 0:
            return
        knocks = {}
        for node in range(1, self._nodes):
            with suppress(OSError, ValueError):
                knocks[str(node)] = (self._root / f"knock-{node:05d}").read_text(encoding="ascii")
        if knocks != _read_json(self._folder / "members.json"):
            write_atomic(self._folder / "members.json", json.dumps(knocks).encode())

    # --- signs of life

    def _beat(self, count: int) -> None:
        with suppress(OSError):
            write_atomic(self._folder / f"alive-{self._node:05d}", str(count).encode())

    def _keep_beating(self) -> None:
        count = 0
        while not self._stop.wait(_BEAT):
            count += 1
            self._beat(count)

    def _is_silent(self, node: int, now: float, unseen: float | None = None) -> bool:
        """Return True if a host that has arrived counts no more, or never arrived within ``unseen`` seconds."""
        try:
            count = (self._folder / f"alive-{node:05d}").read_text(encoding="ascii")
        except (OSError, ValueError):
            count = ""
        age = self._counts.age(node, count, now)
        return age > (_SILENCE if self._counts.has(node) else self._patience if unseen is None else unseen)

    def _file(self, stage: str, node: int) -> Path:
        return self._folder / f"{stage}-{node:05d}.json"


class _Counts:
    """Last count of each host, and the time at which it was seen first."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, float]] = {}

    def age(self, node: int, count: str, now: float) -> float:
        """Seconds for which a host has had this count; an empty one is that of a host that has not arrived."""
        before = self._seen.get(node)
        if before is None or (count and before[0] != count):
            self._seen[node] = (count, now)
        return now - self._seen[node][1]

    def has(self, node: int) -> bool:
        return bool(self._seen.get(node, ("", 0.0))[0])


def meet(run_dir: Path, node: int, nodes: int, patience: float) -> Meeting:
    """Meet the other hosts, if there are any; OSError and TimeoutError as for ``SharedFolder``."""
    return Alone() if nodes == 1 else SharedFolder(run_dir, node, nodes, patience)


def remove_if_empty(folder: Path, kept: Path) -> None:
    """Remove a folder and its parents up to ``kept``, as long as they are empty."""
    while folder != kept and kept in folder.parents:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def existing_part(folder: Path) -> Path:
    """Return a path or its nearest parent that is there; a broken link is there."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def _read_json(path: Path) -> Report | None:
    try:
        content: Report = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content


_LINK_TIMEOUT = 3.0  # seconds for a connection, and for an answer
_TOKEN_LENGTH = 32  # characters
_ASK_TIME, _SEND_DATA = b"T", b"D"
_SENT_BYTES = 4 << 20  # bytes: a third of a second at 100 Mbit/s
_CHUNK = 1 << 18
_REPEATS = (3, 8)  # the fastest counts: other programs can only slow a message down; more if all were slow
_FAST_LINK = 100e6  # bytes per second
_QUESTIONS = 5  # the one with the quickest answer counts


class LinkServer:
    """Server of this host for the other hosts, which have to send its ``token`` first; port 0 takes a free one.

    OSError: the address is not this machine's, or the port is taken.
    """

    def __init__(self, address: str, port: int, clock: Callable[[], float]) -> None:
        self._listener = listen(address, port)
        self.port, self.token = int(self._listener.getsockname()[1]), secrets.token_hex(_TOKEN_LENGTH // 2)
        self._clock = clock
        threading.Thread(target=self._accept, name="link-server", daemon=True).start()

    def close(self) -> None:
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
            connection.settimeout(2 * _LINK_TIMEOUT)
            if not hmac.compare_digest(_receive(connection, _TOKEN_LENGTH), self.token.encode()):
                return
            connection.sendall(b"+")
            while order := connection.recv(1):
                if order == _SEND_DATA:
                    _receive(connection, _SENT_BYTES)
                    connection.sendall(b"+")
                else:
                    connection.sendall(struct.pack("!d", self._clock()))


def connect(peer: Peer) -> socket.socket:
    """Connect to another host's server, and prove that this one takes part; OSError after three seconds."""
    connection = socket.create_connection((peer.address, peer.port), timeout=_LINK_TIMEOUT)
    try:
        # a question of one byte must not wait for more
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
    """Seconds by which this clock is ahead of another host's, and the error's bound; OSError if it is silent."""
    best = (0.0, float("inf"))
    with connect(peer) as connection:
        for _ in range(_QUESTIONS):
            begin, asked_at = time.perf_counter(), clock()
            connection.sendall(_ASK_TIME)
            (there,) = struct.unpack("!d", _receive(connection, 8))
            elapsed = time.perf_counter() - begin
            # The answer took between nothing and all of the time: the quickest one bounds the error best.
            best = min(best, (asked_at + elapsed / 2 - there, elapsed / 2), key=lambda found: found[1])
    return best


def measure_rate(peer: Peer) -> float:
    """Return the bytes per second that the other host receives from this one; OSError without an answer."""
    content, best = bytes(_CHUNK), float("inf")
    with connect(peer) as connection:
        for attempt in range(_REPEATS[1]):
            if attempt >= _REPEATS[0] and _SENT_BYTES / best > _FAST_LINK:
                break
            begin = time.perf_counter()
            connection.sendall(_SEND_DATA)
            for _ in range(_SENT_BYTES // _CHUNK):
                connection.sendall(content)
            _receive(connection, 1)
            best = min(best, time.perf_counter() - begin)
    return _SENT_BYTES / max(best, 1e-9)


def _receive(connection: socket.socket, count: int) -> bytes:
    """Receive so many bytes; EOFError if the other end closed before, OSError if nothing came in time."""
    # Longer messages only measure the rate: each chunk replaces the one before.
    content = bytearray(min(count, _CHUNK))
    left = count
    while left:
        received = connection.recv_into(memoryview(content)[: min(left, len(content))])
        if not received:
            raise EOFError("the connection was closed")
        left -= received
    return bytes(content[:count])
