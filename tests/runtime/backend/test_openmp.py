"""The spin count is lowered, except on a machine whose host is busy."""

import subprocess
import sys
from pathlib import Path

import pytest

from hlat.runtime.backend.openmp import SPIN_COUNT, ProcessorTime, set_spin_count


def ticks(folder: Path, name: str, used: int, stolen: int) -> ProcessorTime | None:
    """Ticks in the format of proc(5): user nice system idle iowait irq softirq steal guest guest_nice."""
    file = folder / name
    file.write_text(f"cpu  {used} 0 0 99999 77 0 0 {stolen} 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n", encoding="ascii")
    return ProcessorTime.read(file)


@pytest.mark.parametrize(
    ("used", "stolen", "set_to"),
    [(30, 0, SPIN_COUNT), (30, 2, SPIN_COUNT), (30, 10, None), (5, 5, None), (0, 0, SPIN_COUNT)],
)
def test_the_default_is_kept_on_a_busy_host(tmp_path: Path, used: int, stolen: int, set_to: int | None) -> None:
    environment: dict[str, str] = {}
    before, after = ticks(tmp_path, "before", 1000, 50), ticks(tmp_path, "after", 1000 + used, 50 + stolen)
    set_spin_count(before, after, environment)
    assert environment == ({} if set_to is None else {"GOMP_SPINCOUNT": str(set_to)})


def test_an_existing_value_is_kept(tmp_path: Path) -> None:
    environment = {"GOMP_SPINCOUNT": "7"}
    set_spin_count(None, None, environment)
    assert environment == {"GOMP_SPINCOUNT": "7"}


@pytest.mark.parametrize("content", ["", "cpu 1 2 3\n", "cpu a b c d e f g h\n"])
def test_a_system_without_ticks_counts_as_quiet(tmp_path: Path, content: str) -> None:
    (tmp_path / "stat").write_text(content, encoding="ascii")
    assert ProcessorTime.read(tmp_path / "stat") is None
    assert ProcessorTime.read(tmp_path / "absent") is None
    environment: dict[str, str] = {}
    set_spin_count(None, ProcessorTime(1, 1), environment)
    assert environment == {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


def test_the_command_sets_the_spin_count_before_torch_is_imported() -> None:
    program = (
        "import os, sys\n"
        "os.environ.pop('GOMP_SPINCOUNT', None)\n"
        "import hlat.command, hlat.cli\n"
        "from hlat.runtime.backend.openmp import ProcessorTime\n"
        "ProcessorTime.read = classmethod(lambda cls: cls(0, 0))\n"
        "hlat.cli.app = lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)\n"
        "hlat.command.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{SPIN_COUNT} False\n"
