"""Speed of reading samples: prepared shards compared with other loaders, online data with tokenizing alone.

    prepared   hlat, a numpy memmap read at the same places, Hugging Face datasets, mosaicml-streaming:
               the same tokens, the same length, shuffled, one process, batches as int64 tensors
    online     hlat's loader with one tokenizing process, alternating every few seconds with encode_batch of the same
               texts on one thread; by the clock, and by the processor time of both processes
    waiting    share of the time of training steps that the loop waited for its batch, prepared and online
    state      bytes of the cursors of 256 streams; seconds to the batch at sample 10^9, and to fit a million documents

Rounds alternate in one run; the median round, and the median ratio of a round, are reported. datasets and
mosaicml-streaming are left out if not installed.

    python benchmarks/data_loading.py books.parquet --folder FOLDER [--rounds 3]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from results import Recorder

LENGTH, BATCH, SEED, STREAMS = 1024, 16, 0, 256


def recipe(options, mode):
    """The quickstart's model on the given text."""
    from hlat.config.load import parse_recipe

    section = {
        "path": str(options.data),
        "sequence_length": LENGTH,
        "prepared_dir": str(options.folder / mode),
        "tokenizer": {"vocab_size": 8192},
        "mode": mode,
    }
    return parse_recipe(
        {"model": {"preset": "tiny-1m", "vocab_size": 8192}, "data": section, "training": {"steps": 1000}}
    )


def hlat_prepared(options):
    """Batches of TrainingData."""
    from hlat.data.prepared.prepared_folder import open_prepared
    from hlat.data.samples.training_data import TrainingData

    data = TrainingData(open_prepared(options.folder / "prepared"), recipe(options, "prepared").data, SEED)
    for first in range(0, data.samples_per_epoch - BATCH, BATCH):
        yield data.batch(first, BATCH).inputs_BS


def memmap(options):
    """The least that a loader of token shards has to do: read the rows and widen them."""
    import numpy as np
    import torch

    from hlat.data.prepared.prepared_folder import open_prepared

    prepared = open_prepared(options.folder / "prepared")
    (shard,) = prepared.manifest.splits["train"].shards
    tokens = np.memmap(prepared.dir / shard.file, dtype=prepared.manifest.dtype, mode="r")
    order = np.random.default_rng(SEED).permutation((len(tokens) - 1) // LENGTH)
    for first in range(0, len(order) - BATCH, BATCH):
        rows = [tokens[i * LENGTH : i * LENGTH + LENGTH + 1] for i in order[first : first + BATCH]]
        yield torch.from_numpy(np.stack(rows).astype(np.int64))


def rows_of(options):
    """The samples, for the others to store."""
    import numpy as np

    from hlat.data.prepared.prepared_folder import open_prepared

    prepared = open_prepared(options.folder / "prepared")
    (shard,) = prepared.manifest.splits["train"].shards
    tokens = np.memmap(prepared.dir / shard.file, dtype=prepared.manifest.dtype, mode="r")
    return [tokens[i * LENGTH : i * LENGTH + LENGTH + 1].astype(np.int64) for i in range((len(tokens) - 1) // LENGTH)]


def datasets_side(options):
    """Hugging Face datasets, arrow on disk, format torch."""
    import datasets

    folder = options.folder / "arrow"
    if not folder.is_dir():
        datasets.Dataset.from_dict({"tokens": rows_of(options)}).save_to_disk(folder)
    data = datasets.load_from_disk(folder).shuffle(seed=SEED).with_format("torch")
    for batch in data.iter(BATCH, drop_last_batch=True):
        yield batch["tokens"]


def streaming_side(options):
    """mosaicml-streaming, local shards, through torch's DataLoader."""
    import torch
    from streaming import MDSWriter, StreamingDataset

    folder = options.folder / "mds"
    if not folder.is_dir():
        with MDSWriter(out=str(folder), columns={"tokens": "ndarray:int64"}) as writer:
            for row in rows_of(options):
                writer.write({"tokens": row})
    data = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=SEED, batch_size=BATCH)
    for batch in torch.utils.data.DataLoader(data, batch_size=BATCH, drop_last=True):
        yield batch["tokens"]


def online(options, record):
    """Alternate between the loader of a rank, tokenized by one process, and the library alone."""
    import psutil

    from hlat.config import BatchSchedule
    from hlat.data.online.loader import OnlineData
    from hlat.data.prepared.prepared_folder import open_prepared

    config = recipe(options, "online").data
    data = OnlineData(open_prepared(options.folder / "online"), config, SEED, BatchSchedule(BATCH), 1)
    begin = time.perf_counter()
    feed = data.loader(0, data.cursors(), 0, print)
    batches = (feed.read(first)[0].inputs_BS.numel() for first in range(0, 10**9, BATCH))
    next(batches)
    first = time.perf_counter() - begin
    print(f"online, first batch of {STREAMS} streams: {first:.1f} s")
    record.add(f"first batch of {STREAMS} online streams", "s", first)
    (child,) = (child for child in psutil.Process().children() if "hlat.data.online.worker" in child.cmdline())
    alone = encode_batch(options)
    next(alone)
    rounds = []
    try:
        for _ in range(2 * options.rounds + 1):
            child.resume()
            loader = rate(batches, options.seconds, [psutil.Process(), child])
            child.suspend()  # it must not work ahead while the other is timed
            rounds.append((*loader, *rate(alone, options.seconds, [psutil.Process()])))
    finally:
        feed.close()
    print("| | million tokens/s | per processor second |\n|---|---|---|")
    for name, start in (("hlat, online", 0), ("tokenizers.encode_batch", 2)):
        wall, cpu = (", ".join(f"{row[start + column] / 1e6:.2f}" for row in rounds) for column in (0, 1))
        print(f"| {name} | {wall} | {cpu} |")
    wall, cpu = (statistics.median(row[column] / row[column + 2] for row in rounds) for column in (0, 1))
    print(f"hlat, online / tokenizers.encode_batch: {wall:.2f} by the clock, {cpu:.2f} per processor second")
    library = "tokenizers.encode_batch_fast, one thread"
    for what, column in (("by the clock", 0), ("per second of processor time", 1)):
        ours, theirs = ([row[first] / 1e6 for row in rounds] for first in (column, column + 2))
        record.add(f"online data, {what}", "million tokens/s", ours, peer=library, peer_values=theirs)


def rate(source, seconds, processes):
    """Tokens per second of the clock, and of the processor time of some processes."""
    used = [sum(process.cpu_times()[:2]) for process in processes]
    begin, tokens = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        tokens += next(source)
    taken = sum(sum(process.cpu_times()[:2]) - before for process, before in zip(processes, used, strict=True))
    return tokens / (time.perf_counter() - begin), tokens / taken


def encode_batch(options):
    """The library alone: texts in memory, 16 at a time, one thread; the ids are not even made arrays."""
    import pyarrow.parquet as pq
    import tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    library = tokenizers.Tokenizer.from_file(str(options.folder / "online" / "tokenizer" / "tokenizer.json"))
    texts = [text for text in pq.read_table(options.data)["text"].to_pylist() if text]
    while True:
        for first in range(0, len(texts), 16):
            found = library.encode_batch_fast(texts[first : first + 16], add_special_tokens=False)
            yield sum(len(encoding.ids) for encoding in found)


SIDES = {
    "hlat, prepared": hlat_prepared,
    "numpy memmap": memmap,
    "datasets": datasets_side,
    "mosaicml-streaming": streaming_side,
}


def worker(options):
    """Tokens per second of one side for some seconds, after a first batch."""
    source = SIDES[options.side](options)
    begin = time.perf_counter()
    next(source)
    first, begin, tokens = time.perf_counter() - begin, time.perf_counter(), 0
    for batch in source:
        tokens += batch.numel()
        if time.perf_counter() - begin > options.seconds:
            break
    print(json.dumps({"rate": tokens / (time.perf_counter() - begin), "first": first}))


def measured(options, side):
    """Run one round of one side, in a process of its own, on one core."""
    command = [sys.executable, __file__, str(options.data), "--folder", str(options.folder), "--side", side]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def waiting(options, mode):
    """Share of a run's steps that it waited for data, after the first line of metrics."""
    run = options.folder / f"run-{mode}"
    overrides = [
        f"data.path={options.data}",
        f"data.mode={mode}",
        f"run.dir={run}",
        "data.sequence_length=256",
        "batch.global_batch=8",
        "batch.micro_batch=8",
        f"training.steps={options.steps}",
        "checkpoint.every_steps=null",
        "evaluation.every_steps=null",
        "evaluation.sequences=8",
        "tracking.console=none",
    ]
    base = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
    command = [sys.executable, "-m", "hlat", "train", str(base), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line)["seconds"] for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    phases = ("data", "forward", "backward", "reduce", "optimizer", "device")
    return sum(line["data"] for line in lines) / sum(line.get(phase, 0.0) for line in lines for phase in phases)


def state(options, record):
    """Measure bytes of state, seconds to the first batch at sample 10^9, and seconds of best-fit packing."""
    import numpy as np

    from hlat.config import BatchSchedule
    from hlat.data.online.loader import OnlineData
    from hlat.data.prepared.prepared_folder import open_prepared
    from hlat.data.samples.packing import fit_documents
    from hlat.data.samples.training_data import TrainingData

    config = recipe(options, "online").data
    online = OnlineData(open_prepared(options.folder / "online"), config, SEED, BatchSchedule(BATCH), 1)
    nbytes = online.cursors().values.nbytes
    print(f"state of {STREAMS} streams: {nbytes:,} bytes per source")
    record.add(f"state of {STREAMS} online streams, per source", "bytes", nbytes)
    begin = time.perf_counter()
    data = TrainingData(open_prepared(options.folder / "prepared"), recipe(options, "prepared").data, SEED)
    data.batch(10**9, BATCH)
    seconds = time.perf_counter() - begin
    print(f"prepared, first batch at sample 10^9: {seconds:.3f} s")
    record.add("first batch at sample 10^9 of prepared data", "s", seconds)
    lengths = np.exp(np.random.default_rng(SEED).normal(6.5, 1.2, 1_000_000)).astype(np.int64) + 1
    begin = time.perf_counter()
    rows = len(fit_documents(lengths, 4096).rows) - 1
    seconds, padding = time.perf_counter() - begin, 1 - lengths.sum() / (rows * 4096)
    print(f"best-fit_documents of a million documents into rows of 4096: {seconds:.2f} s, {padding:.4%} padding")
    record.add(
        "best-fit_documents of a million documents into rows of 4,096", "s", seconds, note=f"{padding:.4%} padding"
    )


def main():
    """Prepare the data if it is not there, then measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        worker(options)
        return
    from hlat.data.online.prepare import prepare_online
    from hlat.data.prepare.preparation import prepare

    record = Recorder(__file__, "data.md", packages=("tokenizers", "datasets", "mosaicml-streaming"))
    prepare(recipe(options, "prepared").data, options.folder / "prepared")
    prepare_online(recipe(options, "online").data, options.folder / "online", 100_000)
    needs = {"datasets": "datasets", "mosaicml-streaming": "streaming"}
    sides = [side for side in SIDES if side not in needs or find_spec(needs[side])]
    rounds = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side in sides:
            rounds[side].append(measured(options, side))
    middle = {side: statistics.median(row["rate"] for row in found) for side, found in rounds.items()}
    print("| | million tokens/s | rounds | first batch, s |\n|---|---|---|---|")
    for side, found in rounds.items():
        shown = ", ".join(f"{row['rate'] / 1e6:.2f}" for row in found)
        print(f"| {side} | {middle[side] / 1e6:.2f} | {shown} | {found[0]['first']:.2f} |")
    ours = rounds.pop("hlat, prepared")
    for side, found in rounds.items():
        ratio = statistics.median(mine["rate"] / theirs["rate"] for mine, theirs in zip(ours, found, strict=True))
        print(f"hlat, prepared / {side}: {ratio:.2f}")
        mine, theirs = ([row["rate"] / 1e6 for row in found] for found in (ours, found))
        note = f"median ratio of a round: {ratio:.2f}"
        record.add("reading prepared samples", "million tokens/s", mine, peer=side, peer_values=theirs, note=note)
    online(options, record)
    state(options, record)
    for mode in ("prepared", "online"):
        share = waiting(options, mode)
        print(f"waiting for data, {mode}: {share:.2%} of the steps")
        record.add(f"waiting for {mode} data, share of the time of steps", "%", 100 * share)
    record.write()


if __name__ == "__main__":
    main()
