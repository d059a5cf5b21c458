"""Rendezvous of the processes of a run: a store over TCP, and proof that each process belongs to the run.

    rank 0 listens on MASTER_ADDR:MASTER_PORT, unless the launcher does      the others wait until it does
    under torchrun, whose store has keys of earlier attempts:
        rank r: "which round?" --> the store --> rank 0, while it waits for the others: the round that it has drawn
    each: "I am rank r" and a fresh nonce, signed --> the store --> rank 0: all nonces, signed
    the secret and the nonces --> a key of this rendezvous only
    gloo of torch --set, get: addresses of peers--> SignedStore --signature by that key, value--> TCPStore

TCPStore has no authentication: anybody who reaches the port can read and write the store. So values in it are trusted
only with a valid signature; a forged value can at worst end the rendezvous with an error.

torchrun keeps one store for all restarts, and the number of restarts that it tells each process cannot separate them:
it is counted per host, and differs if one host's processes failed and another's were only told to restart. So each
process asks, and only a rank 0 that is alive answers. Questions of processes that have ended are answered too, which
does no harm.
"""

import os
import re
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hlat.runtime.backend.table import interface_variables
from hlat.runtime.distributed.host_collectives import WAIT_SLICE, call_interruptibly, format_ranks
from hlat.runtime.distributed.network import (
    RUN_SECRET_ENV,
    Signer,
    interface_of,
    is_loopback,
    listen,
    run_signer,
    wait_until_reachable,
)
from hlat.runtime.errors import LaunchError, first_line
from hlat.runtime.process import LAUNCHER_ENV, RankInfo


def put_bytes(store: Store, key: str, value: bytes) -> None:
    """Set a value of bytes, which torch's stubs do not allow."""
    store.set(key, value)  # type: ignore[arg-type]  # torch takes both, and its stubs say str only


class SignedStore(Store):
    """A store whose values carry a signature; torch's gloo exchanges the addresses of peers through it."""

    def __init__(self, plain: Store, signer: Signer) -> None:
        super().__init__()
        # plain: the underlying store, without signatures
        self.plain, self._signer = plain, signer

    def set(self, key: str, value: bytes | str) -> None:
        content = value.encode() if isinstance(value, str) else value
        put_bytes(self.plain, key, self._signer.sign(key.encode(), content) + content)

    def get(self, key: str) -> bytes:
        """Return a value; LaunchError if its signature is not valid."""
        value = self.plain.get(key)
        signature, content = value[: Signer.SIZE], value[Signer.SIZE :]
        if not self._signer.is_valid(signature, key.encode(), content):
            raise LaunchError(f"the store of the run contains a value at {key} that no process of the run has written.")
        return content

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def has_extended_api(self) -> bool:
        return False  # torch must not use operations that bypass the signatures

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.plain.wait(keys, *([] if timeout is None else [timeout]))

    def check(self, keys: list[str]) -> bool:
        return self.plain.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self.plain.add(key, amount)  # unsigned, because the server adds counters up

    def delete_key(self, key: str) -> bool:
        return self.plain.delete_key(key)

    def num_keys(self) -> int:
        return self.plain.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self.plain.set_timeout(timeout)


_QUESTIONS, _ANSWERED = "questions", "answered"


class RoundAnswers:
    """Rank 0's answers to the others, which ask for the round of this attempt."""

    def __init__(self, server: Store) -> None:
        self._store = PrefixStore("hlat/rounds", server)
        self.round = secrets.token_hex(8)

    def answer(self) -> None:
        asked, done = self._store.add(_QUESTIONS, 0), self._store.add(_ANSWERED, 0)
        for number in range(done + 1, asked + 1):
            put_bytes(self._store, f"round/{number}", self.round.encode())
        if asked > done:
            self._store.add(_ANSWERED, asked - done)


def ask_for_round(server: Store, seconds: float) -> str | None:
    """Ask rank 0 for the round of this attempt; return None if it has not answered after so many seconds."""
    store = PrefixStore("hlat/rounds", server)
    key, deadline = f"round/{store.add(_QUESTIONS, 1)}", time.monotonic() + seconds
    while not store.check([key]):  # in short steps, so that signals are handled
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return store.get(key).decode("ascii", "replace")


ARRIVAL_TIMEOUT = timedelta(minutes=10)
"""Time to wait for the other processes: a scheduler may start them minutes apart."""

_HELPER_TIMEOUT = timedelta(seconds=60)
"""Time for a helper process to connect: its rank has just used the store, so a store that is silent has gone."""

_SILENCE = 15.0  # seconds of waiting before a message says so
_NONCE = 16  # bytes
_REFUSED = b"refused"
_ROUND = re.compile(r"[0-9a-f]{16}")
_ANSWERING = 0.05  # seconds between two looks at the questions of other processes

_joins: Counter[tuple[str, int]] = Counter()  # by store: a process that joins again needs new keys


@dataclass(frozen=True)
class Rendezvous:
    """Key prefix in the store and signing key of a group of processes. Helpers use a prefix below it."""

    name: str = ""
    seal: Signer = field(default_factory=lambda: Signer(b""))


def rendezvous_ranks(here: RankInfo, folder: Path | None) -> tuple[SignedStore, Rendezvous]:
    """Wait until every process has joined the store and proved that it knows the run's secret.

    The secret is the launcher's, else in a file of ``folder``, which all processes share.

    Raises:
        LaunchError: the processes do not find each other, or one does not know the secret.
        StorageError: the file of the secret cannot be created or read.
    """
    address, port = _address()
    server = _connect(address, port, here.rank)
    _joins[address, port] += 1
    answers, number = None, "0"
    if _store_outlives_attempts():
        answers = RoundAnswers(server) if here.rank == 0 else None
        number = _ask_for_round(server, here) if answers is None else answers.round
    file = None if folder is None else folder / f".secret-{port}-{number}"
    meeting = Rendezvous(f"hlat/{number}/{_joins[address, port]}", run_signer(file))
    store, key = _arrive(server, meeting, here, answers)
    if file is not None and here.rank == 0:
        with suppress(OSError):
            file.unlink(missing_ok=True)  # every process has read it
    return store, Rendezvous(meeting.name, key)


def rendezvous_helpers(name: str, meeting: Rendezvous, here: RankInfo) -> SignedStore:
    """Wait until the helper of every process has joined the store, and return it."""
    # A minute: a rank waits for its helper before it can end, and the launcher that serves the store may be dead.
    server = _client(*_address(), here.rank, _HELPER_TIMEOUT)
    return _arrive(server, Rendezvous(f"{meeting.name}/{name}", meeting.seal), here)[0]


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


# --- joining ----------------------------------------------------------------------------------------------------------


def _store_outlives_attempts() -> bool:
    # torchrun's store has keys of earlier attempts; hlat's launcher serves a new one for each.
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and LAUNCHER_ENV not in os.environ


def _ask_for_round(server: Store, here: RankInfo) -> str:
    found = ask_for_round(server, ARRIVAL_TIMEOUT.total_seconds())
    if found is None:
        minutes = f"{ARRIVAL_TIMEOUT / timedelta(minutes=1):g} minutes"
        raise LaunchError(f"rank 0 of {here.world} did not join within {minutes}. Check that it was started.")
    if not _ROUND.fullmatch(found):
        raise LaunchError("the store of the run holds values that no process of the run has written.")
    return found


def _arrive(
    server: Store, meeting: Rendezvous, here: RankInfo, answers: RoundAnswers | None = None
) -> tuple[SignedStore, Signer]:
    store = PrefixStore(meeting.name, server)
    # Errors are found here, before gloo: they say how many are missing, and which rank is there twice.
    if store.add(f"rank/{here.rank}", 1) > 1:
        message = f"two processes have rank {here.rank} of {here.world}."
        raise LaunchError(f"{message} Give each its own RANK, and each run its own MASTER_PORT.")
    nonce, name = secrets.token_bytes(_NONCE), meeting.name.encode()
    put_bytes(store, f"hello/{here.rank}", nonce + meeting.seal.sign(b"hello", name, _number(here.rank), nonce))
    if store.add("arrived", 1) == here.world:
        put_bytes(store, "complete", b"")
    nonces = _admit(store, meeting, here.world, answers) if here.rank == 0 else _admitted(store, meeting, here, nonce)
    # A process that replays old messages without the secret cannot compute this key.
    key = meeting.seal.derive(b"session", name, nonces)
    return SignedStore(store, key), key


def _admit(store: Store, meeting: Rendezvous, world: int, answers: RoundAnswers | None) -> bytes:
    # Under torchrun: the others ask until they know the round.
    if answers is not None:
        _answer_until_complete(store, answers)
    _wait(store, "complete", world)
    hellos = store.multi_get([f"hello/{rank}" for rank in range(world)])
    name, seal = meeting.name.encode(), meeting.seal
    nonces = [hello[:_NONCE] for hello in hellos]
    unknown = [
        rank
        for rank, (nonce, hello) in enumerate(zip(nonces, hellos, strict=True))
        if not seal.is_valid(hello[_NONCE:], b"hello", name, _number(rank), nonce)
    ]
    all_nonces = b"".join(nonces)
    put_bytes(store, "verdict", _REFUSED if unknown else seal.sign(b"verdict", name, all_nonces) + all_nonces)
    if unknown:
        raise _unauthenticated(format_ranks(unknown))
    return all_nonces


def _answer_until_complete(store: Store, answers: RoundAnswers) -> None:
    # Until all have joined, or could have.
    deadline = time.monotonic() + ARRIVAL_TIMEOUT.total_seconds()
    while not store.check(["complete"]) and time.monotonic() < deadline:
        answers.answer()
        time.sleep(_ANSWERING)


def _admitted(store: Store, meeting: Rendezvous, here: RankInfo, nonce: bytes) -> bytes:
    _wait(store, "verdict", here.world)
    verdict = store.get("verdict")
    signature, nonces = verdict[: Signer.SIZE], verdict[Signer.SIZE :]
    if verdict == _REFUSED:
        raise LaunchError("rank 0 aborted the start: a process that does not know the secret of the run tried to join.")
    # Rank 0 must have received this nonce: an old verdict is no proof.
    own = nonces[here.rank * _NONCE : (here.rank + 1) * _NONCE]
    if own != nonce or not meeting.seal.is_valid(signature, b"verdict", meeting.name.encode(), nonces):
        raise _unauthenticated("rank 0")
    return nonces


def _number(rank: int) -> bytes:
    return str(rank).encode()


def _unauthenticated(who: str) -> LaunchError:
    message = f"the secret of this run is unknown to {who}: another run or program uses the same MASTER_PORT."
    remedy = (
        f"Set the same {RUN_SECRET_ENV} in all processes of a run, or leave it unset and use a run.dir on a file "
        "system that all machines share. Give each run its own MASTER_PORT."
    )
    return LaunchError(f"{message} {remedy}")


def _wait(store: Store, key: str, world: int) -> None:
    minutes = f"{ARRIVAL_TIMEOUT / timedelta(minutes=1):g} minutes"
    reminder = threading.Timer(_SILENCE, _print, [f"waiting up to {minutes} for all {world} processes to join"])
    reminder.daemon = True
    reminder.start()
    try:
        # On a thread, not in slices: torch's store prints a warning for each slice that times out.
        call_interruptibly(lambda: store.wait([key], ARRIVAL_TIMEOUT))
    except dist.DistNetworkError as error:
        raise LaunchError("the store of the run, served by rank 0 or the launcher, closed its connection.") from error
    except RuntimeError as error:
        arrived = store.add("arrived", 0)
        remedy = "Check that all were started, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        message = f"only {arrived} of {world} processes joined within {minutes}."
        raise LaunchError(f"{message} {remedy}") from error
    finally:
        reminder.cancel()


def _print(text: str) -> None:
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201  (on other ranks than 0 this goes to their logs)


# --- the store --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)  # kept after the groups are destroyed: a slower peer may still need it
def _connect(address: str, port: int, rank: int) -> Store:
    return _serve(address, port) if _hosts(rank) else _client(address, port, rank)


def _hosts(rank: int) -> bool:
    # else the launcher does (torchrun, --nproc)
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _serve(address: str, port: int) -> Store:
    try:
        listener = listen(address, port)
        own = str(listener.getsockname()[0])
        store = _open_store(own, port, listener.detach())
    except (RuntimeError, ValueError, OSError) as error:
        message = f"rank 0 cannot open the store of the run at MASTER_ADDR={address} MASTER_PORT={port}"
        remedy = (
            "Check that the address belongs to this machine (if the others reach it by another address, as through "
            "a service or NAT, set that one for them and this machine's own for rank 0), and that the port is free."
        )
        raise LaunchError(f"{message} ({first_line(error)}). {remedy}") from error
    _use_network_of(own)
    return store


def _client(address: str, port: int, rank: int, timeout: timedelta | None = None) -> Store:
    begin, timeout = time.monotonic(), timeout or ARRIVAL_TIMEOUT
    try:
        answering, own = wait_until_reachable(address, port, timeout.total_seconds())
        left = max(WAIT_SLICE, timeout - timedelta(seconds=time.monotonic() - begin))
        # Torch's own timeout does not end while a server that was stopped accepts the connection and never answers.
        store = call_interruptibly(lambda: _open_store(answering, port, None, left), left + 2 * WAIT_SLICE)
    except (RuntimeError, ValueError, OSError) as error:
        message = f"rank {rank} cannot reach rank 0 at MASTER_ADDR={address} MASTER_PORT={port} ({first_line(error)})."
        remedy = (
            "Check that the address is that of rank 0's machine, on which alone its store listens (write "
            "it as a number if a name has several), and that the port is free and not behind a firewall."
        )
        raise LaunchError(f"{message} {remedy}") from error
    _use_network_of(own)
    return store


def _open_store(address: str, port: int, listener: int | None, timeout: timedelta = ARRIVAL_TIMEOUT) -> Store:
    serves = listener is not None
    store = TCPStore(
        address, port, is_master=serves, timeout=timeout, wait_for_workers=False, master_listen_fd=listener
    )
    store.set_timeout(ARRIVAL_TIMEOUT)
    return store


def _use_network_of(own: str) -> None:
    interface = interface_of(own)
    # By default gloo resolves this machine's name, which may lead to another network.
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface is not None and is_loopback(own):
        for variable in interface_variables():  # on other networks the libraries choose the fastest themselves
            os.environ.setdefault(variable, interface)
