"""Ctrl-C is neither lost in a callback nor raised within an import, and waits for no import for ever."""

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


IMPORT = """
from importlib.util import spec_from_loader
class Loader:
    create_module = staticmethod(lambda spec: None)
    def exec_module(self, module):
        try:
            for _ in range(2):  # the second is the same request
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(WITHIN)
        except KeyboardInterrupt:  # C code of torch drops it like this
            print(INTERRUPTED)
class Finder:
    find_spec = staticmethod(lambda name, *_: spec_from_loader(name, Loader()) if name == "slow" else None)
sys.meta_path.insert(0, Finder())
def import_it():
    import slow
    return interrupted()
"""
IMPORTED = (
    f"WITHIN, INTERRUPTED = 0.05, 'too early'\n{IMPORT}"
    + """
try:
    print(import_it())
except KeyboardInterrupt:
    print(True)
assert not interrupted(0.05)
"""
)
ENDLESS = (
    f"WITHIN, INTERRUPTED = 600, True\n{IMPORT}"
    + """
import hlat.runtime.process
hlat.runtime.process._LONGEST_IMPORT = 0.05
interrupted = lambda: None
import_it()
"""
)


CASES = {"dropped": DROPPED, "locked": LOCKED, "plain": PLAIN, "imported": IMPORTED, "endless import": ENDLESS}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_interrupt_arrives_once_it_is_safe(case: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + case], capture_output=True, text=True, timeout=1200, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)
