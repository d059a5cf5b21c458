"""Goodput of a run that is killed at random instants, compared with Daly's formula for the same numbers.

    undisturbed run -> seconds of a step, seconds for which a save stalls it, seconds until a save is durable
    runs that lose a random rank every --mtbf seconds on average, saving at 1/4, 1 and 4 times the best interval
        -> share of time spent on steps that counted, as the supervisor accounts for it; the formula's

    python benchmarks/goodput.py --minutes 8 --mtbf 60 --nproc 2

The best interval is that of the formula for the undisturbed run. The time between kills is drawn from an exponential
distribution.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from hlat.resilience import best_interval, expected_goodput
from results import Recorder

MODEL = [
    "model.hidden_size=256",
    "model.intermediate_size=704",
    "model.layers=6",
    "model.heads=8",
    "model.kv_heads=4",
    "data.sequence_length=128",
    "batch.global_batch=16",
    "batch.micro_batch=8",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--mtbf", type=float, default=60.0)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--factors", type=float, nargs="+", default=[0.25, 1.0, 4.0], help="of the best interval")
    parser.add_argument("--corpus", default=str(Path(json.__file__).parents[1]), help="text; the standard library")
    options, record = parser.parse_args(), Recorder(__file__, "recovery.md")
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        calm = disturbed(options, "calm", 20, minutes=min(1.5, options.minutes), mtbf=None)
        print(
            f"undisturbed: {calm['step']:.3f} s a step, {calm['stall']:.3f} s stall of a save, "
            f"durable {calm['delay']:.2f} s later, {calm['mib']:.0f} MiB"
        )
        best = best_interval(calm["stall"], options.mtbf)
        print(f"best interval: {best:.1f} s, {best / calm['step']:.0f} steps\n")
        print("| saves every | kills | life | back after | goodput | formula | lost | saving | recovering | waiting |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for factor in options.factors:
            steps = max(1, round(best * factor / calm["step"]))
            row(record, disturbed(options, f"every-{steps}", steps, options.minutes, options.mtbf), steps, calm)
    record.write()


def row(record, found, steps, calm):
    """Print one row of the table, and record it."""
    life, interval = found["wall"] / max(1, found["kills"]), steps * calm["step"]
    back = found["back"]
    formula = expected_goodput(interval, calm["stall"], life, back, calm["delay"])
    shares = {name: seconds / found["wall"] for name, seconds in found["parts"].items()}
    others = " | ".join(f"{shares[name]:.1%}" for name in ("lost", "saving", "recovering", "waiting"))
    print(
        f"| {steps} steps, {interval:.1f} s | {found['kills']} | {life:.0f} s | {back:.1f} s | "
        f"{shares['productive']:.1%} | {formula:.1%} | {others} |",
        flush=True,
    )
    claim = f"goodput with a save every {steps} steps ({interval:.1f} s) and a kill every {life:.0f} s"
    good, note = 100 * shares["productive"], f"{found['kills']} kills, a restart takes {back:.1f} s"
    record.add(claim, "%", good, peer="Daly's formula", peer_values=100 * formula, note=note)


def disturbed(options, name, every, minutes, mtbf):
    """Run hlat train, kill a random rank now and then, stop it with SIGTERM at the end."""
    run = options.folder / name
    command = [
        sys.executable, "-m", "hlat", "train", str(Path(__file__).parents[1] / "recipes" / "quickstart.yaml"), *MODEL,
        f"data.path={options.corpus}/*.py", f"data.prepared_dir={options.folder / 'data'}", f"run.dir={run}",
        "training.steps=1000000", "training.log_every=10", f"checkpoint.every_steps={every}", "checkpoint.keep_last=2",
        "evaluation.every_steps=null", "tracking.console=none", "tracking.tensorboard=false", "recovery.restarts=1000",
        *(["--nproc", str(options.nproc)] if options.nproc > 1 else []),
    ]  # fmt: skip
    rng, kills = random.Random(1), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (run / "events.jsonl").exists():  # the text is prepared first
            assert process.poll() is None, "the run does not start"
            time.sleep(0.1)
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            if mtbf is None:
                time.sleep(1)
                continue
            time.sleep(min(rng.expovariate(1 / mtbf), max(0.0, end - time.monotonic())))
            ranks = psutil.Process(process.pid).children()
            if ranks and time.monotonic() < end:
                rng.choice(ranks).kill()
                kills += 1
        process.send_signal(signal.SIGTERM)
        process.wait()
    return measured(run, kills)


def measured(run, kills):
    """Seconds and sizes from the events and metrics of a run."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    parts = [event["seconds"] for event in events if event["event"] == "goodput"][-1]
    saves = [event for event in events if event["event"] == "checkpoint"][1:]  # the first makes its buffers
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    step = sum(sum(line["seconds"].get(p, 0.0) for p in TRAINING) for line in lines) / (10 * max(1, len(lines)))
    newest = sorted((run / "checkpoints").iterdir())[-1]
    restarts = max(1, sum(event["event"] == "restart" for event in events))
    return {
        "step": step,
        "stall": sum(event["stall_seconds"] for event in saves) / max(1, len(saves)),
        "delay": sum(event["seconds"] for event in saves) / max(1, len(saves)),
        "mib": sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) / 2**20,
        "back": (parts["recovering"] + parts["waiting"]) / restarts,
        "parts": parts,
        "wall": sum(parts.values()),
        "kills": kills,
    }


TRAINING = ("data", "forward", "backward", "reduce", "optimizer", "device")


if __name__ == "__main__":
    main()
