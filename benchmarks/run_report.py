"""Report of a run of many logged steps: time, size, memory, and the height of a spike of one step in its chart.

lines as `hlat train` writes them -> hlat report, a process of its own -> seconds, bytes, peak memory, spike

python benchmarks/run_report.py [STEPS]        200,000 by default; goals: 20 s, 8 MB, the spike is visible
"""

import json
import math
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import Recorder

STEPS = 200_000
SPIKE = 9.75  # nats, where its neighbours have about 3


def write_run(folder: Path, steps: int) -> None:
    """Write a run with every column that training logs, further validation sets and a task."""
    phases = ("between", "data", "forward", "backward", "reduce", "device", "optimizer", "checkpoint")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            wave = math.sin(step * 0.7) * 0.05
            loss = SPIKE if step == steps * 5 // 8 + 1 else 2 + 6 / math.sqrt(step) + wave
            line = {"step": step, "tokens": step << 22, "samples": step << 10, "batch_crc32": step * 7919}
            line |= {"loss": loss, "grad_norm": 0.3 + abs(wave), "param_norm": 57.67469024658203 + step * 1e-5}
            line |= {"lr": 3e-4 * (1 - step / steps), "tokens_per_second": 3.3e6 * (1 + wave), "mfu": 0.4 + wave}
            line |= {"mfu_full": 0.45 + wave, "memory_bytes": 68_000_000_000}
            line |= {"seconds": {name: 0.1 + abs(wave) / 7 for name in phases}}
            if step % 1000 == 0:
                line |= {"val_loss": loss + 0.1, "val_bits_per_byte": 0.9, "val/books/loss": loss + 0.2}
                line |= {"task/arc/accuracy": 0.25 + step / steps / 2}
            file.write(json.dumps(line) + "\n")
    begun = {"time": "2026-01-01T00:00:00.000+00:00", "event": "start", "step": 0, "parameters": 7_000_000_000}
    (folder / "events.jsonl").write_text(json.dumps(begun) + "\n")


def main() -> None:
    """Write the run, make its report, print and record the numbers."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    record = Recorder(__file__, "report.md")
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        write_run(run, steps)
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "hlat", "report", str(run)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
        page = (run / "report.html").read_text(encoding="utf-8")
        lines = (run / "metrics.jsonl").stat().st_size
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, memory = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
    figures = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    loss = next(figure for figure in figures if "<figcaption>Loss of training and validation</figcaption>" in figure)
    content = json.loads(re.search(r'<script type="application/json">(.*?)</script>', loss)[1])
    values = content["data"][0]["y"]
    assert values.count(SPIKE) == 1, "the spike is one point of the chart"
    print(
        f"{steps:,} lines ({lines / 1e6:.0f} MB): {seconds:.1f} s, {cpu:.1f} s of CPU, {memory / 1e9:.2f} GB of memory"
    )
    print(f"page: {len(page.encode()) / 1e6:.2f} MB, {len(figures)} charts; the spike is one of {len(values)} points")
    what = f"report of a run of {steps:,} logged steps"
    record.add(f"wall time of the {what}, import included", "s", seconds, note=f"goal 20 s; {cpu:.1f} s of CPU")
    record.add(f"size of the page: {what}", "MB", len(page.encode()) / 1e6, note="goal 8 MB")
    record.add(f"peak memory of the {what}", "GB", memory / 1e9)
    record.write()


if __name__ == "__main__":
    main()
