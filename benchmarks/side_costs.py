"""Processor time of what runs beside the training step: heartbeats, supervisor, saver, metrics.

    hlat's training loop with heartbeats and a save every other step --> processor time of each thread, of the saver
    hlat train                                                        --> processor time of its supervisor

The model has 33.6 M parameters. Costs are measured one by one, as processor time of their own thread or process, since
a difference between two runs of this size is smaller than the noise of a busy machine. The share is that of a step's
processor time with one thread, for what a step costs; for what runs by the clock, the share of all cores; for a save,
the share at the default interval between saves.

    python benchmarks/side_costs.py [--steps 8]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from results import Recorder
from step_parts import LENGTH, ROWS, SHAPE, corpus

CHANGES = 20_000  # phases, to time one


def recipe_in(folder, name, steps):
    """Recipe of a run that saves after every other step."""
    return {
        "run": {"dir": f"{folder}/{name}", "compile": "none"},
        "model": SHAPE,
        "data": {"path": str(corpus(folder)), "prepared_dir": f"{folder}/data", "tokenizer": {"train": "char"}}
        | {"sequence_length": LENGTH, "validation": {"fraction": 0}},
        "batch": {"global_batch": ROWS, "micro_batch": ROWS},
        "training": {"steps": steps},
        "checkpoint": {"every_steps": 2, "keep_last": 1},
        "tracking": {"tensorboard": True, "console": "plain"},
    }


def thread_seconds():
    """Processor seconds so far of each thread of this process that Python has started, by name."""
    tasks = Path("/proc/self/task")
    files = {thread.name: tasks / str(thread.native_id) / "schedstat" for thread in threading.enumerate()}
    return {name: int(file.read_text(encoding="ascii").split()[0]) / 1e9 for name, file in files.items()}


class Watch:
    """Observer of phases: seconds of phases and of threads from the third step on."""

    def __init__(self):
        self.step, self.phase, self.phases, self.changes = 0, "start", {}, 0
        self.began, self.first, self.last = time.process_time(), None, None

    def __call__(self, phase):
        now = time.process_time()
        if self.step > 2:
            self.phases[self.phase] = self.phases.get(self.phase, 0.0) + now - self.began
            self.changes += 1
        if phase == "data":
            self.step += 1
            self.last = (time.perf_counter(), thread_seconds())
            self.first = self.last if self.step == 3 else self.first
        self.phase, self.began = phase, now


def change_seconds():
    """Processor seconds of the heartbeat for one change of phase."""
    from hlat.runtime.progress import enter_phase

    began = time.thread_time()
    for _ in range(CHANGES // 2):
        enter_phase("forward")
        enter_phase("backward")
    return (time.thread_time() - began) / CHANGES


def in_process(folder, steps):
    """Train in this process; return seconds of parts."""
    import torch

    from hlat.config.load import parse_recipe
    from hlat.resilience import running_heartbeat
    from hlat.runtime.progress import observe_phases
    from hlat.training import run

    torch.set_num_threads(1)  # threads that wait for others would count as well
    recipe, watch = parse_recipe(recipe_in(folder, "run", steps)), Watch()
    without = change_seconds()
    beats = Path(folder) / "beats"
    beats.mkdir()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    with running_heartbeat(0, beats), Path(os.devnull).open("w", encoding="utf-8") as quiet:
        change = change_seconds() - without
        with observe_phases(watch):
            run(recipe, stream=quiet)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    counted, saves = watch.step - 2, steps // 2
    (began, before), (stopped, after) = watch.first, watch.last
    clock = stopped - began
    computing = sum(watch.phases.get(name, 0.0) for name in ("data", "forward", "backward", "reduce", "optimizer"))
    return {
        "step": computing / counted,
        "changes of phase in a step": watch.changes / counted * change,
        "metrics and components in a step": watch.phases.get("between", 0.0) / counted,
        "sampling thread of the heartbeat, a second": (after["heartbeat"] - before["heartbeat"]) / clock,
        "copy for the saver, a save": watch.phases.get("checkpoint", 0.0) / counted * 2,
        "saver process, a save": sum(getattr(ended, n) - getattr(children, n) for n in ("ru_utime", "ru_stime"))
        / saves,
    }


def supervisor_share(folder, steps):
    """Processor seconds of the supervisor of ``hlat train`` in a second of the clock, after the first step."""
    file = Path(folder) / "supervised.yaml"
    file.write_text(json.dumps(recipe_in(folder, "supervised", steps)), encoding="utf-8")
    command = [sys.executable, "-m", "hlat", "train", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    readings = []
    while process.poll() is None:
        time.sleep(0.2)
        if (Path(folder) / "supervised" / "metrics.jsonl").exists():
            fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            readings += [(time.perf_counter(), spent)] if fields[0] != "Z" else []
    (began, before), (ended, after) = readings[0], readings[-1]
    return (after - before) / (ended - began)


def main():
    """Print and record the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    from hlat.config.sections.operation import CheckpointConfig

    interval, cores = CheckpointConfig().every_steps, len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        costs = in_process(folder, options.steps)
        costs["supervisor, a second"] = supervisor_share(folder, options.steps)
    record, step, total = Recorder(__file__, "speed.md"), costs.pop("step"), 0.0
    print(f"a step: {step:.3f} s of processor time\n\n| | ms of processor time | share |\n|---|---:|---:|")
    for name, seconds in costs.items():
        per = cores if name.endswith("second") else step * (interval if name.endswith("save") else 1)
        total += seconds / per
        print(f"| {name} | {1e3 * seconds:.3f} | {seconds / per:.3%} |")
        note = f"{seconds / per:.3%} of a run; a step takes {step:.2f} s of processor time"
        record.add(f"cost beside training, 33.6 M parameters: {name}", "ms of processor time", 1e3 * seconds, note=note)
    print(f"| together | | {total:.2%} |")
    record.add(
        "cost beside training: heartbeats, supervisor, saver, metrics, together", "%", 1e2 * total, note="goal: 1 %"
    )
    record.write("side_costs")


if __name__ == "__main__":
    main()
