"""Control characters in untrusted text do not reach a terminal, rich still draws, and JSON stays JSON."""

import io
import json

import pytest
from rich.console import Console

from hlat.runtime.terminal import EscapingStream, escape_controls, escape_name

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
