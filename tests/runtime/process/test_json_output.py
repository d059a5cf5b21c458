"""Everything that a process and its children print, as JSON lines."""

import json
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from hlat.runtime.json_lines import FIELDS, convert, format_line

PROGRAM = r"""
import os, subprocess, sys
from hlat.runtime.logs import json_line, print_json_lines, prints_json
print("before")
print_json_lines()
print_json_lines()
assert prints_json()
print(json_line("message", "ours, https://user:secret@host/x", rank=0, step=3, values={"loss": 1.5}))
print("plain \x1b[31m text")
sys.stdout.flush()
os.write(2, b"bar 10 %\rbar 20 %\r\n\n\xff not UTF-8\n")
subprocess.run(["sh", "-c", "echo child; echo '{\"json\": 1}'; printf 'no newline'"])
os.write(1, b"x" * 3_000_000)
raise ValueError("a bug\nof two lines")
"""


def test_whatever_prints_every_line_is_json() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=False, timeout=1200)
    first, *lines = done.stdout.splitlines()
    assert (done.returncode, first) == (1, b"before")
    out, err = ([json.loads(line) for line in stream] for stream in (lines, done.stderr.splitlines()))
    assert all(tuple(record) == FIELDS for record in (*out, *err))
    assert out[0]["values"] == {"loss": 1.5} and (out[0]["rank"], out[0]["step"]) == (0, 3)
    assert "secret" not in out[0]["message"]
    texts = [record["message"] for record in out[1:]]
    assert texts[:3] == ["plain \x1b[31m text", "child", '{"json": 1}']
    assert "".join(texts[3:]) == "no newline" + "x" * 3_000_000
    assert [record["message"] for record in err[:3]] == ["bar 10 %", "bar 20 %", "\\xff not UTF-8"]
    assert err[3]["level"] == "error" and err[3]["message"].endswith("ValueError: a bug\nof two lines")
    assert {record["event"] for record in err} == {"output"}


@given(st.binary())
def test_any_line_becomes_one_json_line_or_none(line: bytes) -> None:
    found = convert(line.replace(b"\n", b""), "stderr")
    assert found.count(b"\n") == (1 if line.replace(b"\n", b"").strip() else 0)
    if found:
        assert tuple(json.loads(found)) == FIELDS


def test_a_line_of_hlat_stays_as_it_is() -> None:
    line = format_line("step", "step 1\nof 2", step=1, values={"loss": 1.0}).encode()
    assert convert(line, "stdout") == line + b"\n"
