"""Pipeline schedules differ in the order of passes and messages only: their losses are equal bit by bit."""

from typing import Any

import pytest

from tests.support.distributed.jobs import train
from tests.support.distributed.layouts import Case, recipe_content
from tests.support.distributed.workers import Pool

MODEL = {"layers": 8, "hidden_size": 64, "intermediate_size": 96, "heads": 4, "vocab_size": 307}
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "interleaved 1F1B": {"virtual_stages": 2, "schedule": "interleaved-1f1b"},
    "interleaved zero bubble": {"virtual_stages": 2, "schedule": "interleaved-zero-bubble"},
    "zbv": {"virtual_stages": 2, "schedule": "zbv"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_the_losses_of_1f1b(name: str, pool: Pool) -> None:
    """Four ranks, more micro-batches than messages may be on their way; the second loss depends on all gradients.

    Zero-bubble schedules leave fp32 products to torch where others use oneDNN (AMD): both add the 96 and fewer terms of
    this model in one order.
    """
    losses = []
    for schedule in ({"schedule": "1f1b"}, SCHEDULES[name]):
        case = Case(f"PP4 {name}", 4, {"pipeline": 4, "zero": 0, **schedule}, MODEL, 1)
        content = recipe_content(case, batch={"global_batch": 12, "micro_batch": 1})
        losses.append(pool.run(4, train, content, 3)[-1].losses)
    assert losses[0] == losses[1] and len(set(losses[0])) == 3
