"""The command line is public: this list changes only together with the changelog."""

import os
import subprocess
import sys

import pytest
import typer

from hlat.cli import app
from hlat.cli.options import RENAMED, current_options

SURFACE = {
    "check": {"recipe", "overrides", "--world", "--nproc", "--on", "--no-files", "--json", "--verbose"},
    "schema": set(),
    "recipe presets": set(),
    "recipe from-nxdt": {"source", "overrides", "--to", "--model"},
    "data prepare": {"recipe", "overrides", "--workers", "--part", "--stage"},
    "data merge": {"recipe", "words", "--stage"},
    "data tokenizer": {"recipe", "overrides", "--to"},
    "data show": {"source", "overrides", "--samples", "--max-tokens", "--json", "--verbose", "--stage"},
    "data verify": {"source", "overrides", "--stage"},
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
    "show": {"run", "--json", "--verbose"},
    "compare": {"runs", "--json", "--verbose"},
    "compile": {"recipe", "overrides", "--nproc", "--device", "--to", "--unpack"},
    "report": {"runs", "--to", "--serve", "--port", "--markdown", "--cluster", "--price", "--hardware"},
    "runs": {"folder", "--json"},
    "rehearse": {
        *("recipe", "overrides", "--world", "--rank", "--json"),
        *("--device", "--cluster", "--hardware", "--trace", "--stage"),
    },
    "plan": {
        "--model",
        "--cluster",
        *("--per", "--chips", "--grid", "--deadline", "--budget", "--interruptions", "--prices-of", "--quotes"),
        *("--storage", "--pue", "--network", "--search", "--flops", "--inference-tokens", "--ladder"),
        "--tokens",
        "--sequence-length",
        "--global-batch",
        "--precision",
        "--price",
        "--rank-by",
        "--layout",
        "--against",
        "--explain",
        "--json",
        "--to",
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
        *("--to", "--set", "--srun", "--setup", "--dry-run", "--doctor", "--anyway"),
    },
    "launch kubernetes": {
        *(
            "recipe",
            "overrides",
            "--nodes",
            "--nproc",
            "--instance",
            "--hardware",
            "--env",
            "--name",
            "--grace",
            "--anyway",
            "--set",
            "--label",
            "--toleration",
        ),
        *("--program", "--image", "--kind", "--namespace", "--volume", "--resource", "--node-selector", "--dry-run"),
        "--no-probes",
    },
    "launch local": {
        *("recipe", "overrides", "--nodes", "--hosts", "--nproc", "--ssh", "--program", "--dry-run"),
    },
    "launch status": {"run"},
    "launch logs": {"run", "--lines"},
    "launch cancel": {"run"},
    "evaluate": {
        *("checkpoint", "--allow-code-execution", "--batch-rows", "--batch-tokens", "--data", "--dtype", "--files"),
        *("--include", "--limit", "--max-length", "--max-tokens", "--nproc", "--once", "--to", "--render"),
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
    "fork": {"run", "overrides", "--to"},
    "quickstart": {"--to", "--steps", "--verbose"},
    "init": {"texts", "--to", "--time", "--from", "--model", "--text-column", "--name", "--device"},
    "ladder": {
        *("recipe", "overrides", "--budget", "--flops", "--sizes", "--tokens", "--to", "--nproc", "--only", "--list"),
        *("--json", "--slurm", "--at-once", "--set", "--dry-run", "--coordinates"),
    },
    "sweep": {
        *("recipe", "axes", "--to", "--nproc", "--only", "--list", "--json"),
        *("--slurm", "--at-once", "--set", "--dry-run"),
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


MEANINGS = {
    "--address": "address of this host, on which it listens",
    "--at-once": "most elements of a job array that run together",
    "--budget": "most that may be spent: money, or time",
    "--cluster": "machines: their kind and number",
    "--device": "device type of the run",
    "--dtype": "dtype of weights",
    "--flops": "FLOPs of training",
    "--hosts": "hosts to start on, by name",
    "--instance": "kind of a machine in the catalog",
    "--list": "show runs and start none",
    "--model": "preset, config.json or recipe of a model",
    "--name": "name of what the verb makes, or reports on",
    "--nodes": "number of hosts",
    "--nproc": "processes on a machine",
    "--only": "number of one part of the work, from 0",
    "--set": "any other setting of a job",
    "--seed": "seed of what is drawn at random",
    "--slurm": "submit a job array",
    "--ssh": "command that reaches a host",
    "--max-tokens": "most tokens of a text",
    "--time": "how long a run or job may take",
    "--tokens": "tokens to train on",
    "--to": "file or folder to write",
    "--trace": "Chrome trace to write",
    "--verbose": "print more",
}
"""Names that several verbs explain each in its own words. All others are one object in hlat.cli, with the same help."""


def options_by_name():
    found = {}
    for path, _, command in _commands(typer.main.get_command(app)):
        for parameter in command.params:
            if parameter.param_type_name == "option":
                found.setdefault(next(o for o in parameter.opts if o.startswith("--")), {})[path] = parameter
    return found


def test_a_name_means_the_same_in_every_verb():
    differing = {
        name
        for name, verbs in options_by_name().items()
        if len({(each.help, each.metavar) for each in verbs.values()}) > 1
    }
    assert differing == MEANINGS.keys()


def test_a_thing_has_one_name():
    names = {}
    for name, verbs in options_by_name().items():
        for each in verbs.values():
            names.setdefault(each.help, set()).add(name)
    assert {text: found for text, found in names.items() if len(found) > 1} == {}
    # What was renamed in one verb has not the old name in another, unless it means something else there.
    old = {name for table in RENAMED.values() for name in table}
    assert old & options_by_name().keys() == {"--from", "--tokens"}, "a model to begin with; the tokens of a run"


@pytest.mark.parametrize("verb", RENAMED)
def test_an_old_name_is_accepted_with_one_line_of_notice(verb):
    for old, new in RENAMED[verb].items():
        assert old not in SURFACE[verb] and new in SURFACE[verb]
        words, notices = current_options(typer.main.get_command(app), [*verb.split(), "x", old, "2", "--nodes=4"])
        assert len(notices) == 1 and notices[0].startswith(f"{old} is now {new}")
        expected = ["x", "--nodes=2:4"] if old == "--least" else ["x", new, "2", "--nodes=4"]
        assert words == [*verb.split(), *expected]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rehearse r --world-size=8", "rehearse r --world=8"),
        ("launch local r --nodes 4 --least 2", "launch local r --nodes=2:4"),
        ("launch local r --least 1 --hosts a,b", "launch local r --hosts a,b --nodes=1:2"),
        ("launch slurm r --sbatch --output=x --output y", "launch slurm r --sbatch --output=x --to y"),
        ("init x --from m --hours 2h", "init x --from m --time 2h"),
        ("--log-json compile r --from a", "--log-json compile r --unpack a"),
        ("compile -- r --from a", "compile -- r --from a"),
        ("train r --out x", "train r --out x"),
    ],
)
def test_only_names_of_options_are_renamed(words, expected):
    assert current_options(typer.main.get_command(app), words.split())[0] == expected.split()


def test_the_notice_is_on_standard_error_and_a_json_line_where_asked():
    words = [sys.executable, "-m", "hlat", "--log-json", "rehearse", "none.yaml", "--world-size", "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "" and '"--world-size is now --world"' in done.stderr


def test_the_ten_usual_options_are_the_first_page_of_help_for_a_plan(cli):
    """One of the 24 lines is the command."""
    shown = cli("plan", "--help", env=os.environ | {"COLUMNS": "80", "TERM": "dumb"}).stdout.splitlines()
    first = shown[: next(number for number, line in enumerate(shown, 1) if line.startswith("╰"))]
    assert len(first) <= 23
    listed = [line.split()[1].removeprefix("--") for line in first if line.startswith("│ --")]
    assert listed == [
        *("model", "cluster", "chips", "deadline", "budget", "tokens", "price", "explain", "to"),
        "json",
        "help",
    ]


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_streams_that_are_closed_change_no_exit_code(closed):
    """As a daemon or a job of cron may start it."""
    number = {"stdout": 1, "stderr": 2}[closed]
    command = f"exec {sys.executable} -m hlat check nosuch.yaml {number}>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
