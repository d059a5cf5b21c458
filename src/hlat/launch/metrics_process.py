"""The process of the metrics server, started by the process that it reports on.

    recipe --bind, before anything starts--> listening socket --to a new process, once there are heartbeats--> server

The server itself is ``metrics_server``, which is imported in its own process only.
"""

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from hlat.config import Recipe
from hlat.runtime.errors import LaunchError

Observe = Callable[[Path], AbstractContextManager[None]]
"""Serves a run inside a block, from the folder of its heartbeats and of its account of goodput."""


def unobserved(beats: Path) -> AbstractContextManager[None]:
    """Serve nothing: the recipe does not ask for it."""
    return nullcontext()


_SERVER = "hlat.launch.metrics_server"  # imported by its own process only
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
        "listener": listener.fileno(),
        "name": recipe.run.name,
        "run_dir": str(recipe.run_dir),
        "beats": str(beats),
        "total_steps": recipe.total_steps,
        "hang_seconds": recipe.recovery.hang_seconds,
        "parent": os.getpid(),
        "started": time.monotonic(),
    }
    path = f"import sys; sys.path[:] = {sys.path!r}"  # before any other import: -c looks into the current folder first
    program = f"{path}; import json; from {_SERVER} import main; main(json.loads(sys.argv[1]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(settings)],
        pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C does not reach it: the run still has to save
    )
    listener.close()  # the ranks would inherit it, and connections would wait for a server that is gone
    try:
        yield
    finally:
        if process.poll() is not None:
            say(f"the server of /metrics ended before the run, with exit code {process.returncode}")
        process.kill()  # it only reads: there is nothing that it could lose
        process.wait()
