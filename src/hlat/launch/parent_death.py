"""Stop a process when its launcher has died.

A launcher that is killed (SIGKILL, out of memory) cannot forward signals, so its processes check their parent:
the launcher is gone --> SIGTERM to oneself, once --> save and stop.
"""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

from hlat.resilience import HEARTBEAT_FOLDER
from hlat.runtime.process.process_status import LAUNCHER_ENV

_INTERVAL = 1.0  # seconds


def stop_with_launcher() -> None:
    """Stop this process when its launcher dies; no effect if no launcher of hlat started it."""
    launcher = os.environ.get(LAUNCHER_ENV)
    if launcher is not None:
        # Linux could send the signal itself (PR_SET_PDEATHSIG), but does so once per thread of the launcher, and a
        # second one would end the run without saving.
        threading.Thread(target=_follow, args=(int(launcher),), name="follow-launcher", daemon=True).start()


def _follow(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_INTERVAL)
    if HEARTBEAT_FOLDER in os.environ:  # the launcher's folder, perhaps in memory, which it can no longer remove
        shutil.rmtree(Path(os.environ[HEARTBEAT_FOLDER]).parent, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
