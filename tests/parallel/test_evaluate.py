"""Evaluation copies one micro-batch at a time to the device, with a pipeline and without."""

import weakref

import pytest
import torch

from hlat.config.load import parse_recipe
from hlat.parallel import MicroBatch, build_parallel
from hlat.runtime.distributed.join import Runtime


class _Stages:
    """Stand-in for a pipeline: evaluates one micro-batch after another."""

    def evaluate(self, batches, *, reduction):
        for batch in batches:
            yield batch.inputs_BS.sum().double()


@pytest.mark.parametrize("pipeline", [False, True])
def test_one_micro_batch_is_on_the_device_at_a_time(monkeypatch, pipeline):
    """At most two exist: a loop variable refers to the previous one while the next is created."""
    recipe = parse_recipe(
        {
            "model": {"vocab_size": 64, "layers": 1, "hidden_size": 16, "intermediate_size": 32, "heads": 2},
            "data": {"path": "none", "sequence_length": 16, "tokenizer": {"train": "char"}},
            "training": {"steps": 9},
            "precision": {"mode": "fp32"},
        }
    )
    model = build_parallel(recipe, Runtime(torch.device("cpu")), 1)
    if pipeline:
        monkeypatch.setattr(model, "_pipeline", _Stages())
    copies: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def copy_to_device(batch: MicroBatch) -> MicroBatch:
        nonlocal most
        copy = MicroBatch(batch.inputs_BS.clone(), batch.labels_BS.clone())
        copies.append(weakref.ref(copy.inputs_BS))
        most = max(most, sum(reference() is not None for reference in copies))
        return copy

    monkeypatch.setattr(model, "_local", copy_to_device)
    tokens = torch.randint(0, 64, (12, 16))
    model.evaluate([MicroBatch(rows, rows) for rows in tokens.split(2)])
    assert len(copies) == 6 and most <= 2
