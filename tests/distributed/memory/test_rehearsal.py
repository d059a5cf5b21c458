"""Law 8: a rehearsal predicts bytes, messages and FLOPs of a real process exactly."""

from collections import Counter

import pytest

from hlat.rehearsal import rehearse
from tests.support.distributed.rehearsed import ROWS, Row, measure
from tests.support.distributed.workers import Pool

_QUICK = ("one process, average", "DP2, ZeRO 3", "TP2 + SP", "PP2 zbv", "Muon, TP4")


def _turn(row: Row) -> object:
    return pytest.param(row, marks=() if str(row).startswith(_QUICK) else pytest.mark.slow, id=str(row))


@pytest.mark.parametrize("row", [_turn(row) for row in ROWS])
def test_rehearsed_numbers_equal_measured_ones(row: Row, pool: Pool) -> None:
    """Compare every rank: peak bytes, bytes between steps, messages, FLOPs, and blocks of a checkpoint."""
    world = row.case.world
    measured = pool.run(world, measure, row.content)
    for report in rehearse(row.recipe, world, range(world)).ranks:
        step = measured[report.rank]
        assert report.peak_bytes == sum(report.peak.values()) == step.peak, f"rank {report.rank}"
        assert sum(report.between_steps.values()) == step.between, f"rank {report.rank}"
        messages: Counter[tuple[str, int]] = Counter()
        for message, count in report.messages.items():
            messages[message.kind, message.bytes] += count
        assert dict(messages) == dict(step.traffic), f"rank {report.rank}"
        assert (report.checkpoint_blocks, report.checkpoint_bytes) == step.checkpoint, f"rank {report.rank}"
        assert report.flops == step.flops, f"rank {report.rank}"
