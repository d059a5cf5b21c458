"""Steps of many micro-batches: a few of them give the numbers of all."""

from dataclasses import replace
from typing import Any

import pytest

from hlat.rehearsal import RankReport, TraceEvent, rehearse, world
from tests.support.rehearsal.small_recipes import SMALL, recipe_of

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "context, documents": (2, {"parallel": {"context": 2, "zero": 0}, "data": {**SMALL["data"], "isolate": True}}),
    "ZeRO 3": (2, {"parallel": {"zero": 3}}),
    "ZeRO 1, bf16-sr": (2, {"parallel": {"zero": 1}, "precision": {"mode": "bf16-sr"}}),
    "ZeRO 2, tensor, recomputed": (
        4, {"parallel": {"zero": 2, "tensor": 2}, "memory": {"activation_checkpointing": "full"}},
    ),
}  # fmt: skip


def in_passes(report: RankReport) -> list[TraceEvent]:
    """Events, without the bytes of copies of the batch, which is smaller where micro-batches are left out."""
    return [replace(event, size=0) if event.of_pass is None else event for event in report.trace]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("ZeRO 3", "context, documents") else pytest.mark.slow) for name in CASES],
)
def test_the_report_of_six_micro_batches_is_that_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reported number and every event, in their order, with two micro-batches left out and with none."""
    processes, sections = CASES[name]
    degree = sections["parallel"].get("tensor", 1) * sections["parallel"].get("context", 1)
    model = {**SMALL["model"], "layers": 2}
    recipe = recipe_of(
        processes, model=model, batch={"global_batch": 6 * 2 * processes // degree, "micro_batch": 2}, **sections
    )
    short = rehearse(recipe, processes, [0])
    monkeypatch.setattr(world, "shortened", lambda recipe, world: (recipe, 0))
    complete = rehearse(recipe, processes, [0])
    assert in_passes(short.ranks[0]) == in_passes(complete.ranks[0])
    assert short.to_dict() == complete.to_dict()
    assert {event.of_pass.micro_batch for event in short.ranks[0].trace if event.of_pass is not None} == set(range(6))


def test_a_long_rehearsal_of_a_pipeline_is_announced(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Its micro-batches are all rehearsed: the message names a batch that fills the pipeline."""
    recipe = recipe_of(4, parallel={"pipeline": 4}, batch={"global_batch": 4096, "micro_batch": 2})
    monkeypatch.setattr(world, "_outcomes", lambda *arguments: iter(()))
    rehearse(recipe, 4, [0])
    assert "2,048 micro-batches through 1 layers takes about 5 minutes" in caplog.text
    assert "batch.global_batch=16 rehearses 8" in caplog.text
    caplog.clear()
    rehearse(recipe_of(4, parallel={"pipeline": 4}, batch={"global_batch": 64, "micro_batch": 2}), 4, [0])
    assert not caplog.text
