"""Programs succeed only by passing their tests within the limits, and reach nothing outside the sandbox."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest

from hlat.evaluation.code_execution import sandbox
from hlat.evaluation.code_execution.inside.confine import others_can_read
from hlat.evaluation.code_execution.sandbox import (
    Confinement,
    Limits,
    bubblewrap,
    find_confinement,
    landlock,
    pass_at_k,
    run_program,
    unconfined,
    unconfined_execution,
)
from hlat.runtime.errors import DataError, LaunchError
from tests.support.evaluation.escapes import (
    ESCAPES,
    FAULTS,
    FORGERIES,
    LIST,
    TESTS,
    WRONG,
    aimed,
    changed,
    furnish,
    victim,
)

WAYS = {"bubblewrap": bubblewrap, "Landlock": landlock, "none": unconfined}
FAILING = {
    "exception": "assert 1 == 2",
    "exit": "import sys; sys.exit(0)",
    "early exit": "import os; os._exit(0)",
    "syntax": "def f(:",
    "memory": "x = bytearray(2 << 30)",
    "large file": "open('x', 'wb').write(bytes(2 << 20))",
}
SOME_ESCAPES = ("files: read a secret file", "files: delete a folder", "files: chmod", "processes: fork")
SOME_ESCAPES += ("processes: kill another process", "network: TCP", "network: an abstract socket", "kernel: io_uring")
SOME_FORGERIES = ("wrong", "equal to all", "frames", "all descriptors", "the reply itself")
SOME_FORGERIES += ("a module is replaced", "built-in functions are replaced")


def way_called(name: str) -> Confinement:
    way = WAYS[name]()
    if way is None or not sandbox._works(way):
        pytest.skip(f"{name} does not work on this machine")
    return way


@pytest.fixture(params=["bubblewrap", "Landlock"])
def way(request: pytest.FixtureRequest) -> Confinement:
    return way_called(request.param)


def passes(way: Confinement, program: str, tests: str = "", seconds: int = 600) -> bool:
    return sandbox._judge(way, program, tests, Limits(seconds))


def test_where_nothing_confines_programs_none_is_executed_and_none_counts_as_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandbox, "bubblewrap", lambda: None)
    monkeypatch.setattr(sandbox, "landlock", lambda: None)
    touch = f"open({str(tmp_path / 'made')!r}, 'w')"
    with pytest.raises(LaunchError, match=r"cannot confine programs.*--allow-code-execution=unsafe"):
        run_program(touch)
    with pytest.raises(LaunchError, match="bubblewrap: not there; Landlock: not there"):
        pass_at_k(["f()"], [[touch]], [1])
    assert not (tmp_path / "made").exists()
    with unconfined_execution():
        assert run_program(touch, Limits(600))
    assert (tmp_path / "made").exists()
    with pytest.raises(LaunchError):
        run_program(touch)


def test_what_does_not_start_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As bubblewrap in a container that has no user namespaces."""
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "landlock", lambda: None)
    with pytest.raises(LaunchError, match="bubblewrap: it does not start here"):
        find_confinement()


def test_a_program_that_ends_has_succeeded(way: Confinement) -> None:
    honest = "import asyncio, math, tempfile, os\nprint('ü' * 10**7)\nassert math.comb(4, 2) == 6\n"
    honest += "assert os.listdir('.') == [] and dict(os.environ).keys() <= {'LC_CTYPE', 'PWD'}\n"
    honest += "open('a', 'w').write('text'); os.replace('a', 'b'); assert open('b').read() == 'text'\n"
    honest += "tempfile.TemporaryFile().write(b'x')\nasyncio.run(asyncio.sleep(0))"
    assert passes(way, honest)


@pytest.mark.parametrize("name", FAILING)
def test_other_ends_are_failures(name: str) -> None:
    assert not run_program(FAILING[name])


def test_endless_programs_are_ended() -> None:
    assert not run_program("while True: pass", Limits(seconds=1))
    assert not run_program("import time; time.sleep(1e6)", Limits(seconds=1))
    assert not run_program("def f(): return 1", Limits(seconds=1), tests="f()\nwhile True: pass")


@pytest.mark.parametrize("name", SOME_ESCAPES)
def test_a_program_does_not_escape(name: str, tmp_path: Path) -> None:
    furnish(tmp_path)
    with victim(tmp_path) as words:
        assert not run_program(aimed(ESCAPES[name], words))
    assert changed(tmp_path) == []


def test_the_folder_of_a_program_has_a_limit(way: Confinement) -> None:
    program = "for i in range({}): open(f'f{{i}}', 'w').write('x' * 1000000)\nimport time; time.sleep({})"
    assert passes(way, program.format(10, 0.2))
    assert not passes(way, program.format(30, 600), seconds=3600)


@pytest.mark.parametrize("name", SOME_FORGERIES)
def test_a_wrong_program_does_not_forge_its_verdict(name: str) -> None:
    assert not run_program(WRONG + FORGERIES[name], tests=TESTS)


def test_the_tests_that_forgeries_fail_are_passed_by_a_right_program(way: Confinement) -> None:
    assert passes(way, "def f(x):\n    return x + 1\n", TESTS)


@pytest.mark.slow
def test_no_escape_and_no_forgery(way: Confinement, tmp_path: Path) -> None:
    assert possible(way, tmp_path) == []


@pytest.mark.slow
def test_escapes_are_possible_without_a_sandbox(tmp_path: Path) -> None:
    """So a refusal is that of the sandbox, not a mistake in the program that tries."""
    found = possible(unconfined(), tmp_path)
    # The others: the limits hold here too, and some kernels and users lack what they ask for.
    assert len(found) > 70
    assert not [name for name in found if name.startswith("forgery")]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("name", ["bubblewrap", "Landlock"])
@pytest.mark.parametrize("user", [0, 1234])
def test_no_escape_of_users(name: str, user: int) -> None:
    """As root who becomes nobody, and as an ordinary user, with a Python that all users can read."""
    way_called(name)
    script = "import sys, json, pathlib\nfrom tests.evaluation.code_execution import test_sandbox as t\n"
    script += "home = pathlib.Path(sys.argv[2]); home.mkdir()\n"
    script += "print(json.dumps(t.possible(t.WAYS[sys.argv[1]](), home)))"
    with tempfile.TemporaryDirectory() as place:  # pytest's folders are closed to other users
        Path(place).chmod(0o777)
        words = [*readable_python(user), sys.executable, "-B", "-c", script, name, str(Path(place, "home"))]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def readable_python(user: int) -> list[str]:
    """Words that start a command as a user, where Python's own folder is readable for all."""
    become = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups"]
    if others_can_read(os.__file__):
        return become
    hidden = next(str(p) for p in [*Path(sys.base_prefix).parents][::-1] if not p.stat().st_mode & 1)
    script = 'place=$(mktemp -d) && mount --bind "$1" "$place" && mount -t tmpfs -o mode=755 none "$2" && mkdir -p "$1"'
    script += ' && mount --bind "$place" "$1" && shift 2 && exec "$@"'
    return ["unshare", "-m", "sh", "-c", script, "sh", sys.base_prefix, hidden, *become]


def possible(way: Confinement, home: Path) -> list[str]:
    """Return the names of the escapes and forgeries that succeed; nothing may be left behind."""
    found = []
    with tempfile.TemporaryDirectory() as place, patch.object(tempfile, "tempdir", place):
        for name, program in ESCAPES.items():
            furnish(home)
            with victim(home) as words:
                if passes(way, aimed(program, words), seconds=5) or changed(home):
                    found.append(name)
            for item in home.iterdir():
                shutil.rmtree(item) if item.is_dir() else item.unlink()
        found += [f"forgery: {name}" for name, forged in FORGERIES.items() if passes(way, WRONG + forged, TESTS, 5)]
        assert list(Path(place).iterdir()) == []
    return found


def test_a_folder_is_removed_whatever_the_program_did(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with unconfined_execution():
        assert run_program("import os\nfor i in range(1500): os.mkdir('d'); os.chdir('d')", Limits(600))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_program_removed_has_no_size(tmp_path: Path) -> None:
    assert sandbox._size(tmp_path / "removed") == 0


def test_what_a_program_does_to_the_verdict_without_a_sandbox_aborts_no_evaluation(tmp_path: Path) -> None:
    opened = "import os, time\nverdict = os.open(f'/proc/{os.getppid()}/fd/3', os.O_WRONLY)\n"
    holder = f"if os.fork() == 0:\n  os.setsid()\n  open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    with unconfined_execution():
        assert not run_program(opened + "os.write(verdict, b'\\xff')")
        for seconds in (1, 10, 100, 1000):  # on a busy machine the holder may be started later
            assert not run_program(opened + holder + "  time.sleep(1e6)", Limits(seconds))
            if (tmp_path / "pid").exists():
                break
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it still held the verdict's pipe


@pytest.mark.slow
def test_programs_end_with_hlat(tmp_path: Path) -> None:
    """Also if root becomes nobody, by which the kernel forgets the wish to end."""
    way_called("Landlock")
    become = readable_python(0) if os.geteuid() == 0 else []
    script = """
import ctypes, os, pathlib, sys, tempfile, time
from tests.evaluation.code_execution import test_sandbox as t
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
tempfile.tempdir = sys.argv[1]
hlat = os.fork()
if hlat == 0:
    t.passes(t.landlock(), "open('begun', 'w')\\nimport time; time.sleep(30)")
    os._exit(0)
while not [*pathlib.Path(sys.argv[1]).glob("*/begun")]:
    assert os.waitpid(hlat, os.WNOHANG) == (0, 0)
    time.sleep(0.01)
os.kill(hlat, 9)
assert [os.WTERMSIG(os.wait()[1]) for process in ("hlat", "judge", "program")] == [9, 9, 9]
"""
    words = [*become, sys.executable, "-B", "-c", script, tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr


def test_a_process_whose_parent_ended_before_ends_too() -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1])\nfrom inside.confine import end_with_parent as end\n"
    script += "import os; end(None); end(os.getppid()); print('alive', flush=True); end(os.getpid()); print('still')"
    words = [sys.executable, "-I", "-S", "-c", script, Path(sandbox.__file__).parent]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "alive\n")


def test_tests_see_the_functions_and_values_of_the_program(way: Confinement) -> None:
    program = """
import math
from collections import Counter, deque
from decimal import Decimal
from fractions import Fraction
LIMIT = [1, 2]
class Node:
    def __init__(self, value): self.value, self.next = value, None
def length(node): return 1 + length(node.next) if node else 0
def sort(values): values.sort()
def plain(): return [1, -2**80, 2.5, float("inf"), 1j, "\\ud800ü", b"x", None, True, (1,), {1: {2}}, frozenset({3})]
def fail(): raise KeyError("no")
def echo(*values, **named): return values, named
def lazy(): return (n * n for n in range(4))
def exact(): return Decimal("1.5"), Fraction(1, 3), Counter("aab"), deque([1])
"""
    tests = """
assert plain() == [1, -2**80, 2.5, float("inf"), 1j, "\\ud800ü", b"x", None, True, (1,), {1: {2}}, frozenset({3})]
assert plain()[8] is True and isinstance(plain()[9], tuple)
assert LIMIT == [1, 2] and math.pi > 3 and echo(1, [2], a=3) == ((1, [2]), {"a": 3})
first, values = Node(1), [3, 1, 2]
first.next = Node(2)
sort(values)
assert length(first) == 2 and first.next.value == 2 and values == [1, 2, 3] and first.next != first
assert list(lazy()) == [0, 1, 4, 9] and exact()[0] == 1.5 and 3 * exact()[1] == 1 and exact()[2] == {"a": 2, "b": 1}
assert list(exact()[3]) == [1] and len(exact()[3]) == 1 and exact()[3][0] == 1
try:
    fail()
except KeyError as error:
    assert "no" in str(error)
else:
    raise AssertionError
try:
    unknown
except NameError:
    pass
"""
    assert passes(way, program, tests)


def test_tests_see_objects_of_the_program_as_python_shows_them(way: Confinement) -> None:
    program = (
        LIST
        + """
import re
def match(text): return re.match("a", text)
def numbers():
    n = 0
    while True:
        yield n
        n += 1
def one(): yield 1
class Mute(ValueError):
    def __str__(self): return 1 / 0
def fail(): raise Mute
def leave(): raise SystemExit(3)
"""
    )
    tests = """
assert match("a") and not match("b")
assert Own(1, 2, 3)[1:][1] == 3 and Own(1)[slice(0, 1)] == [1]
endless, single = numbers(), one()
assert [next(endless), endless.__next__()] == [0, 1] and dict(zip(numbers(), "ab")) == {0: "a", 1: "b"}
assert [*single] == [1] and next(single, 7) == 7
for error, action in ((StopIteration, lambda: next(single)), (ValueError, fail), (SystemExit, leave)):
    try:
        action()
    except error:
        continue
    raise AssertionError(error)
"""
    assert passes(way, program, tests)


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_program_returns_or_raises_aborts_no_evaluation_and_passes_no_test(name: str) -> None:
    program, tests = FAULTS[name]
    assert not run_program(program, Limits(600), tests=tests)


def test_a_value_of_the_tests_that_cannot_be_passed_is_reported_and_not_counted_as_a_failure() -> None:
    with pytest.raises(DataError, match="a value of type function"):
        run_program("def f(g): return g(1)", Limits(600), tests="try:\n    f(lambda x: x)\nexcept Exception:\n    pass")


def test_pass_at_k_runs_the_programs_with_their_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "Limits", lambda: Limits(600))  # a busy machine may need longer than its limit
    programs = ["def f():\n    return 1\n", "def f():\n    return 2\n"]
    assert pass_at_k(["assert f() == 1", "assert f() == 3"], [programs, programs], [1, 2]) == {
        "pass@1": 0.25,
        "pass@2": 0.5,
    }


def test_the_sandbox_imports_nothing_but_the_standard_library() -> None:
    inside = Path(sandbox.__file__).with_name("inside")
    for file in inside.glob("*.py"):
        for line in file.read_text().splitlines():
            if line.startswith(("import ", "from ")):
                name = line.split()[1].partition(".")[0]
                assert not name or name in sys.stdlib_module_names, line
    assert Path(sysconfig.get_path("stdlib")).is_dir()


def test_every_version_of_landlock_confines_files(tmp_path: Path) -> None:
    """A kernel knows the rights of its version and all before; those of an earlier one are asked for here."""
    way_called("Landlock")
    script = """
import os, sys
sys.path.insert(0, sys.argv[1])
from inside import confine
real, folder, out = confine._call, sys.argv[2], sys.argv[3]
newest = real("syscall", confine._CREATE_RULESET, None, 0, 1)
def refused(action):
    try:
        action()
    except OSError:
        return True
for version in range(1, newest + 1):
    confine._call = lambda *words: version if words[1:] == (confine._CREATE_RULESET, None, 0, 1) else real(*words)
    if os.fork() == 0:
        confine.drop_rights()
        confine.restrict_files(["/usr/lib"], ["/dev/null"], folder)
        open(folder + "/a", "w").write("x")
        os.replace(folder + "/a", folder + "/b")
        open("/dev/null", "w").write(open(folder + "/b").read())
        os.unlink(folder + "/b")
        assert os.listdir("/usr/lib")
        assert refused(lambda: open(out + "/secret")) and refused(lambda: open(out + "/new", "w"))
        assert refused(lambda: os.listdir(out)) and refused(lambda: os.unlink(out + "/secret"))
        assert refused(lambda: os.mkdir(folder + "/d")) and refused(lambda: open("/usr/lib/new", "w"))
        os._exit(0)
    assert os.wait()[1] == 0, version
print(newest)
"""
    (tmp_path / "folder").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_text("S")
    place = Path(sandbox.__file__).parent
    words = [sys.executable, "-I", "-S", "-c", script, place, tmp_path / "folder", tmp_path / "out"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) >= 1, done.stderr
