"""`hlat --version` names versions and devices without torch; shells complete verbs and options."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import hlat
from hlat.runtime.backend import table
from hlat.runtime.backend.table import driver_versions
from tests.cli.test_start import HEAVY, imported_by

NVIDIA = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2026\nGCC version: 12\n"


def test_the_version_names_torch_and_devices_without_importing_torch() -> None:
    done = subprocess.run([sys.executable, "-m", "hlat", "--version"], capture_output=True, text=True, check=True)
    first, second, third, fourth = done.stdout.splitlines()
    assert first == f"hlat {version('hlat')}"
    assert f"torch {version('torch')}, Python {sys.version_info.major}.{sys.version_info.minor}." in second
    assert third.startswith("devices: ") and third.endswith("the processor")
    assert Path(fourth.removeprefix("documentation: ")).read_text(encoding="utf-8").startswith("# hlat\n")
    assert not imported_by("--version", packages=HEAVY)


def test_a_source_tree_that_is_not_installed_has_the_version_of_the_project() -> None:
    sources = str(Path(hlat.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {sources!r}); import hlat; print(hlat.__version__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == version("hlat")


def test_drivers_are_read_from_the_kernels_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia, neuron, gone = tmp_path / "nvidia", tmp_path / "neuron", tmp_path / "gone"
    nvidia.write_text(NVIDIA)
    neuron.write_bytes(b"2.21.37.0\n")
    monkeypatch.setattr(table, "DRIVER_FILES", {"cuda": nvidia, "neuron": neuron, "other": gone})
    assert driver_versions() == {"cuda": "550.54.15", "neuron": "2.21.37.0"}
    nvidia.write_bytes(b"\xff\xfe")
    neuron.write_bytes(b"")
    assert driver_versions() == {}


@pytest.mark.parametrize(
    ("line", "expected"), [("hlat ch", ["check", "checkpoint"]), ("hlat train --requ", ["--require-step"])]
)
def test_bash_completes(line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_HLAT_COMPLETE": "complete_bash", "COMP_WORDS": line}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    program = "import sys; sys.argv[0] = 'hlat'; from hlat.command import main; main()"  # the name that shells call
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == expected, done.stderr


def test_completion_can_be_shown_for_a_shell() -> None:
    program = "import sys; sys.argv[0] = 'hlat'; from hlat.command import main; main()"
    command = [sys.executable, "-c", program, "--show-completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "complete -o default -F _hlat_completion hlat" in done.stdout


def test_a_misspelled_variable_is_named(cli) -> None:
    done = cli("recipe", env={"HLAT_LGO": "json", "HLAT_VERBOSE": "please"})
    assert "HLAT_LGO has no effect. Did you mean HLAT_LOG?" in done.stderr
    assert "HLAT_VERBOSE=please is taken for 1" in done.stderr


@pytest.mark.parametrize("words", [("trian",), ("train", "--bogus")])
def test_a_wrong_command_line_is_one_error_where_messages_are_json_lines(words) -> None:
    command = [sys.executable, "-m", "hlat", "--log-json", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, json.loads(line)["level"]) == (2, "error") and words[-1] in line
