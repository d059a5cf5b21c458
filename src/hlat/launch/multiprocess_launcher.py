"""``hlat train --nproc N``: launch N processes of one command on this machine, and serve the store that they meet in.

    command, N --> a store on loopback --> N processes, each in its own session

This process serves the store, on a free port that stays bound from the start: the store outlives the processes, and two
launches cannot get the same port. On one machine everything uses loopback: nothing listens on the network, and no host
name is resolved.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hlat.launch.local_processes import RankPlaces, SpawnedRanks, launch_ranks
from hlat.runtime.distributed.addresses import listen
from hlat.runtime.distributed.run_secret import RUN_SECRET_ENV

_LOOPBACK = "127.0.0.1"


@contextmanager
def launch_multiprocess(
    command: Sequence[str],
    nproc: int,
    environment: Mapping[str, str],
    folder: Path,
    show: Callable[[str], None] | None = None,
) -> Iterator[SpawnedRanks]:
    """Launch ``nproc`` processes of a command as one run, as ``launch_ranks`` does."""
    with open_store() as port:
        shared = {RUN_SECRET_ENV: secrets.token_hex(32), **environment}
        places = RankPlaces(0, nproc, nproc, 0, _LOOPBACK, port)
        with launch_ranks(command, places, shared, folder, show) as workers:
            yield workers


@contextmanager
def open_store(address: str = _LOOPBACK) -> Iterator[int]:
    """Serve the rendezvous store on this address only, and yield its port; OSError if it is not this machine's."""
    listener = listen(address, 0)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=True,
        wait_for_workers=False,  # they are started afterwards
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),  # the default listens on every interface
    )
    yield port
    del store
