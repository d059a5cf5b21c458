"""Cost of very long documents for a process that tokenizes while training: memory, and seconds to the first row.

A corpus of lines with two documents of some megabytes among short ones, read by eight streams in this process.

    python benchmarks/long_documents.py --folder FOLDER [--megabytes 100]
"""

import argparse
import json
import random
import resource
import time
from dataclasses import replace
from pathlib import Path

from hlat.config import BatchSchedule
from hlat.config.sections.data import DataConfig
from hlat.data.online.loader import CursorTable, build_worker_plan
from hlat.data.online.prepare import prepare_online
from hlat.data.online.streams import StreamAssignment
from hlat.data.online.worker import RowProducer
from results import Recorder

STREAMS, BATCH, ROWS = 8, 8, 20_000


def text(characters, rng):
    """Made-up words, ASCII."""
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(5_000)]
    return " ".join(rng.choices(words, k=characters // 6))


def lines(folder, megabytes):
    """Write the corpus: eight files of short documents, one of two long documents."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(8):
        short = (json.dumps({"text": text(2_000, rng)}) + "\n" for _ in range(60))
        (folder / f"{number}.jsonl").write_text("".join(short))
    with (folder / "long.jsonl").open("w") as file:
        for _ in range(2):
            file.write(json.dumps({"text": text(megabytes * 1_000_000, rng)}) + "\n")
    return folder


def peak():
    """Peak memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main():
    """Write, set up, read, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=100)
    options, record = parser.parse_args(), Recorder(__file__, "data.md")
    short, corpus = options.folder / "short", options.folder / f"long-{options.megabytes}"
    section = {"mode": "online", "sequence_length": 1024, "streams": STREAMS, "validation": {"fraction": 0}}
    trained = {**section, "path": str(lines(short, 0)), "tokenizer": {"vocab_size": 1000}}
    tokenizer = prepare_online(DataConfig.model_validate(trained), options.folder / "tokenizer", 100).tokenizer_dir
    if not corpus.is_dir():
        lines(corpus, options.megabytes)
    given = {**section, "path": str(corpus), "tokenizer": {"path": str(tokenizer)}}
    config = DataConfig.model_validate(given)
    prepared = prepare_online(config, options.folder / f"out-{options.megabytes}", 100)
    plan = build_worker_plan(prepared, config, 0, StreamAssignment(0, 1, BatchSchedule(BATCH), STREAMS, 0))
    before, begin = peak(), time.perf_counter()
    producer = RowProducer(replace(plan, streams=list(range(STREAMS))), CursorTable(STREAMS, 1).values)
    longest, last, first = 0.0, begin, 0.0
    for number, _ in zip(range(ROWS), producer.frames(), strict=False):
        now = time.perf_counter()
        if number == 0:
            first = now - begin
            print(f"first row after {first:.1f} s")
        longest, last = max(longest, now - last), now
    print(f"longest time between rows: {longest:.1f} s; {ROWS / (last - begin):.0f} rows/s")
    print(f"peak: {peak():,} MiB, {before:,} before reading")
    what = f"online data with two documents of {options.megabytes} MB"
    record.add(f"{what}: first row", "s", first)
    record.add(f"{what}: longest time between two rows", "s", longest)
    record.add(f"{what}: peak memory of the process", "MiB", peak(), note=f"{before:,} MiB before reading")
    record.write()


if __name__ == "__main__":
    main()
