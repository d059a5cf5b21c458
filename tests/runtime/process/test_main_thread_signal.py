"""A process that was stopped shows where, however many threads it has."""

import ctypes
import signal
import sys
from subprocess import Popen

import pytest

from hlat.resilience import STACKS_SIGNAL
from hlat.runtime.process import is_stopped, signal_main_thread
from tests.support.launch.launching import wait_until

PROGRAM = """
import faulthandler, os, signal, sys, threading, time

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def sleep_often():
    while True:
        time.sleep(0.002)

with open(sys.argv[1], "w") as file:
    faulthandler.register(int(sys.argv[2]), file=file, all_threads=True)
    for _ in range(8):
        threading.Thread(target=sleep_often, daemon=True).start()
    while True:
        stop()
        time.sleep(0.05)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "tgkill"), reason="this C library cannot signal one thread of another process"
)
def test_a_stopped_process_shows_where_it_was_stopped(tmp_path):
    """30 stops: with a signal to the process, which any thread may handle, four of four series had a miss."""
    path = tmp_path / "stacks"
    with Popen([sys.executable, "-c", PROGRAM, str(path), str(int(STACKS_SIGNAL))]) as process:
        try:
            for count in range(1, 31):
                wait_until(lambda: is_stopped(process.pid))
                signal_main_thread(process.pid, STACKS_SIGNAL)
                process.send_signal(signal.SIGCONT)
                wait_until(lambda count=count: path.read_text().count("in <module>\n") == count)
                assert path.read_text().count("in stop\n") == count
        finally:
            process.kill()


def test_a_process_that_has_ended_is_told():
    with Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError):
        signal_main_thread(process.pid, STACKS_SIGNAL)
