"""The loss needs an fp32 gradient of the head only if the tokens of a micro-batch take more than one chunk."""

import pytest

from hlat.config.sections import ModelConfig
from hlat.model import CrossEntropy
from hlat.parallel.stages.transient_memory import _logits


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("item", [2, 4])
def test_the_gradient_of_the_head_is_accumulated_from_the_second_chunk_on(item: int, in_place: bool) -> None:
    """Bytes of a chunk: logits and their gradient, in the compute dtype and in fp32; fp32 works in place."""
    model = ModelConfig(vocab_size=60_000, layers=1, hidden_size=64, intermediate_size=128, heads=4)
    chunk, per_logit = CrossEntropy().chunk(model.vocab_size), item if in_place else {2: 2 + 2 + 4, 4: 4}[item]
    one = chunk * model.vocab_size * per_logit
    assert _logits(model, 1, chunk - 1, item, in_place) == one * (chunk - 1) / chunk
    assert _logits(model, 1, chunk, item, in_place) == one
    assert _logits(model, 1, chunk + 1, item, in_place) == one + model.vocab_size * model.hidden_size * 4
