"""Ctrl-C during the imports of a command: one line and exit code 130, whichever module is being imported."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from hlat.command import main
number, wanted = 0, sys.argv.pop(1)
def interrupt(event, arguments):
    global number
    if event == "import":
        number += 1
        if wanted in (str(number), "inside") and (wanted != "inside" or MODULE in sys.modules):
            os.kill(os.getpid(), signal.SIGINT)
MODULE = "hlat.runtime.bottom_line"
sys.addaudithook(interrupt)
main()
"""


def test_nothing_of_hlat_is_loaded_before_the_handler_but_the_entry_point() -> None:
    """Pip's script imports re and sys; what Ctrl-C interrupts until ``main`` is Python's start or that script."""
    program = (
        "import os, re, signal, sys; before = set(sys.modules); from hlat.command import main\n"
        "signal.signal = lambda number, handler: sys.exit(' '.join(sorted(set(sys.modules) - before)))\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.split() == ["hlat", "hlat.command"]


@pytest.mark.parametrize("number", ["inside", "3", "6", "12", "25", "50", "100"])
def test_an_interrupt_at_an_import_is_one_line(number: str) -> None:
    """``inside`` is at the first import of the module that the handler asks; the others are numbers of imports."""
    command = [sys.executable, "-c", PROGRAM, number, "check", "quickstart"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    assert done.stderr.splitlines() == ["interrupted: nothing had been started"]
