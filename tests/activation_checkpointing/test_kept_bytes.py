"""The counted activation bytes equal the bytes that a forward pass keeps alive (law 8: plan and run agree)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.activation_checkpointing import POLICIES
from hlat.model.activations import RankWorkload, activation_bytes
from hlat.model.spec import RECOMPUTABLE
from tests.support.activation_checkpointing.small import (
    BATCH,
    KINDS,
    KINDS_IN_MODES,
    LENGTH,
    MODES_TESTED,
    config_of,
    document_positions,
    kept,
    model_of,
)


@pytest.mark.parametrize(("kind", "mode"), KINDS_IN_MODES)
def test_policies_save_the_counted_bytes(kind: str, mode: str) -> None:
    config = config_of(kind)
    for recomputed in POLICIES.values():
        wanted = activation_bytes(config, BATCH, LENGTH, mode, recomputed).total
        assert kept(model_of(config, mode, [recomputed] * 2)) == wanted


@pytest.mark.parametrize("mode", MODES_TESTED)
@pytest.mark.parametrize("kind", ["coalesced", "normed queries and keys, separate"])
def test_attention_within_documents_saves_the_counted_bytes(kind: str, mode: str) -> None:
    """The same as complete rows, plus rotations and document start for each token."""
    config = config_of(kind)
    for recomputed in POLICIES.values():
        wanted = activation_bytes(config, BATCH, LENGTH, mode, recomputed, RankWorkload(isolated=True)).total
        assert kept(model_of(config, mode, [recomputed] * 2), document_positions()) == wanted


@settings(max_examples=20)
@given(
    st.sampled_from(sorted(KINDS)), st.sampled_from(MODES_TESTED), st.frozensets(st.sampled_from(sorted(RECOMPUTABLE)))
)
def test_any_choice_of_steps_saves_the_counted_bytes(kind: str, mode: str, recomputed: frozenset[str]) -> None:
    config = config_of(kind)
    counted = activation_bytes(config, BATCH, LENGTH, mode, recomputed)
    assert kept(model_of(config, mode, [recomputed] * 2)) == counted.total


def test_nothing_is_left_after_backward() -> None:
    """Neither placeholders nor recomputed tensors outlive the graph."""
    config = config_of("coalesced")
    model = model_of(config, "fp32", [POLICIES["full"]] * 2)
    first = kept(model)
    assert all(kept(model) == first for _ in range(2))
