"""``hlat train --nproc``: errors that are reported before any process is started."""

import os
import subprocess
import sys

import pytest


def assert_refused(done, *texts):
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    for text in texts:
        assert text in done.stderr, done.stderr


def test_a_bad_recipe_is_reported_once_before_any_process_starts(cli, recipe_file, tiny, tmp_path):
    done = cli("train", recipe_file, *tiny, "--nproc", "3", "model.heads=5", "trainig.steps=1")
    assert_refused(done, "model.heads", "trainig")
    assert done.stderr.count("model.heads") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("environment", [{"RANK": "0", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "1"}])
def test_a_process_of_a_run_cannot_launch_another_run(cli, recipe_file, tiny, environment):
    done = cli("train", recipe_file, *tiny, "--nproc", "2", env={**os.environ, **environment})
    named = ", ".join(f"{name}={value}" for name, value in environment.items())
    assert_refused(done, "--nproc 2", named, "Under torchrun leave --nproc out; otherwise unset RANK and WORLD_SIZE")


def test_zero_processes_are_refused(cli, recipe_file, tiny):
    assert_refused(cli("train", recipe_file, *tiny, "--nproc", "0"), "--nproc")


def test_the_supervisor_of_a_single_process_imports_neither_torch_nor_numpy(recipe_file, tiny):
    program = (
        "import os, sys\n"
        "from hlat.cli import app, train\n"
        "train._work = lambda job, line: os.getsid(0) != os.getpid()\n"
        "try:\n  app()\nfinally:\n  print({'torch', 'numpy'} & {*sys.modules})\n"
    )
    arguments = ["train", str(recipe_file), *tiny]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_the_entry_point_imports_nothing_before_it_handles_ctrl_c():
    """Ctrl-C during imports before ``main`` would print a traceback; python -m hlat imports the package first, too."""
    script = (
        "import os, signal, sys, types; before = set(sys.modules)\n"
        "import hlat.command; print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "['hlat', 'hlat.command']\n"
