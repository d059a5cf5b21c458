"""A model of 10 million parameters after half an hour on two CPU cores, beside compressors, on a book it has not seen.

    python benchmarks/compression.py books.parquet --folder FOLDER [--minutes 30] [--nproc 2]

One novel, the first in alphabetical order, is kept aside: none of its chapters is trained on. A short run measures the
time of a step, which gives the number of steps for the time that is left; the schedule ends with it. The model's bits
per byte on the complete novel come from windows of 512 tokens that do not overlap, so that most tokens have less
context than that. gzip -9, xz -9e and zstd -19 --ultra compress the same text: alone, and, for those whose windows are
large enough (xz, zstd --long=31), after the training text, where the bytes that the novel adds are counted. The report
of the run, with the curve, is FOLDER/run/report.html. A run that was interrupted goes on.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq

import hlat
from results import Recorder

RECIPE = """
model: {vocab_size: 4096, layers: 7, hidden_size: 320, intermediate_size: 864, heads: 5, tie_embeddings: true}
data: {sequence_length: 512, tokenizer: {train: bpe}}
batch: {global_batch: 8, micro_batch: 4}
optimizer: {kind: muon, lr: 4.0e-3}
parallel: {zero: 1}
checkpoint: {every_steps: 200, keep_last: 2}
tracking: {console: plain, tensorboard: false}
"""
PROMPTS = ["It was a", "The captain", '"My dear,"']
PILOT = 30
COMPRESSORS = {
    "gzip -9": ["gzip", "-9", "-c"],
    "xz -9e": ["xz", "-9e", "-T1", "-c"],
    "zstd -19 --ultra": ["zstd", "-19", "--ultra", "-T1", "-c", "-q"],
    "zstd -22 --ultra": ["zstd", "-22", "--ultra", "-T1", "-c", "-q"],
}
AFTER_TRAINING_TEXT = {
    "xz -9e, dictionary of 64 MiB": ["xz", "-9e", "-T1", "-c"],
    "zstd -19 --ultra --long=31": ["zstd", "-19", "--ultra", "--long=31", "-T1", "-c", "-q"],
}


def split(books, folder):
    """Write the documents of all novels but one to train.jsonl, that novel to heldout.jsonl; return both texts."""
    rows = pq.read_table(books).to_pylist()
    held_out = min(row["source"] for row in rows)
    texts = []
    for name, wanted in (("train", False), ("heldout", True)):
        chosen = [row["text"] for row in rows if (row["source"] == held_out) == wanted]
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in chosen]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        texts.append("".join(chosen).encode())
    return held_out, *texts


def train(folder, steps, name, nproc):
    """Train for so many steps; return the folder of the run."""
    where = [f"data.path={folder / 'train.jsonl'}", f"data.prepared_dir={folder / 'data'}", f"run.dir={folder / name}"]
    sets = [f"evaluation.sets={{heldout: {folder / 'heldout.jsonl'}}}", "evaluation.sequences=null"]
    budget = [f"training.steps={steps}", f"schedule.warmup_steps={max(1, steps // 20)}"]
    every = [f"evaluation.every_steps={'null' if steps == PILOT else max(1, steps // 8)}", "training.log_every=5"]
    texts = [] if steps == PILOT else [f"evaluation.prompts={json.dumps(PROMPTS)}"]
    options = ["--nproc", str(nproc)] if nproc > 1 else []
    words = [str(folder / "recipe.yaml"), *where, *sets, *budget, *every, *texts, *options]
    subprocess.run([sys.executable, "-m", "hlat", "train", *words], check=True)
    return folder / name


def compressed(command, text):
    return len(subprocess.run(command, input=text, stdout=subprocess.PIPE, check=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--nproc", type=int, default=2)
    options, record = parser.parse_args(), Recorder(__file__, "evaluation.md")
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    held_out, training, text = split(options.books, folder)
    pilot = hlat.metrics(train(folder, PILOT, "pilot", options.nproc)).to_pydict()
    steps_file = folder / "steps"
    if not steps_file.exists():
        speed = statistics.median(pilot["tokens_per_second"][2:])
        steps_file.write_text(str(int(options.minutes * 60 * speed / (8 * 512))))
    steps, began = int(steps_file.read_text()), time.monotonic()
    run = train(folder, steps, "run", options.nproc)
    minutes = (time.monotonic() - began) / 60
    table = hlat.metrics(run).to_pydict()
    bits = [value for value in table["val/heldout/bits_per_byte"] if value is not None]
    tokens = table["tokens"][-1]
    hlat.report([run])
    print(f"held out: {held_out}, {len(text):,} bytes; {steps:,} steps, {tokens:,} tokens, {minutes:.1f} min; {bits}")
    note = f"{held_out}, {len(text):,} bytes; {tokens:,} tokens in {steps:,} steps, {minutes:.1f} min in all"
    peers = {name: 8 * compressed(command, text) / len(text) for name, command in COMPRESSORS.items()}
    for name, command in AFTER_TRAINING_TEXT.items():
        added = compressed(command, training + text) - compressed(command, training)
        peers[f"{name}, bytes added after the training text"] = 8 * added / len(text)
    for name, value in peers.items():
        print(f"{name}: {value:.3f} bits per byte; the model {bits[-1]:.3f}")
        record.add(
            "bits per byte of a novel kept aside, 10 M parameters",
            "bit/B",
            bits[-1],
            peer=name,
            peer_values=value,
            note=note,
        )
    record.write()


if __name__ == "__main__":
    main()
