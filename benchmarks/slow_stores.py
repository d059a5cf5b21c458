"""Slow, stalled, refusing and dead stores: no healthy save is taken for a hang, and every dead saver is noticed.

    python benchmarks/slow_stores.py --folder FOLDER [--only NAME ...] [--at-once 6] [--minutes 10]

Each case is a run of ``hlat train`` with one or two ranks and ``recovery.hang_seconds`` of 5 or 120 that saves after
every fifth step. Its store is

    slow 2x, 10x, 100x    every save takes that many times the interval between two saves (injected fault)
    stall                 the disk of the run's folder is frozen for a minute, then for ``--minutes`` (needs root)
    upload                uploads to an S3 server on this machine take ten times the interval
    refuses               saves fail for five minutes
    dead                  the saver of the last rank is stopped for good while it writes

Its final weights and optimizer state are compared, bit by bit, with those of an undisturbed run. Nothing is scaled: a
stall of ten minutes takes ten minutes.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from results import Recorder  # noqa: E402
from tests.support.object_store import ObjectStore  # noqa: E402
from tests.support.same_runs import assert_same_state  # noqa: E402

RECIPE = """
run: {{name: r, device: cpu}}
model: {{vocab_size: 320, layers: 2, hidden_size: 32, intermediate_size: 96, heads: 4, kv_heads: 2}}
data: {{path: {folder}/text.txt, sequence_length: 32, prepared_dir: {folder}/data, tokenizer: {{train: bpe}},
        validation: {{fraction: 0}}}}
batch: {{global_batch: 8, micro_batch: 2}}
optimizer: {{lr: 3.0e-3}}
training: {{steps: 20, log_every: 1}}
checkpoint: {{every_steps: 5, keep_last: 9}}
evaluation: {{every_steps: null}}
tracking: {{console: plain, tensorboard: false}}
"""
STEP = 0.1  # seconds of each step, by an injected pause
INTERVAL = 5 * STEP  # seconds between two saves, at least
FILES = 9  # that one rank creates in a save of this model
FIRST_SAVE = 6  # a step after the first save has begun
HANG_SECONDS = (5, 120)
REACTION = 1.5  # seconds: ranks exchange signs of life every half second, twice at most, and a kill follows


@dataclass(frozen=True)
class Case:
    """A store, and how to disturb it while a run writes to it.

    Attributes:
        name: name in the table.
        settings: further words of the command.
        disturb: called once the first save has begun, with the process and the run's folder.
        dies: True if the saver does not survive.
    """

    name: str
    settings: tuple[str, ...] = ()
    disturb: Callable[[subprocess.Popen, Path], None] = lambda process, run: None
    dies: bool = False


def slow(factor: float) -> tuple[str, ...]:
    fault = f"{{kind: slow_disk, at_step: 1, steps: 1000, seconds: {factor * INTERVAL / FILES:g}}}"
    return ("--allow-faults", f"faults=[{PAUSE}, {fault}]")


PAUSE = f"{{kind: slow, at_step: 1, steps: 1000, phase: optimizer, seconds: {STEP}}}"
PAUSED = ("--allow-faults", f"faults=[{PAUSE}]")


def stall(seconds: float) -> Callable[[subprocess.Popen, Path], None]:
    def freeze(process: subprocess.Popen, run: Path) -> None:
        subprocess.run(["fsfreeze", "--freeze", run.parent], check=True)
        try:
            time.sleep(seconds)
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", run.parent], check=True)

    return freeze


def refuse(seconds: float) -> Callable[[subprocess.Popen, Path], None]:
    def replace_folder(process: subprocess.Popen, run: Path) -> None:
        away = run / "checkpoints.away"
        (run / "checkpoints").rename(away)
        (run / "checkpoints").touch()  # no folder: every save fails
        time.sleep(seconds)
        (run / "checkpoints").unlink()
        away.rename(run / "checkpoints")

    return replace_folder


def stop_saver(process: subprocess.Popen, run: Path) -> None:
    """Stop the saver of the last rank: it leads a session of its own below a rank."""
    ranks = [child for child in psutil.Process(process.pid).children() if child.children()]
    ranks[-1].children()[0].suspend()
    (run / "stopped").write_text(repr(time.time()))


def cases(minutes: float) -> list[Case]:
    return [
        *(Case(f"slow {factor}x", slow(factor)) for factor in (2, 10, 100)),
        Case("stall 1 min", PAUSED, stall(60)),
        Case(f"stall {minutes:g} min", PAUSED, stall(60 * minutes)),
        Case("upload", (*PAUSED, "checkpoint.remote=s3://corpus/{name}", "checkpoint.keep_last=2")),
        Case("refuses", (*PAUSED, "checkpoint.retries=12", "training.steps=20"), refuse(300)),
        Case("dead", slow(10), stop_saver, dies=True),
    ]


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """Mount a disk of its own, which can be frozen."""
    image = folder.with_suffix(".img")
    folder.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        image.unlink()


def train(folder: Path, run: Path, ranks: int, *words: str, environment: dict[str, str] | None = None):
    command = [sys.executable, "-m", "hlat", "train", str(folder / "recipe.yaml"), f"run.dir={run}", *words]
    with run.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--nproc", str(ranks)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )


def events(run: Path, kind: str) -> list[dict]:
    with contextlib.suppress(OSError):
        found = map(json.loads, (run / "events.jsonl").read_text().splitlines())
        return [event for event in found if event["event"] == kind]
    return []


def steps_of(run: Path) -> int:
    with contextlib.suppress(OSError):
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def play(case: Case, hang_seconds: int, ranks: int, folder: Path, store: ObjectStore) -> dict:
    """Run a case; return its row."""
    name = f"{case.name}-{hang_seconds}-{ranks}".replace(" ", "-")
    with contextlib.ExitStack() as stack:
        here = folder / "runs" / name
        if case.name.startswith("stall"):
            stack.enter_context(disk(here))
        here.mkdir(parents=True, exist_ok=True)
        run = here / "run"
        words = [word.format(name=name) if "{name}" in word else word for word in case.settings]
        words.append(f"recovery.hang_seconds={hang_seconds}")
        begin = time.monotonic()
        process = train(folder, run, ranks, *words, environment=store.environment)
        while steps_of(run) < FIRST_SAVE and process.poll() is None:
            time.sleep(0.02)
        if process.poll() is None:
            case.disturb(process, run)
        code = process.wait()
        row = {"case": case.name, "hang_seconds": hang_seconds, "ranks": ranks, "exit": code}
        row["seconds"] = time.monotonic() - begin
        row["hangs"], row["lost"] = len(events(run, "hang")), len(events(run, "saver_lost"))
        row["restarts"] = len(events(run, "restart"))
        row["slow_reported"] = len(events(run, "storage_slow"))
        row["equal"] = is_equal(run, folder / f"undisturbed-{ranks}")
        if case.dies and row["lost"]:
            noticed = datetime.fromisoformat(events(run, "saver_lost")[0]["time"]).timestamp()
            row["noticed_after"] = noticed - float((run / "stopped").read_text())
        print(json.dumps(row), flush=True)
        return row


def is_equal(run: Path, other: Path) -> bool:
    try:
        assert_same_state(run, other)
    except Exception as error:
        print(f"{run}: {error}"[:300], flush=True)
        return False
    return True


def summarize(rows: list[dict], record: Recorder) -> None:
    healthy, dead = [row for row in rows if row["case"] != "dead"], [row for row in rows if row["case"] == "dead"]
    listed = ", ".join(dict.fromkeys(row["case"] for row in healthy))
    where = "hang_seconds 5 and 120, 1 and 2 ranks"
    shot = sum(row["hangs"] + row["lost"] + row["restarts"] for row in healthy)
    record.add(f"healthy saves taken for a hang ({listed}; {where})", "saves", shot, note=f"in {len(healthy)} runs")
    differ = sum(not row["equal"] for row in rows)
    record.add(f"runs that differ from an undisturbed one ({listed}, dead; {where})", "runs", differ)
    late = [row["noticed_after"] - row["hang_seconds"] for row in dead if "noticed_after" in row]
    record.add("dead savers that were not noticed", "savers", len(dead) - len(late), note=f"of {len(dead)}")
    if late:
        note = f"at most {REACTION} s is expected: two exchanges of signs of life and a kill"
        record.add("longest time beyond hang_seconds until a dead saver was noticed", "s", max(late), note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="names of cases, or parts of them")
    parser.add_argument("--at-once", type=int, default=6, help="runs at the same time: most only wait")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of the long stall")
    options, record = parser.parse_args(), Recorder(__file__, "recovery.md")
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    (folder / "text.txt").write_text("\n".join(f"the cat {n} sees a river {n * n % 97}." for n in range(3000)))
    for ranks in (1, 2):
        assert train(folder, folder / f"undisturbed-{ranks}", ranks, *PAUSED).wait() == 0
    chosen = [case for case in cases(options.minutes) if not options.only or any(n in case.name for n in options.only)]
    (folder / "store").mkdir()
    with ObjectStore(folder / "store") as store, ThreadPoolExecutor(options.at_once) as pool:
        fault = {"method": "PUT", "path": "/corpus/upload", "wait": 10 * INTERVAL / FILES}
        (folder / "store" / "faults.json").write_text(json.dumps([fault]))
        planned = [(case, hang, ranks) for case in reversed(chosen) for hang in HANG_SECONDS for ranks in (1, 2)]
        rows = list(pool.map(lambda each: play(*each, folder, store), planned))
    summarize(rows, record)
    record.write()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main()
