"""Run hlat with each of several releases of Python and PyTorch: commands that users give first, on this CPU.

    python benchmarks/version_matrix.py --python venv/bin/python [--python ...] [--only check,zero3] [--limit S]

Each Python is one of an environment in which hlat is installed. Commands run one after another in a folder of their
own, with a model of a million parameters and a text that this script writes. A layout passes if its first loss is that
of one process to 1e-4: it sums in another order. A resumed run passes if its losses are those of the uninterrupted one,
digit by digit. The record has the number of commands that passed for each environment; the table is printed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import Recorder

RECIPE = {
    "run": {"device": "cpu", "name": "matrix"},
    "model": {"preset": "tiny-1m"},
    "data": {"path": "text.txt", "sequence_length": 64, "validation": {"by": "tail"}},
    "batch": {"global_batch": 8, "micro_batch": 2},
    "precision": {"mode": "fp32"},
    "training": {"steps": 4},
    "checkpoint": {"every_steps": 2},
}
KILLED = "faults=[{kind: kill, at_step: 4}]"
COMMANDS = {
    # name: arguments of hlat; those of train name the folder of the run
    "check": ["check", "recipe.yaml"],
    "quickstart": ["quickstart", "--steps", "4", "--to", "quickstart"],
    "one process": ["train", "recipe.yaml", "run.compile=none"],
    "compiled": ["train", "recipe.yaml", "run.compile=blocks"],
    "zero3": ["train", "recipe.yaml", "--nproc", "2", "parallel.zero=3"],
    "tensor": ["train", "recipe.yaml", "--nproc", "2", "parallel.tensor=2"],
    "pipeline": ["train", "recipe.yaml", "--nproc", "2", "parallel.pipeline=2"],
    "context": ["train", "recipe.yaml", "--nproc", "2", "parallel.context=2"],
    "resume": ["train", "recipe.yaml", "run.compile=none", "--allow-faults", KILLED],
}
FACTS = "import platform, torch; print(platform.python_version(), torch.__version__)"


def losses(run: Path) -> list[float]:
    """Losses of a run by step; of a step that was done twice the last one."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return list({line["step"]: line["loss"] for line in lines if "loss" in line}.values())


def judge(name: str, work: Path) -> str:
    """Return what is wrong with the losses of a run that ended well; empty if nothing is."""
    if not (work / name).is_dir() or not (work / "one process").is_dir():
        return ""
    expected, found = losses(work / "one process"), losses(work / name)
    if name == "resume" and found != expected:
        return f"resumed losses {found}, uninterrupted {expected}"
    return "" if abs(found[0] - expected[0]) < 1e-4 else f"first loss {found[0]}, of one process {expected[0]}"


def run(python: str, name: str, work: Path, limit: float) -> str:
    """Run a command; return "" if it passed, else what went wrong."""
    command = [python, "-m", "hlat", *COMMANDS[name]]
    command += [f"run.dir={work / name}"] if command[3] == "train" else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    try:
        done = subprocess.run(
            command, check=False, cwd=work, capture_output=True, text=True, timeout=limit, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"more than {limit:.0f} s"
    if done.returncode != 0:
        return f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}"
    return judge(name, work)


def examine(python: str, names: list[str], limit: float) -> tuple[str, dict[str, str]]:
    """Run commands with one Python; return its versions, and what went wrong by command."""
    facts = subprocess.run([python, "-c", FACTS], capture_output=True, text=True, check=True).stdout.split()
    title = f"Python {facts[0]}, torch {facts[1]}"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "recipe.yaml").write_text(json.dumps(RECIPE))  # JSON is YAML
        (work / "text.txt").write_text("".join(f"line {n} of the text says {n * n % 97}.\n" for n in range(4000)))
        for name in names:
            begin = time.monotonic()
            found[name] = run(python, name, work, limit)
            print(f"{title}: {name}: {found[name] or 'passed'} ({time.monotonic() - begin:.0f} s)", file=sys.stderr)
    return title, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", required=True, help="interpreter of an environment with hlat")
    parser.add_argument("--only", default=",".join(COMMANDS), help="names of commands")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for a command")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    record = Recorder(__file__, "install.md")
    print(f"| versions | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for python in arguments.python:
        title, found = examine(python, names, arguments.limit)
        failed = [name for name in names if found[name]]
        print(f"| {title} | {' | '.join('failed' if name in failed else 'passed' for name in names)} |")
        note = f"of {len(names)}: {', '.join(names)}" + (f"; failed: {', '.join(failed)}" if failed else "")
        record.add(f"commands that passed with {title}", "1", len(names) - len(failed), note=note)
        record.write()  # after each, since one takes minutes


if __name__ == "__main__":
    main()
