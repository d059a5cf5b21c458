"""Throughput of `hlat data prepare` compared with the batch encoding of the tokenizers library, on the same text.

    python benchmarks/data_prepare.py ../shared/data/text/books.parquet --threads 2 --repeats 5

Both encode the same documents with the same tokenizer and as many cores; the library keeps its result in memory,
prepare reads the parquet file, starts its workers, and writes shards with checksums. They alternate, and the ratio is
of the medians. The tokenizer is trained first (its time is printed and is in neither).
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
import tokenizers

from hlat.config.sections.data import DataConfig
from hlat.data.prepare.preparation import prepare
from results import Recorder


def main() -> None:
    """Parse, alternate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="a parquet file with a column of text")
    parser.add_argument("--column", default="text")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, default=8192)
    arguments = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        record = Recorder(__file__, "data.md", packages=("tokenizers",))
        _compare(arguments, Path(folder), record)
        record.write()


def _compare(arguments: argparse.Namespace, folder: Path, record: Recorder) -> None:
    texts = pq.read_table(arguments.corpus, columns=[arguments.column])[arguments.column].to_pylist()
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    section = {"path": str(arguments.corpus), "text_column": arguments.column}
    trained, seconds = _prepare(folder / "trained", {**section, "tokenizer": {"vocab_size": arguments.vocab_size}}, 2)
    print(f"{megabytes:.1f} MB of text, {len(texts)} documents, {arguments.threads} threads or processes")
    print(f"training the tokenizer and preparing: {seconds:.1f} s")
    record.add("training a tokenizer and preparing", "s", seconds, note=f"{megabytes:.1f} MB of text")
    tokenizer = str(trained / "tokenizer" / "tokenizer.json")
    config = {**section, "tokenizer": {"path": tokenizer}}
    times: dict[str, list[float]] = {"encode_batch": [], "encode_batch_fast": [], "hlat prepare": []}
    for _ in range(arguments.repeats):
        times["encode_batch"].append(_raw(tokenizer, texts, "encode_batch"))
        times["encode_batch_fast"].append(_raw(tokenizer, texts, "encode_batch_fast"))
        times["hlat prepare"].append(_prepare(folder / "prepared", config, arguments.threads)[1])
    speeds = {name: megabytes / statistics.median(seconds) for name, seconds in times.items()}
    print(f"{'':20} {'MB/s':>8} {'best MB/s':>10} {'prepare / this':>15}")
    for name, speed in speeds.items():
        best = megabytes / min(times[name])
        print(f"{name:20} {speed:8.2f} {best:10.2f} {speeds['hlat prepare'] / speed:15.2f}")
    rates = {name: [megabytes / taken for taken in rounds] for name, rounds in times.items()}
    claim = f"hlat data prepare with {arguments.threads} processes: read, tokenize, write, checksum"
    for name in ("encode_batch", "encode_batch_fast"):
        record.add(claim, "MB/s", rates["hlat prepare"], peer=f"tokenizers {name}", peer_values=rates[name])


def _raw(tokenizer: str, texts: list[str], method: str) -> float:
    encode = getattr(tokenizers.Tokenizer.from_file(tokenizer), method)  # a fresh one: the library caches words
    start = time.perf_counter()
    encodings = encode(texts, add_special_tokens=False)
    for encoding in encodings:
        _ = encoding.ids  # what anyone who wants the tokens has to do
    return time.perf_counter() - start


def _prepare(folder: Path, section: dict[str, object], workers: int) -> tuple[Path, float]:
    shutil.rmtree(folder, ignore_errors=True)
    config = DataConfig.model_validate(section)
    start = time.perf_counter()
    prepare(config, folder, workers=workers)
    return folder, time.perf_counter() - start


if __name__ == "__main__":
    main()
