"""FLOPs of products, counted by formula: two for each multiply-add, whatever form of the operation does it."""

from math import prod
from typing import Any

import pytest
import torch

from hlat.model import CrossEntropy
from hlat.model.counts import flops_per_token
from hlat.rehearsal import rehearse
from hlat.rehearsal.observers import OperationObserver
from hlat.rehearsal.trace import PRODUCT, Trace, operation_flops
from tests.support.rehearsal.small_recipes import recipe_of

ROWS, COLUMNS, WIDTH, BATCH = 3, 5, 7, 2
LEFT, RIGHT, SUM = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, COLUMNS), torch.ones(ROWS, COLUMNS)
SHAPES = {"in a batch": (BATCH, ROWS, COLUMNS, WIDTH), "one": (1, ROWS, COLUMNS, WIDTH)}


def stacked(tensor: torch.Tensor) -> torch.Tensor:
    """Copies of a matrix in a batch."""
    return tensor.expand(BATCH, *tensor.shape).clone()


@pytest.mark.parametrize(
    ("compute", "shape"),
    [
        pytest.param(lambda: LEFT @ RIGHT, "one", id="mm"),
        pytest.param(lambda: torch.mm(LEFT, RIGHT, out=torch.empty(ROWS, COLUMNS)), "one", id="mm into out"),
        pytest.param(lambda: torch.addmm(SUM, LEFT, RIGHT), "one", id="addmm"),
        pytest.param(lambda: SUM.clone().addmm_(LEFT, RIGHT), "one", id="addmm_"),
        pytest.param(lambda: stacked(LEFT) @ stacked(RIGHT), "in a batch", id="bmm"),
        pytest.param(lambda: stacked(SUM).baddbmm_(stacked(LEFT), stacked(RIGHT)), "in a batch", id="baddbmm_"),
    ],
)
def test_every_form_of_a_product_has_two_flops_per_multiply_add(compute: Any, shape: str) -> None:
    counted, trace = list[int](), Trace(lambda arguments: "")
    with OperationObserver(lambda *operation: counted.append(operation_flops(*operation)), trace.observe):
        compute()
    assert sum(counted) == 2 * prod(SHAPES[shape])
    assert [(event.shape, event.flops) for event in trace.events if event.kind == PRODUCT] == [
        (SHAPES[shape], sum(counted))
    ]


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_a_loss_in_chunks_has_the_flops_of_a_whole_one(mode: str) -> None:
    """In fp32 products add to the head's gradient in place, in mixed precision another kernel adds them."""
    recipe = recipe_of(
        model={"vocab_size": 1 << 16, "layers": 1},
        batch={"global_batch": 16, "micro_batch": 16},
        precision={"mode": mode},
    )
    model, length = recipe.model, recipe.data.sequence_length
    tokens = recipe.batch.global_batch * length
    assert CrossEntropy().chunk(model.vocab_size, model.hidden_size) < tokens, "the loss has several chunks"
    # Attention recomputes its scores in backward: five products of s x s, where the model counts four.
    scores = 2 * tokens * model.layers * model.heads * model.n_head_dim * length
    (report,) = rehearse(recipe, 1).ranks
    assert report.flops == flops_per_token(model, length, "full") * tokens + scores
