"""The display of a run at a terminal: something at once, every step, and nothing left behind."""

import os
import pty
import random
import re
import threading
from typing import TextIO

import psutil
import pytest

from hlat.runtime.terminal import BottomLine
from tests.support.commands import hlat
from tests.support.held import hold_imports
from tests.support.terminal import Screen, TerminalCommand, set_columns

SPINNER = set("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
_END = "(all)"  # marks the end of what a test has written to a terminal


def drawn(text: str):
    return lambda screen: any(text in line for line in [*screen.drawn, *screen.lines])


def test_a_run_says_what_it_does_and_leaves_lines_of_text(recipe_file, tiny, tmp_path):
    with TerminalCommand("train", recipe_file, *tiny, "tracking.console=auto", columns=80, folder=tmp_path) as command:
        assert command.wait() == 0
        screen = command.screen
    assert drawn("reading")(screen) and drawn("importing PyTorch")(screen)
    assert screen.widest < 80, [line for line in screen.drawn if len(line) >= 80]
    assert not SPINNER & set(screen.text) and "━" not in screen.text
    assert screen.cursor_is_free
    text = screen.text.replace("\n  ", " ")  # lines of 80 columns end between words
    header, data, run, *rest = text.splitlines()
    assert header.startswith("tiny: 45,216 parameters")
    assert data.startswith("data: ") and "40 steps of 256 tokens" in data
    assert run.startswith("run: fp32 on cpu") and str(tmp_path / "run") in run
    rest = [line for line in rest if not line.startswith("data: ")]  # this corpus is small: two notes
    logged = [line for line in rest if line.startswith("step ")]
    assert [line.partition("  loss ")[0] for line in logged] == [f"step {step}/40" for step in range(5, 41, 5)]
    assert "  val " in logged[3] and "mem" not in logged[3]  # 80 columns
    assert [line for line in rest if line.startswith("finished at step 40; validation loss ")]


def test_a_quiet_run_draws_nothing(recipe_file, tiny, tmp_path):
    """The terminal receives what a file would: no line is drawn, of the supervisor or of the process that it starts."""
    arguments = ["train", recipe_file, *tiny, "training.stop_after=2", "-q"]
    with TerminalCommand(*arguments, columns=80, folder=tmp_path) as command:
        assert command.wait() == 0
        screen = command.screen
    assert not screen.drawn and not SPINNER & set(screen.text), (screen.drawn, screen.text)
    assert "stopped at step 2 of 40" in screen.text


def test_a_start_in_several_processes_is_shown_until_rank_0_shows_its_own(recipe_file, tiny, tmp_path):
    """The ranks are held at the start of Python, as a slow disk would; the supervisor's line stays alive meanwhile."""
    go = tmp_path / "go"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, time\n"
        "parent = os.getppid()\n"
        f"while 'RANK' in os.environ and os.getppid() == parent and not pathlib.Path({str(go)!r}).exists():\n"
        "    time.sleep(0.05)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = ["train", recipe_file, *tiny, "--nproc", "2", "tracking.console=auto", "training.stop_after=2"]
    with TerminalCommand(*arguments, columns=80, folder=tmp_path, environment={"PYTHONPATH": path}) as command:
        command.wait_for(drawn("starting 2 processes  2 s"))
        command.wait_for(drawn("starting 2 processes  4 s"))
        assert command.screen.text  # nothing has erased it
        go.touch()
        command.wait_for(drawn("importing PyTorch"))
        assert command.wait() == 0
    lines = command.screen.text.splitlines()
    assert "stopped at step 2 of 40 (stop_after); the same command goes on" in lines, lines
    assert lines[-1].startswith("time ")
    assert not SPINNER & set(command.screen.text) and command.screen.cursor_is_free


def test_ctrl_c_leaves_messages_only(recipe_file, tiny, tmp_path):
    overrides = ["tracking.console=auto", "training.steps=100000", "evaluation.every_steps=null"]
    with TerminalCommand("train", recipe_file, *tiny, *overrides, columns=30, folder=tmp_path) as command:
        command.wait_for(lambda screen: drawn("step 20/100000  loss")(screen) and drawn("  eta ")(screen))
        command.press("\x03")
        assert command.wait() == 130
        screen = command.screen
    assert screen.widest < 30, screen.drawn
    assert "SIGINT: stopping after this step; a second signal stops at once" in screen.text.replace("\n  ", " ")
    assert "(SIGINT); the same command goes on" in screen.text.replace("\n  ", " ")
    assert not SPINNER & set(screen.text) and "eta" not in screen.text
    assert re.search(r"^step 20/100000  loss \d", screen.text, re.MULTILINE)  # a logged step stays
    assert screen.cursor_is_free


def test_a_terminal_that_is_resized_while_a_line_is_made_keeps_nothing_of_it():
    """The worst moment: the width is read, the line not yet written. A wider line would leave rows behind."""
    reading, writing = pty.openpty()
    screen, widths, drawings = Screen(100), [100, 100, 30, 100, 10, 60], threading.Semaphore(0)
    set_columns(reading, 100)

    def render(width: int) -> str:
        if widths:
            _feed(screen, reading, terminal)  # what was written before belongs to the old width
            screen.columns = widths.pop(0)
            set_columns(reading, screen.columns)
        else:
            drawings.release()
        return "x" * width

    with os.fdopen(writing, "w") as terminal:
        line = BottomLine(terminal, render)
        line.print("message")
        for _ in range(3):
            assert drawings.acquire(timeout=240)
        line.close()
        _feed(screen, reading, terminal)
    os.close(reading)
    assert screen.text == "message" and screen.cursor_is_free, screen.lines
    assert {len(drawn) for drawn in screen.drawn} == {99, 59}, "no line of a width that had gone was written"


def test_ctrl_c_during_the_imports_leaves_one_line(recipe_file, tiny, tmp_path):
    arguments = ["train", recipe_file, *tiny, "tracking.console=auto"]
    held = hold_imports(tmp_path)  # until Ctrl-C
    with TerminalCommand(*arguments, columns=80, folder=tmp_path, environment=held) as command:
        command.wait_for(drawn("importing PyTorch"))
        command.press("\x03")
        assert command.wait() == 130
    assert len(command.screen.text.splitlines()) == 1 and "interrupted" in command.screen.text
    assert command.screen.cursor_is_free


STOPS_AT_MERGES = """
import os, signal, sys
if "hlat.data.tokenizers.training" in sys.orig_argv:
    from hlat.runtime.helper_process import Channel
    send = Channel.send
    def send_and_stop(channel, message, *more):
        send(channel, message, *more)
        if isinstance(message, tuple):  # of merges so far
            os.kill(os.getpid(), signal.SIGSTOP)
    Channel.send = send_and_stop
"""


def test_ctrl_c_while_a_tokenizer_is_trained_ends_its_process_and_writes_nothing(tmp_path):
    """The process that trains stops at its first report of merges, and could not end by itself."""
    (tmp_path / "sitecustomize.py").write_text(STOPS_AT_MERGES)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=12)) for _ in range(5_000)]
    (tmp_path / "text.txt").write_text(" ".join(words))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {vocab_size: 3000, layers: 1, hidden_size: 8, intermediate_size: 8, heads: 1}\n"
        "data: {path: text.txt, tokenizer: {vocab_size: 3000}, validation: {fraction: 0}}\ntraining: {steps: 1}\n"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with TerminalCommand("data", "prepare", recipe, columns=80, folder=tmp_path, environment=path) as command:
        command.wait_for(drawn("merges"))
        children = psutil.Process(command.process.pid).children(recursive=True)
        assert any("hlat.data.tokenizers.training" in child.cmdline() for child in children)
        command.press("\x03")
        assert command.wait() == 130
        assert not [child for child in children if child.is_running()]
    assert command.screen.text.startswith("interrupted") and command.screen.cursor_is_free
    assert not list(tmp_path.rglob("tokenizer.json"))


def test_without_a_terminal_each_stage_is_a_line(recipe_file, tiny, cli):
    done = cli("train", recipe_file, *tiny, "training.stop_after=1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    stages = [line for line in lines if line.endswith(" ...")]
    assert stages[0] == lines[0] == "importing PyTorch ..."
    assert stages[-1] == "first step ..." and len(set(stages)) == len(stages)
    assert {"preparing data ...", "building the model ..."} < set(stages)
    assert "\x1b" not in done.stdout and "\r" not in done.stdout


def test_verbose_says_what_was_decided(recipe_file, tiny, cli):
    short = cli("train", recipe_file, *tiny, "training.stop_after=1").stdout
    long = cli("train", recipe_file, *tiny, "training.stop_after=2", "--verbose").stdout
    for decision in ("attention: ", "blocks: ", "peak: "):
        assert decision in long and decision not in short


def test_the_emulator_breaks_lines_anew_and_refuses_other_controls():
    screen = Screen(10)
    screen.feed("message\n0123456789abcde\r")  # the cursor is at the start of the second row
    screen.feed("X")
    assert screen.text == "message\n0123456789Xbcde"
    screen.feed("\r\x1b[J")
    assert screen.text == "message\n0123456789"
    with pytest.raises(AssertionError, match="unexpected control"):
        screen.feed("\x1b[?25l")


def test_a_line_that_is_left_stays_until_another_is_drawn_over_it():
    """A pseudo-terminal shows what two lines in a row write: between them the text is never gone."""
    reading, writing = pty.openpty()
    screen = Screen(80)
    with os.fdopen(writing, "w") as terminal:
        first = BottomLine(terminal, lambda width: "starting")
        first.close(leave=True)
        _feed(screen, reading, terminal)
        assert screen.text == "starting"
        second = BottomLine(terminal, lambda width: "reading")
        second.close()
        _feed(screen, reading, terminal)
        assert "starting" in screen.drawn and screen.text == ""
    os.close(reading)


def _feed(screen: Screen, reading: int, terminal: TextIO) -> None:
    """Show all that was written to a terminal. One read returns a part of it at times, so a mark is written last."""
    terminal.write(_END)
    terminal.flush()
    text = ""
    while not text.endswith(_END):
        text += os.read(reading, 1 << 16).decode()
    screen.feed(text.removesuffix(_END))


@pytest.mark.parametrize(
    "sections", ["{run: {name: x}}", "{model: {preset: tiny-1m}, data: {path: x}, training: {steps: 9}}"]
)
def test_what_a_verb_says_breaks_between_words_on_a_terminal_and_nowhere_else(sections, tmp_path):
    (tmp_path / "mine.yaml").write_text(sections)
    done = hlat("check", "mine.yaml", "--no-files", cwd=tmp_path)
    said = done.stdout + done.stderr
    assert max(map(len, said.splitlines())) > 80, "programs read lines"
    with TerminalCommand("check", "mine.yaml", "--no-files", columns=80, folder=tmp_path) as command:
        assert command.wait() == done.returncode
        screen = command.screen
    assert all(len(line) <= 80 for line in screen.lines), screen.text
    assert screen.text.split() == said.split()
