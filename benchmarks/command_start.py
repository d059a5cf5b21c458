"""Seconds of ``hlat --help``, ``hlat check`` and ``hlat train`` to its first step, beside another checkout of hlat.

    python benchmarks/command_start.py --before CHECKOUT [--rounds N]

Both checkouts run alternately, in the same environment. The run is warm: its text is prepared, and files are in memory.
It is the 34 M model of benchmarks/generation.py with 4 sequences of 512 tokens, mixed precision where the CPU has bf16.
Processor time, which other programs disturb less than the clock, is that of the command and the processes it started.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from results import ROOT, Recorder

MODEL = {"vocab_size": 8192, "hidden_size": 512, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate_size": 1536}


def write_recipe(folder: Path) -> Path:
    """A recipe and its text: random words."""
    chosen = random.Random(0)
    words = ["".join(chosen.choices(string.ascii_lowercase, k=chosen.randint(2, 9))) for _ in range(5000)]
    text = folder / "corpus.txt"
    text.write_text("\n\n".join(" ".join(chosen.choices(words, k=400)) for _ in range(800)), encoding="utf-8")
    recipe = {
        "run": {"name": "start", "dir": str(folder / "run")},
        "model": MODEL,
        "data": {
            "path": str(text),
            "sequence_length": 512,
            "tokenizer": {"train": "bpe"},
            "validation": {"fraction": 0.1, "by": "tail"},
        },
        "batch": {"global_batch": 4, "micro_batch": 4},
        "optimizer": {"lr": 1e-3},
        "training": {"steps": 100, "stop_after": 1, "log_every": 1},
    }
    file = folder / "start.yaml"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    return file


def processor_seconds(root: int) -> float:
    """Processor time so far of a process and all that it has started."""
    parents, spent = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)] = int(fields[1])
        spent[int(folder.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with children that ended
    members = [root]
    for member in members:
        members += [pid for pid, parent in parents.items() if parent == member]
    return sum(spent.get(member, 0.0) for member in members)


def run_command(checkout: Path, *arguments: str) -> tuple[float, float]:
    """Seconds by the clock and of processors until the command ends; of ``train`` until its first line about a step."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "hlat", *arguments]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        spent = None
        for line in process.stdout:
            if spent is None and line.startswith("step 1/"):
                spent = time.perf_counter() - begin, processor_seconds(process.pid)
        code = process.wait()
    if code:
        raise SystemExit(f"{' '.join(command)}: exit code {code}")
    if spent is not None:
        return spent
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - begin, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout of hlat to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    record = Recorder(__file__, "speed.md")
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        recipe = write_recipe(Path(temporary))
        goals = {"hlat --help": 0.3, "hlat check": 1.0, "hlat train, first step": 5.0}
        commands = {"hlat --help": ["--help"], "hlat check": ["check", str(recipe)]}
        commands["hlat train, first step"] = ["train", str(recipe)]
        for number in range(options.rounds + 1):
            for side, checkout in (("now", ROOT), ("before", options.before.resolve())):
                for name, arguments in commands.items():
                    for entry in (Path(temporary) / "run").glob("*"):
                        if entry.name != "data":
                            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                    spent = run_command(checkout, *arguments)
                    if number:  # the first round prepares the text
                        seconds[name, side].append(spent)
        for name, goal in goals.items():
            for place, kind, note in ((0, "by the clock", f"goal: {goal} s"), (1, "processor time", None)):
                now, before = ([each[place] for each in seconds[name, side]] for side in ("now", "before"))
                print(f"{name}, {kind}: {statistics.median(now):.2f} s, before {statistics.median(before):.2f} s")
                claim = f"{name}, warm, {kind}"
                record.add(claim, "s", now, peer="before", peer_values=before, note=note)
    record.write()


if __name__ == "__main__":
    main()
