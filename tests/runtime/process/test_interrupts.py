"""Ctrl-C is neither lost in a callback nor raised where importlib holds its locks."""

import subprocess
import sys

import pytest

START = """
import os, signal, sys, time, weakref
from hlat.runtime.process import raise_interrupts
raise_interrupts()
def interrupted(seconds=600):
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        return True
    return False
"""
DROPPED = """
class Thing: pass
thing = Thing()
watcher = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
del thing  # Python drops what the callback raises
print(interrupted())
"""
LOCKED = """
def remember(frame, event, argument):
    if frame.f_code.co_name == "_get_module_lock":
        frames.append(frame)
frames = []
sys.setprofile(remember)
import colorsys
sys.setprofile(None)
signal.getsignal(signal.SIGINT)(signal.SIGINT, frames[0])  # raises nothing here
print(interrupted())
"""
PLAIN = """
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
except KeyboardInterrupt:
    print(True)
"""


@pytest.mark.parametrize("case", [DROPPED, LOCKED, PLAIN], ids=["dropped", "locked", "plain"])
def test_an_interrupt_arrives_once_it_is_safe(case: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + case], capture_output=True, text=True, timeout=1200, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)
