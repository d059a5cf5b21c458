"""Ports for processes that a test starts."""

import random
import socket
from collections import deque
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL = 32768  # Linux's first port for outgoing connections
_LOWEST = 10_000

# Names that tell other test processes which ports this one has chosen last; each takes a file descriptor.
_chosen: deque[socket.socket] = deque(maxlen=64)


def free_port() -> int:
    """Return a port of this machine that nobody has, below those that the system gives to outgoing connections.

    Between the moment at which a port is found free and the one at which a process listens on it, tests beside this one
    open hundreds of connections, and one of them would take a port of the system's choice now and then. Other test
    processes choose ports of this range too, but never one that was just chosen: each holds names for its ports.
    """
    highest = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _USUAL
    while True:
        # Not Python's own numbers: tests that set their seed would draw the same ports.
        port = random.SystemRandom().randrange(_LOWEST, highest) if highest > _LOWEST + 1000 else 0
        try:
            with socket.create_server(("", port)) as listener:
                port = int(listener.getsockname()[1])
                _choose(port)
                return port
        except OSError:
            continue  # somebody has it


def _choose(port: int) -> None:
    # An abstract name, which Linux alone has, is no file, and is free again when the process has ended.
    name = socket.socket(socket.AF_UNIX)
    if _RANGE.exists():
        name.bind(f"\0hlat-tests-{port}")
    _chosen.append(name)
