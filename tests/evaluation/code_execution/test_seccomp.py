"""The filter allows what the table says, under the numbers of Linux's own headers, and nothing else."""

import errno
import re
import struct
from pathlib import Path

import pytest

from hlat.evaluation.code_execution import sandbox as seccomp
from hlat.evaluation.code_execution.sandbox import seccomp_filter

HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",  # the numbers that all newer architectures share
}
X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000


def decision(code: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Run a filter as the kernel does (Documentation/networking/filter.rst)."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data, accumulator, at = struct.pack("<IIQ6Q", number, architecture, 0, *padded), 0, 0
    while True:
        operation, if_true, if_false, value = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif operation == 0x54:
            accumulator &= value
        elif operation == 0x15:
            at += if_true if accumulator == value else if_false
        elif operation == 0x35:
            at += if_true if accumulator >= value else if_false
        else:
            assert operation == 0x06
            return value


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_linux(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"{header} (linux-libc-dev) is not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    numbers = {name: int(number) for name, number in found} | ({"newfstatat": 79} if machine == "aarch64" else {})
    column = list(HEADERS).index(machine)
    entries = [*seccomp._ALLOWED.split(","), *(entry for entry, *_ in seccomp._CONDITIONAL)]
    for entry in entries:
        name, *columns = entry.split()
        assert columns[column] == "-" or numbers[name] == int(columns[column]), entry


@pytest.mark.parametrize(("machine", "architecture", "column"), [("x86_64", X86_64, 0), ("aarch64", AARCH64, 1)])
def test_the_filter_decides_as_the_table(machine: str, architecture: int, column: int) -> None:
    code = seccomp_filter(machine)
    allowed = {entry.split()[1 + column] for entry in seccomp._ALLOWED.split(",")}
    conditional = {entry.split()[1 + column] for entry, *_ in seccomp._CONDITIONAL}
    for number in range(600):
        if str(number) not in conditional:
            assert decision(code, architecture, number) == (ALLOW if str(number) in allowed else REFUSE)
    assert decision(code, I386, 3) == decision(code, architecture, 0x40000000) == KILL
    opening = 257 if column == 0 else 56
    for flags, wanted in ((0, ALLOW), (0o1102, ALLOW), (0o1000, REFUSE), (0o2001, ALLOW), (3, REFUSE)):
        assert decision(code, architecture, opening, 0, 0, flags) == wanted
    limits = 302 if column == 0 else 261
    assert [decision(code, architecture, limits, pid) for pid in (0, 1)] == [ALLOW, REFUSE]
    pair = 53 if column == 0 else 199
    assert [decision(code, architecture, pair, 1, kind) for kind in (1, 0o2000001, 2)] == [ALLOW, ALLOW, REFUSE]
    control = 72 if column == 0 else 25
    assert [decision(code, architecture, control, 0, what) for what in (1, 8, 10, 2**32 + 1)] == [
        *(ALLOW, REFUSE, REFUSE, ALLOW),  # the kernel reads 32 bits of the command too
    ]


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(KeyError):
        seccomp_filter("riscv64")
