"""Checkpoints of stamped states, saved by the processes of a layout."""

from pathlib import Path

import torch

from hlat.checkpoint import collect
from hlat.checkpoint.protocol.reader import Checkpoint, open_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config.sections.model import ModelConfig
from tests.support.checkpoint.stamped_parts import Layout, processes, stamp
from tests.support.checkpoint.thread_ranks import results_of, run_on_ranks


def save(
    folder: Path,
    config: ModelConfig,
    layout: Layout,
    salt: int = 1,
    dtype: torch.dtype = torch.float32,
    files: dict[str, Path] | None = None,
) -> Checkpoint:
    """Save a stamped state by the processes of a layout."""
    made = processes(config, layout, dtype)
    for process in made:
        stamp(process, salt)

    def work(ranks):  # type: ignore[no-untyped-def]
        mine = made[ranks.rank]
        store = CheckpointStore(folder, 1, ranks=ranks)
        meta = {"step": 5, "recipe": {"model": config.model_dump(mode="json"), "data": {"sequence_length": 8}}}
        return store.save(5, collect(config, mine.held, mine.optimizer), meta, files)

    return open_checkpoint(results_of(run_on_ranks(len(made), work))[0])
