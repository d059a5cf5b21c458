"""With transfer, any layout trains the same model: multipliers are in the weights, and in the norm of the gradient."""

import pytest
import torch

from tests.support.distributed.comparing import differences, reference, within_bounds
from tests.support.distributed.jobs import train
from tests.support.distributed.layouts import CALM, NORMS_AFTER, ODD, TIED, Case, recipe_content
from tests.support.distributed.workers import Pool

TRANSFER = {"transfer": "completep", "base_hidden_size": 16, "base_layers": 2, "base_head_dim": 4}
SHORT = 4


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(Case("TP2 x PP2", 4, {"tensor": 2, "pipeline": 2}), "adamw", id="TP2 x PP2"),
        pytest.param(Case("PP2, tied", 2, {"pipeline": 2}, dict(TIED)), "adamw", id="PP2, tied"),
        pytest.param(Case("TP2, ZeRO 1", 2, {"tensor": 2}, dict(ODD)), "muon", id="TP2, norms of heads, muon"),
        pytest.param(
            Case("CP2, ZeRO 3", 2, {"context": 2, "zero": 3}, dict(NORMS_AFTER), lr=CALM), "adamw", id="CP2, ZeRO 3"
        ),
    ],
)
def test_any_layout_trains_the_same_model(case: Case, kind: str, pool: Pool) -> None:
    changes = {"optimizer": {"kind": kind, "lr": case.lr, "clip_norm": 0.3, **TRANSFER}}
    results = pool.run(case.world, train, recipe_content(case, **changes), SHORT, torch.float64)
    expected = reference(case, torch.float64, SHORT, **changes)
    assert within_bounds(differences(case, results, expected, torch.float64))
