"""``hlat train --nproc``: what is refused before any process is started."""

import os
import subprocess
import sys

import pytest


def refused(done, *says):
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    for words in says:
        assert words in done.stderr, done.stderr


def test_a_recipe_is_refused_once_and_before_any_process_starts(cli, recipe_file, tiny, tmp_path):
    done = cli("train", recipe_file, *tiny, "--nproc", "3", "model.heads=5", "trainig.steps=1")
    refused(done, "model.heads", "trainig")
    assert done.stderr.count("model.heads") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("environment", [{"RANK": "0", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "1"}])
def test_a_process_of_a_run_starts_no_run_of_its_own(cli, recipe_file, tiny, environment):
    done = cli("train", recipe_file, *tiny, "--nproc", "2", env={**os.environ, **environment})
    named = ", ".join(f"{name}={value}" for name, value in environment.items())
    refused(done, "--nproc 2", named, "Under torchrun leave --nproc out; otherwise unset RANK and WORLD_SIZE")


def test_no_processes_are_no_run(cli, recipe_file, tiny):
    refused(cli("train", recipe_file, *tiny, "--nproc", "0"), "--nproc")


def test_the_supervisor_of_one_process_brings_no_torch_along(recipe_file, tiny):
    program = (
        "import os, sys\n"
        "from hlat.cli import app, train\n"
        "train._Given.work = lambda given: os.getsid(0) != os.getpid()\n"
        "try:\n  app()\nfinally:\n  print('torch' in sys.modules)\n"
    )
    arguments = ["train", str(recipe_file), *tiny]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_nothing_stands_between_python_and_listening_to_ctrl_c():
    """What is imported before ``main`` is interrupted with a traceback; python -m hlat imports hlat first, too."""
    script = (
        "import os, signal, sys, types; before = set(sys.modules)\n"
        "import hlat.command; print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "['hlat', 'hlat.command']\n"
