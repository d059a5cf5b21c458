"""Names and texts of strangers at the doors of the command: shown, obeyed by neither the terminal nor rich."""

import json
import os
import pty
import subprocess
import sys

import pytest
import yaml

import hlat.evaluation

STEERING = "\x1b[2J\x9b1m\u202e[/b]"
SHOWN = "\\u001b[2J\\u009b1m\\u202e[/b]"


@pytest.fixture
def hardware(tmp_path):
    """A catalog with an instance whose name steers terminals and closes markup."""
    from hlat.hardware import load_catalog  # noqa: PLC0415

    instance = load_catalog().instance("p5.48xlarge").model_dump(mode="json")
    cited = {instance["source"], instance["failures"]["source"], *(p["source"] for p in instance["prices"].values())}
    content = {"instances": [{**instance, "name": f"mine{STEERING}"}], "sources": dict.fromkeys(cited, "a\x1b source")}
    (tmp_path / "hardware.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "hardware.yaml"


def clean(done):
    said = done.stdout + done.stderr
    assert not {*"\x1b\x9b\u202e\r\x07"} & set(said), said
    assert "Traceback" not in said
    return said


def test_names_of_hardware(cli, hardware):
    said = clean(cli("hardware", "list", "--hardware", hardware))
    assert f"mine{SHOWN}" in said
    assert "a\\u001b source" in clean(cli("hardware", "show", f"mine{STEERING}", "--hardware", hardware))
    plan = ("plan", "--model", "llama-2-7b", "--cluster", f"mine{STEERING}:1", "--layout", "tp=8")
    plan = (*plan, "--hardware", hardware)
    done = cli(*plan)
    assert done.returncode == 0, done.stderr
    assert f"mine{SHOWN}:1" in clean(done)
    assert json.loads(cli(*plan, "--json").stdout)["cluster"] == f"mine{STEERING}:1"


@pytest.mark.parametrize(
    "text", ["chips: [{name: [a]}]", "instances: [5]", "chips: !!int abc", "[" * 3000, "chips: {}", "\0",
             "chips: [{name: 2001-99-99}]", "x", "- 1", "instances: [{name: {}}]", "sources: {a: 1}", 'a: "\\ud800"']
)  # fmt: skip
def test_hardware_files_that_are_none(cli, tmp_path, text):
    (tmp_path / "h.yaml").write_text(text)
    done = cli("hardware", "list", "--hardware", tmp_path / "h.yaml")
    assert done.returncode == 2 and "h.yaml" in clean(done), done


def _generate_controls() -> None:
    hlat.evaluation.generate_text = lambda *given: "a\nb\tc\x1b[2J\x85\x9b\u202ed"


def test_generated_text(cli):
    """Newlines and tabs of generated text are printed; other control characters are shown as escapes."""
    done = cli("generate", "run", "--prompt", "x", prepare=_generate_controls)
    assert done.stdout == "xa\nb\tc\\u001b[2J\\u0085\\u009b\\u202ed\n"


def test_columns_and_keys_of_data(cli, recipe_file, tiny, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({f"key{STEERING}\n": "a"}) + "\n")
    done = cli("data", "prepare", recipe_file, *tiny, f"data.path={tmp_path / 'x.jsonl'}")
    assert done.returncode == 2 and f"key{SHOWN}\\u000a" in clean(done), done.stderr


def test_an_override_with_dashes(cli, recipe_file):
    done = cli("check", recipe_file, "--training.steps=4")
    assert done.returncode == 2 and "training.steps=VALUE" in " ".join(done.stderr.split())


def test_a_traceback_and_a_warning_of_ours(tmp_path):
    """A bug of ours may carry a stranger's text: what Python prints goes through the same door."""
    program = (
        "import sys, warnings\n"
        "import hlat.planner\n"
        "def fail(*given, **options):\n"
        "    warnings.warn('warned \\x9b', stacklevel=1)\n"
        "    raise RuntimeError('failed \\x1b[2J\\x9b https://u:S3CR3T@host/x?sig=S3CR3T')\n"
        "hlat.planner.load_run_recipe = fail\n"
        "from hlat.command import main\n"
        "sys.argv = ['hlat', 'check', 'quickstart']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 1 and "RuntimeError: failed \\u001b[2J\\u009b" in done.stderr, done.stderr
    assert "https://...@host/x?..." in done.stderr and "S3CR3T" not in done.stderr.rpartition("RuntimeError")[2]
    assert "warned \\u009b" in done.stderr and not {*"\x1b\x9b"} & set(done.stderr)


def test_on_a_terminal_help_is_still_drawn(tmp_path):
    """Typer draws with rich, past the door: its colours are colours, not shown."""
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "hlat", "check", "--help"], stdout=side, stderr=side, env=environment
    )
    os.close(side)
    said = b""
    try:
        while piece := os.read(main, 65536):
            said += piece
    except OSError:  # so a terminal says that the other side has gone
        pass
    assert process.wait() == 0
    assert b"\x1b[" in said and b"\\u001b" not in said
