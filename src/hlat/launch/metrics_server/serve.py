"""Main program of the server process: serve until the process that started it has ended."""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from hlat.launch.metrics_server.http_server import StatusServer
from hlat.launch.metrics_server.run_observer import ObservedRun
from hlat.runtime.process.exit_codes import STOP_SIGNALS

_EVERY = 1.0  # seconds between two observations, from which it learns how long phases take


def main(settings: dict[str, Any]) -> None:
    """Serve a run.

    Args:
        settings: fields of ``ObservedRun``, and ``listener``, the descriptor of a listening socket.
    """
    for number in STOP_SIGNALS:  # a scheduler may signal every process of a job; the run takes its time to save
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(fileno=settings.pop("listener"))
    run_dir, beats = (Path(settings.pop(name)) for name in ("run_dir", "beats"))
    run = ObservedRun(run_dir=run_dir, beats=beats, **settings)
    server = StatusServer(listener, run)
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    while os.getppid() == run.parent:
        server.status()
        time.sleep(_EVERY)
