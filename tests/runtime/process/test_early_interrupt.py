"""Ctrl-C or SIGTERM before a command has started anything: one line, exit code 130 or 143, and nothing is written."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hlat import command
from hlat.runtime.process import LAUNCHER_ENV

PROGRAM = """
import os, signal, sys
from hlat.command import main
number, wanted, sent = 0, sys.argv.pop(1), int(sys.argv.pop(1))
def interrupt(event, arguments):
    global number
    if event == "import":
        number += 1
        if wanted in (str(number), "inside") and (wanted != "inside" or MODULE in sys.modules):
            os.kill(os.getpid(), sent)
MODULE = "hlat.runtime.terminal"
sys.addaudithook(interrupt)
main()
"""


def test_nothing_of_hlat_is_loaded_before_the_handler_but_the_entry_point() -> None:
    """Pip's script imports re and sys; what Ctrl-C interrupts until ``main`` is Python's start or that script."""
    program = (
        "import os, re, signal, sys; before = set(sys.modules); from hlat.command import main\n"
        "signal.signal = lambda number, handler: sys.exit(' '.join(sorted(set(sys.modules) - before)))\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=1200, check=False)
    assert done.stderr.split() == ["hlat", "hlat.command"]


@pytest.mark.parametrize(
    ("sent", "number"),
    [
        *((signal.SIGINT, number) for number in ("inside", "3", "6", "12", "25", "50", "100")),
        *((signal.SIGTERM, number) for number in ("inside", "25")),
    ],
)
def test_a_signal_at_an_import_is_one_line(sent: signal.Signals, number: str) -> None:
    """``inside`` is at the first import of the module that the handler asks; the others are numbers of imports."""
    words = [sys.executable, "-c", PROGRAM, number, str(int(sent)), "check", "quickstart"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, check=False)
    assert (done.returncode, done.stdout) == (128 + sent, ""), done.stderr
    what = "interrupted" if sent == signal.SIGINT else "SIGTERM"
    assert done.stderr.splitlines() == [f"{what}: nothing had been started"]


def test_a_process_of_a_run_leaves_sigterm_to_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher tells a rank that it has ended from one that has failed by the signal that ended it."""
    assert LAUNCHER_ENV in command._LAUNCHERS
    monkeypatch.setenv(LAUNCHER_ENV, "1")
    words = [sys.executable, "-c", PROGRAM, "12", str(int(signal.SIGTERM)), "check", "quickstart"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")


GAP = """
import os, signal, sys
from hlat.command import main
from hlat.launch import training_job
training_job.check_extensions = lambda recipe, world: os.kill(os.getpid(), signal.SIGTERM)
main()
"""


def test_sigterm_after_the_checks_of_a_run_and_before_its_supervisor(
    recipe_file: Path, tiny: list[str], tmp_path: Path
) -> None:
    words = [sys.executable, "-c", GAP, "train", str(recipe_file), *tiny]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, check=False)
    assert (done.returncode, done.stderr) == (143, "SIGTERM: nothing had been started\n"), done.stdout
    assert not (tmp_path / "run").exists()


AFTER = """
import os, signal, sys
from hlat.command import main
from hlat.launch.supervision.running_ranks import SignalForwarder
from hlat.launch.supervision.supervisor import Supervisor
Supervisor.run = lambda supervisor: 0
forwards_no_more = SignalForwarder.__exit__
def exit_and_end(*given):
    forwards_no_more(*given)
    os.kill(os.getpid(), signal.SIGTERM)
SignalForwarder.__exit__ = exit_and_end
main()
"""


def test_sigterm_after_the_supervisor_of_a_run_says_nothing_of_nothing_being_started(
    recipe_file: Path, tiny: list[str]
) -> None:
    words = [sys.executable, "-c", AFTER, "train", str(recipe_file), *tiny]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, ""), done.stdout


READY = """
import signal
from hlat.cli.terminal import ready
signal.signal(signal.SIGTERM, print)
ready(hears_sigterm=True)
assert signal.getsignal(signal.SIGTERM) is print
ready()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
"""


def test_a_verb_that_has_begun_says_nothing_of_nothing_being_started() -> None:
    done = subprocess.run([sys.executable, "-c", READY], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr


IN_A_WORKER = """
import os, signal, sys
from hlat.command import main
from hlat.launch import CompileJob
from hlat.launch.evaluation_job import EvaluationJob
def end(*_):
    os.kill(os.getpid(), signal.SIGTERM)
EvaluationJob.load_suite = lambda job: None
EvaluationJob.evaluate_here = CompileJob.compile_here = end
main()
"""


@pytest.mark.parametrize("words", ["evaluate nowhere --tasks arc_easy", "compile quickstart"])
def test_sigterm_in_a_process_that_works_says_to_run_the_command_again(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    program = [sys.executable, "-c", IN_A_WORKER, *words.split()]
    done = subprocess.run(program, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 75, (done.stdout, done.stderr)
    assert done.stderr == "SIGTERM: ended before the first step; run the same command again\n"
