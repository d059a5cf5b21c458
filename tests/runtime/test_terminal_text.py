"""Control characters in untrusted text do not reach a terminal, rich still draws, and JSON stays JSON."""

import io
import json
import sys

import pytest
from rich.console import Console
from rich.progress import Progress

from hlat.runtime import EscapingStream, escape_controls, escape_name
from hlat.runtime.terminal_text import escape_beneath_rich

CODES = (*range(9), *range(11, 32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
CONTROLS = [chr(code) for code in CODES]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("char", CONTROLS, ids=lambda char: f"{ord(char):04x}")
def test_control_characters_are_escaped(char: str) -> None:
    assert escape_controls(f"a{char}b") == escape_name(f"a{char}b") == f"a\\u{ord(char):04x}b"


def test_all_other_characters_are_kept() -> None:
    text = "naïve 𝔘 עברית فارسی\u200cها 👩\u200d🔬 [/b] \\ \n\t"
    assert escape_controls(text) == text
    assert escape_name("a\nb\tc") == "a\\u000ab\\u0009c"
    assert escape_controls("\ud800").encode() == b"\\ud800"


def test_escaped_json_has_the_same_value() -> None:
    value = {"a\x1b\x7f\u202e": ["\x9b", "\x7f", "\ud800"]}
    for ascii_only in (True, False):
        assert json.loads(escape_controls(json.dumps(value, ensure_ascii=ascii_only))) == value


def test_the_stream_escapes_printed_text_and_lets_rich_draw() -> None:
    terminal = Terminal()
    stream = EscapingStream(EscapingStream(terminal))
    print("name\x1b[2J\x9b", file=stream)
    assert terminal.getvalue() == "name\\u001b[2J\\u009b\n" and stream.isatty()
    Console(file=stream, force_terminal=True, color_system="standard").print("[red]drawn[/red]")
    assert "\x1b[31mdrawn" in terminal.getvalue()


def test_text_printed_while_rich_draws_is_escaped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", EscapingStream(terminal))
    before = sys.stdout
    with Progress(console=Console(file=sys.stdout, force_terminal=True), auto_refresh=False) as bar:
        bar.add_task("x")
        escape_beneath_rich()
        print("a file called \x9b1m\x1b]0;title\x07")
        bar.refresh()
    assert "a file called \\u009b1m\\u001b]0;title\\u0007" in terminal.getvalue() and "\x9b" not in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue(), "the bar is drawn"
    assert sys.stdout is before
