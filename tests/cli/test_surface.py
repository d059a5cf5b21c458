"""The command line is public: this list changes only together with the changelog."""

import subprocess
import sys

import pytest
import typer

from hlat.cli import app

SURFACE = {
    "check": {"recipe", "overrides", "--world", "--nproc", "--no-files", "--json"},
    "schema": set(),
    "recipe from-nxdt": {"source", "overrides", "--to", "--model"},
    "data prepare": {"recipe", "overrides", "--workers", "--part"},
    "data merge": {"recipe", "words"},
    "data tokenizer": {"recipe", "overrides", "--to"},
    "data show": {"source", "overrides", "--samples", "--tokens", "--json"},
    "data verify": {"source", "overrides"},
    "checkpoint list": {"run", "--json"},
    "checkpoint show": {"checkpoint", "--json"},
    "checkpoint verify": {"checkpoint"},
    "checkpoint prune": {"run", "--keep-last", "--keep-every", "--dry-run"},
    "train": {
        "recipe",
        "overrides",
        "--quiet",
        "--nproc",
        "--profile",
        "--allow-faults",
        "--no-supervisor",
        "--require-step",
        *("--nodes", "--node", "--address"),
        "--verbose",
    },
    "show": {"run", "--json"},
    "compare": {"runs", "--json"},
    "compile": {"recipe", "overrides", "--nproc", "--device", "--out", "--from"},
    "report": {"runs", "--to", "--serve", "--port", "--cluster", "--price", "--hardware"},
    "runs": {"folder", "--json"},
    "rehearse": {
        *("recipe", "overrides", "--world-size", "--rank", "--json"),
        *("--device", "--cluster", "--hardware", "--trace"),
    },
    "plan": {
        "--model",
        "--cluster",
        *("--per", "--chips", "--grid", "--deadline", "--budget", "--interruptions", "--prices-of", "--quotes"),
        *("--storage", "--pue", "--network", "--search", "--flops", "--inference-tokens"),
        "--tokens",
        "--seq",
        "--global-batch",
        "--precision",
        "--price",
        "--rank-by",
        "--layout",
        "--against",
        "--explain",
        "--json",
        "--html",
        "--trace",
        "--fragment",
        "--hardware",
    },
    "hardware list": {"--hardware"},
    "hardware show": {"name", "--hardware"},
    "hardware quotes": {"--hardware"},
    "hardware measure": {"--to", "--name"},
    "doctor": {
        *("recipe", "overrides", "--hosts", "--ssh", "--nodes", "--node", "--name", "--nproc", "--address", "--port"),
        *("--run-dir", "--instance", "--hardware", "--wait", "--exclude-bad", "--json", "--verbose"),
    },
    "launch slurm": {
        *("recipe", "overrides", "--nodes", "--nproc", "--instance", "--hardware", "--env", "--name", "--grace"),
        *("--program", "--time", "--chain", "--partition", "--account", "--qos", "--exclude", "--cpus-per-task"),
        *("--output", "--set", "--srun", "--setup", "--dry-run"),
        *("--least", "--doctor"),
    },
    "launch kubernetes": {
        *(
            "recipe",
            "overrides",
            "--nodes",
            "--nproc",
            "--instance",
            "--least",
            "--hardware",
            "--env",
            "--set",
            "--label",
            "--toleration",
            "--name",
            "--grace",
        ),
        *("--program", "--image", "--kind", "--namespace", "--volume", "--resource", "--node-selector", "--dry-run"),
        "--no-probes",
    },
    "launch local": {
        *("recipe", "overrides", "--nodes", "--hosts", "--least", "--nproc", "--ssh", "--program", "--dry-run"),
    },
    "launch status": {"run"},
    "launch logs": {"run", "--lines"},
    "launch cancel": {"run"},
    "evaluate": {
        *("checkpoint", "--allow-code-execution", "--batch-rows", "--batch-tokens", "--data", "--dtype", "--files"),
        *("--include", "--limit", "--max-length", "--max-new-tokens", "--nproc", "--once", "--out", "--render"),
        *("--requests", "--seed", "--shots", "--suite", "--tasks", "--tensor", "--watch", "--weights"),
        *("--json", "--quiet"),
    },
    "generate": {
        "checkpoint",
        "--prompt",
        "--max-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
        "--seed",
        "--weights",
    },
    "average": {"checkpoints", "--to", "--last", "--coefficients", "--decay", "--weights"},
    "import": {"source", "--to", "--model", "--tokenizer"},
    "export": {"checkpoint", "--to", "--dtype", "--weights"},
    "quickstart": {"--to", "--steps", "--verbose"},
    "init": {"texts", "--to", "--hours", "--from", "--model", "--column", "--name", "--device"},
    "sweep": {
        *("recipe", "axes", "--to", "--nproc", "--only", "--list", "--json"),
        *("--slurm", "--at-once", "--sbatch", "--dry-run"),
    },
}


def _commands(command, path=()):
    if hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from _commands(child, (*path, name))
    else:
        names = {next((o for o in p.opts if o.startswith("--")), p.name) for p in command.params if p.name != "help"}
        yield " ".join(path), names, command


def test_verbs_and_options_are_the_published_ones():
    assert {path: names for path, names, _ in _commands(typer.main.get_command(app))} == SURFACE


def test_every_verb_and_option_says_what_it_does():
    for path, _, command in _commands(typer.main.get_command(app)):
        assert command.help, path
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                assert parameter.help, f"{path} {parameter.name}"


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_streams_that_are_closed_change_no_exit_code(closed):
    """As a daemon or a job of cron may start it."""
    number = {"stdout": 1, "stderr": 2}[closed]
    command = f"exec {sys.executable} -m hlat check nosuch.yaml {number}>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
