"""Two runs are the same run: every tensor of their last checkpoints, where they are in the data, what they logged."""

import json
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.reader import Checkpoint, open_checkpoint, resolve
from hlat.checkpoint.protocol.store import CheckpointStore

TIMINGS = {"tokens_per_second", "mfu", "mfu_full", "memory_bytes", "seconds"}


def newest(run: Path) -> Checkpoint:
    """Open the newest complete checkpoint of a run."""
    return open_checkpoint(resolve(run))


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Logged metrics without times and memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind, oldest first."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def assert_same_state(one: Path, other: Path) -> None:
    """Weights, optimizer, generators, cursors, and the place in the data."""
    ours, theirs = newest(one), newest(other)
    tensors, others = ours.load(""), theirs.load("")
    assert tensors.keys() == others.keys() and any(name.startswith("optimizer.exp_avg_sq.") for name in tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name
    for name in ("step", "samples", "tokens"):
        assert ours.meta[name] == theirs.meta[name], name


def assert_same_run(one: Path, other: Path) -> None:
    """The state, the policy's memory, and every logged step once."""
    assert_same_state(one, other)
    assert newest(one).meta["anomalies"] == newest(other).meta["anomalies"]
    assert metrics_of(one) == metrics_of(other)


def rewrite(run: Path, step: int, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
    """Give a run a checkpoint as if it had saved that."""
    store = CheckpointStore(run / "checkpoints", keep_last=100)
    store.save(step, replicated_chunks(tensors), meta, _tokenizer(newest(run).path))


def _tokenizer(checkpoint: Path) -> dict[str, Path]:
    folder = checkpoint / "tokenizer"
    return {f"tokenizer/{file.name}": file for file in folder.iterdir()} if folder.is_dir() else {}
