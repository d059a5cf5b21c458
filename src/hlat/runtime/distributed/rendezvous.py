"""Where the processes of a run meet: a store over TCP, on the address asked for, and proof that each is of the run.

    rank 0 listens on MASTER_ADDR:MASTER_PORT, unless the launcher does      the others wait until it does
    each: "I am rank r" and a number drawn now, signed --> the store --> rank 0: all of these numbers, signed
    the secret and these numbers --> a key of this meeting only: addresses that gloo puts into the store carry it

Whoever reaches the port can read and write the store: TCPStore asks for nothing. So what is read there is believed only
with a signature, and what a stranger writes ends the meeting with an error at worst.
"""

import os
import secrets
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hlat.runtime.distributed.addresses import interface_of, is_loopback, listen, wait_until_reachable
from hlat.runtime.distributed.host_collectives import format_ranks
from hlat.runtime.distributed.run_secret import RUN_SECRET_ENV, Signer, run_signer
from hlat.runtime.distributed.signed_store import SignedStore, put_bytes
from hlat.runtime.distributed.waiting import WAIT_SLICE, call_interruptibly
from hlat.runtime.errors import LaunchError
from hlat.runtime.rank_env import RankInfo

ARRIVAL_TIMEOUT = timedelta(minutes=10)
"""How long a process waits for the others to arrive: a scheduler may start them minutes apart."""

_SILENCE = 15.0  # seconds of waiting after which it is said what is waited for
_NONCE = 16  # bytes
_REFUSED = b"refused"

_joins: Counter[tuple[str, int]] = Counter()  # by store: a process that joins again must not meet its old names there


@dataclass(frozen=True)
class Rendezvous:
    """A place in the store, by name, and the key of those who meet there; processes beside them meet below it."""

    name: str = ""
    seal: Signer = field(default_factory=lambda: Signer(b""))


def rendezvous_ranks(here: RankInfo, folder: Path | None) -> tuple[SignedStore, Rendezvous]:
    """The store, once every process has arrived and has shown that it is of this run.

    Args:
        here: this process.
        folder: shared by all of them, for the secret where the launcher gave none; None if there is no such folder.

    Raises:
        LaunchError: they do not find each other, or one does not know the run's secret.
        StorageError: the secret cannot be kept in the folder.
    """
    address, port = _address()
    server = _connect(address, port, here.rank)
    _joins[address, port] += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    file = None if folder is None else folder / f".secret-{port}-{attempt}"
    meeting = Rendezvous(f"hlat/{attempt}/{_joins[address, port]}", run_signer(file))
    store, key = _arrive(server, meeting, here)
    if file is not None and here.rank == 0:
        with suppress(OSError):
            file.unlink(missing_ok=True)  # all have read it
    return store, Rendezvous(meeting.name, key)


def rendezvous_helpers(name: str, meeting: Rendezvous, here: RankInfo) -> SignedStore:
    """The store, once a process beside every process of a meeting has arrived; see ``rendezvous_ranks``."""
    server = _client(*_address(), here.rank)
    return _arrive(server, Rendezvous(f"{meeting.name}/{name}", meeting.seal), here)[0]


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


# --- arriving ---------------------------------------------------------------------------------------------------------


def _arrive(server: Store, meeting: Rendezvous, here: RankInfo) -> tuple[SignedStore, Signer]:
    """Wait for every process, and know that it is one of the run. Waiting here says who is missing; gloo could not."""
    store = PrefixStore(meeting.name, server)
    if store.add(f"rank/{here.rank}", 1) > 1:
        message = f"two processes say that they are rank {here.rank} of {here.world}."
        raise LaunchError(f"{message} Give each its own RANK, and each run its own MASTER_PORT.")
    nonce, name = secrets.token_bytes(_NONCE), meeting.name.encode()
    put_bytes(store, f"hello/{here.rank}", nonce + meeting.seal.sign(b"hello", name, _number(here.rank), nonce))
    if store.add("arrived", 1) == here.world:
        put_bytes(store, "complete", b"")
    nonces = _admit(store, meeting, here.world) if here.rank == 0 else _admitted(store, meeting, here, nonce)
    # Who repeats what was once said by a process of the run, and does not know the secret, does not know this either.
    key = meeting.seal.derive(b"session", name, nonces)
    return SignedStore(store, key), key


def _admit(store: Store, meeting: Rendezvous, world: int) -> bytes:
    """Rank 0: see that all know the secret, and say so; gives what they have drawn."""
    _wait(store, "complete", world)
    said = store.multi_get([f"hello/{rank}" for rank in range(world)])
    name, seal = meeting.name.encode(), meeting.seal
    nonces = [hello[:_NONCE] for hello in said]
    strangers = [
        rank
        for rank, (nonce, hello) in enumerate(zip(nonces, said, strict=True))
        if not seal.is_valid(hello[_NONCE:], b"hello", name, _number(rank), nonce)
    ]
    together = b"".join(nonces)
    put_bytes(store, "verdict", _REFUSED if strangers else seal.sign(b"verdict", name, together) + together)
    if strangers:
        raise _stranger(format_ranks(strangers))
    return together


def _admitted(store: Store, meeting: Rendezvous, here: RankInfo, nonce: bytes) -> bytes:
    """Another rank: see that rank 0 knows the secret and has heard this process; gives what all have drawn."""
    _wait(store, "verdict", here.world)
    verdict = store.get("verdict")
    signature, nonces = verdict[: Signer.SIZE], verdict[Signer.SIZE :]
    if verdict == _REFUSED:
        raise LaunchError("rank 0 does not go on: it met a process that does not know the secret of the run.")
    own = nonces[here.rank * _NONCE : (here.rank + 1) * _NONCE]
    if own != nonce or not meeting.seal.is_valid(signature, b"verdict", meeting.name.encode(), nonces):
        raise _stranger("rank 0")
    return nonces


def _number(rank: int) -> bytes:
    return str(rank).encode()


def _stranger(who: str) -> LaunchError:
    message = (
        f"the secret of this run is not known to {who}: another run uses the same MASTER_PORT, or a stranger does."
    )
    remedy = (
        f"Set the same {RUN_SECRET_ENV} in all processes of a run, or leave it unset and use a run.dir on a file system "
        "that all machines share. Give each run its own MASTER_PORT."
    )
    return LaunchError(f"{message} {remedy}")


def _wait(store: Store, key: str, world: int) -> None:
    """Wait for a key of the store, and hear signals meanwhile.

    Raises:
        LaunchError: it did not come.
    """
    minutes = f"{ARRIVAL_TIMEOUT / timedelta(minutes=1):g} minutes"
    saying = threading.Timer(_SILENCE, _say, [f"waiting for all of {world} processes to arrive, for up to {minutes}"])
    saying.daemon = True
    saying.start()
    try:
        # On a thread, not in slices: of each that passes torch's store prints a warning.
        call_interruptibly(lambda: store.wait([key], ARRIVAL_TIMEOUT))
    except dist.DistNetworkError as error:
        raise LaunchError("the store of the run, which rank 0 or the launcher serves, has gone.") from error
    except RuntimeError as error:
        arrived = store.add("arrived", 0)
        remedy = "Check that all were started, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        message = f"only {arrived} of {world} processes arrived within {minutes}."
        raise LaunchError(f"{message} {remedy}") from error
    finally:
        saying.cancel()


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201  (of the others this goes into their logs)


# --- the store --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)  # kept when the groups are left: a slower peer would lose what it still needs
def _connect(address: str, port: int, rank: int) -> Store:
    return _served(address, port) if _hosts(rank) else _client(address, port, rank)


def _hosts(rank: int) -> bool:
    """Whether this process opens the store: rank 0, unless the launcher has done so (torchrun, ``--nproc``)."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _served(address: str, port: int) -> Store:
    """The store, served here: on the address asked for and no other one."""
    try:
        listener = listen(address, port)
        own = str(listener.getsockname()[0])
        store = _opened(own, port, listener.detach())
    except (RuntimeError, ValueError, OSError) as error:
        message = f"rank 0 cannot open the store of the run at MASTER_ADDR={address} MASTER_PORT={port}"
        remedy = (
            "Check that the address is one of this machine's own (where the others reach it by another one, as through "
            "a service or NAT, give rank 0 its own and the others that), and that the port is free."
        )
        raise LaunchError(f"{message} ({_line(error)}). {remedy}") from error
    _talk_over(own)
    return store


def _client(address: str, port: int, rank: int) -> Store:
    """The store, served by somebody else."""
    begin = time.monotonic()
    try:
        answering, own = wait_until_reachable(address, port, ARRIVAL_TIMEOUT.total_seconds())
        left = max(WAIT_SLICE, ARRIVAL_TIMEOUT - timedelta(seconds=time.monotonic() - begin))
        store = call_interruptibly(lambda: _opened(answering, port, None, left))
    except (RuntimeError, ValueError, OSError) as error:
        message = f"rank {rank} cannot reach rank 0 at MASTER_ADDR={address} MASTER_PORT={port} ({_line(error)})."
        remedy = (
            "Check that the address is that of rank 0's machine, the only one on which its store listens (write "
            "it as a number where a name means several), and that the port is free and not behind a firewall."
        )
        raise LaunchError(f"{message} {remedy}") from error
    _talk_over(own)
    return store


def _opened(address: str, port: int, listener: int | None, timeout: timedelta = ARRIVAL_TIMEOUT) -> Store:
    """Join the store, or serve it on a socket that listens."""
    serves = listener is not None
    store = TCPStore(
        address, port, is_master=serves, timeout=timeout, wait_for_workers=False, master_listen_fd=listener
    )
    store.set_timeout(ARRIVAL_TIMEOUT)
    return store


def _talk_over(own: str) -> None:
    """Have gloo talk over the network on which rank 0 is reached; left to itself it looks up this machine's name.

    Args:
        own: this machine's address there.
    """
    interface = interface_of(own)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface is not None and is_loopback(own):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)  # elsewhere it knows best which networks are fast


def _line(error: Exception) -> str:
    """The first line of a message: torch's C++ errors carry a stack after it."""
    return str(error).strip().partition("\n")[0]
