"""A process that the launcher started does not outlive it.

A launcher that is killed outright (SIGKILL, out of memory) cannot pass anything on, so its processes look themselves:
the launcher is gone --> SIGTERM to oneself, once --> save and stop.
"""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

from hlat.resilience import BEATS
from hlat.runtime.process import LAUNCHER_ENV

_LOOK_EVERY = 1.0  # seconds


def stop_with_launcher() -> None:
    """Have this process stopped when its launcher is gone; nothing where no launcher of ours started it."""
    launcher = os.environ.get(LAUNCHER_ENV)
    if launcher is not None:
        # Linux could send the signal itself (PR_SET_PDEATHSIG), but does so once per thread of the launcher, and a
        # second one would end the run without saving.
        threading.Thread(target=_follow, args=(int(launcher),), name="follow-launcher", daemon=True).start()


def _follow(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LOOK_EVERY)
    if BEATS in os.environ:  # the launcher's folder, in memory perhaps: nobody reads it any more
        shutil.rmtree(Path(os.environ[BEATS]).parent, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
