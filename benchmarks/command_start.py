"""Seconds of ``hlat --help``, ``hlat check`` and ``hlat train`` to its first step, beside another checkout of hlat.

    python benchmarks/command_start.py --before CHECKOUT [--rounds N]

Both checkouts run alternately, in the same environment. The run is warm: its text is prepared, and files are in memory.
It is the 34 M model of benchmarks/generation.py with 4 sequences of 512 tokens, mixed precision where the CPU has bf16.
"""

import argparse
import json
import os
import random
import shutil
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


def run_command(checkout: Path, *arguments: str) -> float:
    """Seconds until the command ends; of ``train`` until its first line about a step."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "hlat", *arguments]
    begin = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        spent = None
        for line in process.stdout:
            if spent is None and line.startswith("step 1/"):
                spent = time.perf_counter() - begin
        code = process.wait()
    if code:
        raise SystemExit(f"{' '.join(command)}: exit code {code}")
    return time.perf_counter() - begin if spent is None else spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout of hlat to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    record = Recorder(__file__, "speed.md")
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
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
            now, before = seconds[name, "now"], seconds[name, "before"]
            print(f"{name}: {sorted(now)[len(now) // 2]:.2f} s, before {sorted(before)[len(before) // 2]:.2f} s")
            record.add(f"{name}, warm", "s", now, peer="before", peer_values=before, note=f"goal: {goal} s")
    record.write()


if __name__ == "__main__":
    main()
