"""The process of the metrics server, started by the process that it reports on.

    recipe --bind, before anything starts--> listening socket --to a new process, once there are heartbeats--> server

The server itself is ``metrics_server``, which is imported in its own process only.
"""

import errno
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from hlat.config import Recipe
from hlat.runtime.errors import LaunchError
from hlat.runtime.helper_process import start_program

Observe = Callable[[Path], AbstractContextManager[None]]
"""Serves a run inside a block, from the folder of its heartbeats and of its account of goodput."""


def unobserved(beats: Path) -> AbstractContextManager[None]:
    """Serve nothing: the recipe does not ask for it."""
    return nullcontext()


_SERVER = "hlat.launch.metrics_server:serve"  # imported by its own process only
_LISTEN_REASONS = {
    errno.EADDRINUSE: "another program listens there, perhaps another run on this machine. "
    "Give this one another tracking.prometheus.port, or 0 for any free one.",
    errno.EADDRNOTAVAIL: "this machine has no such address. Give tracking.prometheus.address one of its own, "
    "127.0.0.1 for this machine only, or 0.0.0.0 for all.",
    errno.EACCES: "this user must not listen there; ports from 1024 on need no permission.",
}


@contextmanager
def metrics_server(recipe: Recipe, say: Callable[[str], None]) -> Iterator[Observe]:
    """Listen as ``tracking.prometheus`` asks, LaunchError if that fails; yield a function that serves the run."""
    settings = recipe.tracking.prometheus
    if settings is None:
        yield unobserved
        return
    with listen(settings.address, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        say(f"metrics: http://{f'[{host}]' if ':' in host else host}:{port}/metrics, health: /healthz, /readyz")
        yield partial(_serving, recipe, listener, say)


def listen(address: IPv4Address | IPv6Address, port: int) -> socket.socket:
    """Return a listening socket; LaunchError says why nothing can listen there, and what would work."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        return socket.create_server((str(address), port), family=family)
    except OSError as error:
        reason = _LISTEN_REASONS.get(error.errno or 0, f"{error.strerror or error}.")
        raise LaunchError(f"tracking.prometheus: cannot listen on {address}, port {port}: {reason}") from error


@contextmanager
def _serving(recipe: Recipe, listener: socket.socket, say: Callable[[str], None], beats: Path) -> Iterator[None]:
    settings = {
        "name": recipe.run.name,
        "run_dir": recipe.run_dir,
        "beats": beats,
        "total_steps": recipe.total_steps,
        "hang_seconds": recipe.recovery.hang_seconds,
        "parent": os.getpid(),
        "started": time.monotonic(),
    }
    process = start_program(_SERVER, settings, output=subprocess.DEVNULL)
    process.send("the listening socket", [listener.fileno()])
    listener.close()  # the ranks would inherit it, and connections would wait for a server that is gone
    try:
        yield
    finally:
        if process.has_ended():
            say(f"the server of /metrics ended before the run, with exit code {process.wait()}")
        process.kill()  # it only reads: there is nothing that it could lose
