"""A run whose device is full ends with an error for the user, and records it."""

import io
import json
from pathlib import Path

import pytest
import torch
import yaml

from hlat.config.load import parse_recipe
from hlat.runtime.errors import DeviceMemoryError
from hlat.training import loop, run


def full(*arguments):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")


def test_memory_that_runs_out_ends_the_run_for_good_in_the_first_step(
    tiny_recipe: str, corpus: Path, prepared: Path, tmp_path: Path, monkeypatch
):
    content = yaml.safe_load(tiny_recipe)
    content["run"] |= {"dir": str(tmp_path / "run")}
    content["data"] |= {"path": str(corpus), "prepared_dir": str(prepared)}
    content["schedule"]["warmup_steps"] = 1
    content["training"]["steps"] = 2
    recipe = parse_recipe(content)
    monkeypatch.setattr(loop, "accumulate_gradients", full)
    with pytest.raises(DeviceMemoryError, match=r"Tried to allocate 2.00 GiB\. .* Use a smaller") as first:
        run(recipe, stream=io.StringIO())
    assert not first.value.retryable

    real = loop.update  # the first step works, and then the device is full

    def update_once(*arguments):
        monkeypatch.setattr(loop, "accumulate_gradients", full)
        return real(*arguments)

    monkeypatch.undo()
    monkeypatch.setattr(loop, "update", update_once)
    with pytest.raises(DeviceMemoryError, match="after 1 step: ") as later:
        run(recipe, stream=io.StringIO())
    assert later.value.retryable
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["message"] for event in events if event["event"] == "error"] == [str(first.value), str(later.value)]
