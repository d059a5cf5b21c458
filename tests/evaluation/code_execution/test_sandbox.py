"""Programs succeed only by running to their end within the limits; pass@k is the estimate of its definition."""

import itertools
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from hlat.evaluation.code_execution import Limits, estimate_pass, pass_at_k, run_program
from hlat.evaluation.code_execution.runner import _others_can_read
from hlat.runtime import LaunchError

FAILING = {
    "exception": "assert 1 == 2",
    "exit": "import sys; sys.exit(0)",
    "early exit": "import os; os._exit(0)",
    "syntax": "def f(:",
    "memory": "x = bytearray(2 << 30)",
    "large file": "open('x', 'wb').write(bytes(2 << 20))",
}


def test_without_linux_no_program_is_executed_and_none_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaunchError, match="darwin cannot confine programs"):
        run_program("pass")


def test_a_program_that_ends_has_succeeded() -> None:
    assert run_program("import math\nprint('ü')\nassert math.comb(4, 2) == 6")


@pytest.mark.parametrize("name", FAILING)
def test_other_ends_are_failures(name: str) -> None:
    assert not run_program(FAILING[name])


@pytest.mark.skipif(
    os.geteuid() == 0 and not _others_can_read(os.__file__), reason="the kernel exempts root's processes"
)
def test_child_processes_are_refused() -> None:
    assert not run_program("import subprocess; subprocess.run(['/bin/true'], check=True)")


def test_endless_programs_are_ended() -> None:
    begin = time.monotonic()
    assert not run_program("while True: pass", Limits(seconds=1))
    assert not run_program("import time; time.sleep(60)", Limits(seconds=1))
    assert time.monotonic() - begin < 10


def test_a_program_sees_neither_the_environment_nor_the_folder_nor_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_TESTS", "1")
    monkeypatch.chdir(tmp_path)
    assert run_program("import os; assert 'SECRET_OF_TESTS' not in os.environ and os.listdir('.') == []")
    if os.geteuid() == 0:  # other users may be refused a network namespace
        unreachable = "import socket\ntry:\n socket.create_connection(('127.0.0.1', {}), 1)\nexcept OSError:\n pass\n"
        unreachable += "else:\n assert 0"
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert run_program(unreachable.format(server.getsockname()[1]))
        assert run_program("import os; assert os.geteuid() == 65534")


def test_pass_at_k_is_the_share_of_samples_of_k_programs_with_one_that_passes() -> None:
    for passing in range(6):
        outcomes = [index < passing for index in range(5)]
        for k in (1, 2, 5):
            chosen = list(itertools.combinations(outcomes, k))
            assert estimate_pass(5, passing, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_pass_at_k_runs_the_programs_with_their_tests() -> None:
    programs = ["def f():\n    return 1\n", "def f():\n    return 2\n"]
    assert pass_at_k(["assert f() == 1", "assert f() == 3"], [programs, programs], [1, 2]) == {
        "pass@1": 0.25,
        "pass@2": 0.5,
    }
