"""HLAT's layouts with smaller models: the shipped recipes, scaled to as many processes as fit on one machine."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hlat.config import load_recipe
from hlat.runtime.distributed.join import Runtime
from tests.support.distributed.comparing import differences, within_bounds
from tests.support.distributed.jobs import train
from tests.support.distributed.layouts import Case
from tests.support.distributed.workers import Pool

STEPS = 3


@pytest.fixture(scope="module")
def large_pool() -> Iterator[Pool]:
    """Pool of 32 processes."""
    pool = Pool(32)
    yield pool
    pool.close()


def scaled(name: str, **changes: Any) -> dict[str, Any]:
    """Scale a shipped recipe down to a small model and a layout of the same shape."""
    content = load_recipe(name).model_dump(mode="json")
    small = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 512, "max_sequence_length": 32}
    content["model"] |= small
    content["data"] |= {"sequence_length": 32, "path": "none", "sources": [], "phases": []}
    content["data"]["tokenizer"] = {"train": "char"}
    content["precision"] = {"mode": "fp32"}  # instead of mixed, where rounding to bf16 would hide differences
    for section, fields in changes.items():
        content[section] |= fields
    return content


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "changes"),
    [
        # tensor parallel 8, the other ranks data parallel, sequence parallel, no ZeRO
        (
            "hlat-7b",
            16,
            {"model": {"layers": 4, "heads": 8, "kv_heads": 8}, "batch": {"global_batch": 8, "micro_batch": 4}},
        ),
        # tensor parallel four times the number of kv heads (32 over 8 there, 8 over 2 here), pipeline, ZeRO 1
        (
            "hlat-70b",
            32,
            {
                "model": {"layers": 8, "heads": 16, "kv_heads": 2},
                "batch": {"global_batch": 8, "micro_batch": 2},
                "parallel": {"tensor": 8, "pipeline": 4},
            },
        ),
    ],
)
def test_hlats_layouts_match_one_process(name: str, world: int, changes: dict[str, Any], large_pool: Pool) -> None:
    content = scaled(name, **changes)
    case = Case(name, world, content["parallel"], content["model"], content["batch"]["micro_batch"])
    alone = content | {"parallel": {}, "batch": {"global_batch": 8, "micro_batch": 8}}
    torch.set_num_threads(1)
    expected = train(Runtime(torch.device("cpu")), alone, STEPS)
    results = large_pool.run(world, train, content, STEPS)
    found = differences(case, results, expected, torch.float32)
    assert within_bounds(found), found
