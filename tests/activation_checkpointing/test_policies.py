"""Recomputation is exact: loss and gradients have the bits of a model that saves everything."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.activation_checkpointing import POLICIES
from hlat.model import Decoder
from hlat.model.spec import RECOMPUTABLE
from tests.support.activation_checkpointing.small import (
    KINDS,
    KINDS_IN_MODES,
    MODES_TESTED,
    config_of,
    document_positions,
    model_of,
    tokens,
    trained,
)

CHOICES = st.frozensets(st.sampled_from(sorted(RECOMPUTABLE)))
NOTHING: frozenset[str] = frozenset()


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("positions", [None, document_positions()], ids=["complete rows", "isolated documents"])
@pytest.mark.parametrize(("kind", "mode"), KINDS_IN_MODES)
def test_every_policy_gives_the_same_bits(kind: str, mode: str, positions: torch.Tensor | None) -> None:
    config = config_of(kind)
    plain = trained(model_of(config, mode, [NOTHING] * 2), positions)
    for recomputed in POLICIES.values():
        assert same(trained(model_of(config, mode, [recomputed] * 2), positions), plain)


@settings(max_examples=20)
@given(st.sampled_from(sorted(KINDS)), st.sampled_from(MODES_TESTED), CHOICES, CHOICES)
def test_any_choice_of_steps_gives_the_same_bits(
    kind: str, mode: str, first: frozenset[str], second: frozenset[str]
) -> None:
    config = config_of(kind)
    plain = trained(model_of(config, mode, [NOTHING] * 2))
    assert same(trained(model_of(config, mode, [first, second])), plain)


def full_model() -> Decoder:
    return model_of(config_of("coalesced"), "fp32", [POLICIES["full"]] * 2)


def counted(model: Decoder) -> Counter[str]:
    """Count how often each step of the first block runs."""
    counts: Counter[str] = Counter()
    block = next(model.blocks())
    steps: list[tuple[Any, str]] = [
        (block.attention_norm, "forward"),
        (block.attention, "project"),
        (block.attention, "attend"),
        (block.attention.output, "forward"),
        (block.feed_forward, "project"),
        (block.feed_forward, "activate"),
        (block.feed_forward.down, "forward"),
    ]

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return wrapped

    for owner, name in steps:
        setattr(owner, name, counting(f"{type(owner).__name__}.{name} {id(owner)}", getattr(owner, name)))
    return counts


def test_no_step_is_recomputed_twice() -> None:
    model = full_model()
    counts = counted(model)
    trained(model)
    assert sorted(counts.values()) == [1] + [2] * 6, "all but the last product, whose result backward does not need"


def test_selective_recomputes_attention_and_swiglu_only() -> None:
    model = model_of(config_of("coalesced"), "fp32", [POLICIES["selective"]] * 2)
    counts = counted(model)
    trained(model)
    again = sorted(name.split()[0] for name, count in counts.items() if count == 2)
    assert again == ["Attention.attend", "FeedForward.activate"]
    assert max(counts.values()) == 2


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_a_retained_graph_can_be_differentiated_again(policy: str) -> None:
    model = model_of(config_of("coalesced"), "fp32", [POLICIES[policy]] * 2)
    ids = tokens()
    loss = model(ids, ids)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert same(list(first), list(second))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivatives_raise_an_error() -> None:
    model, ids = full_model(), tokens()
    loss = model(ids, ids)
    (gradient, *_) = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_without_gradients_nothing_changes() -> None:
    model, ids = full_model(), tokens()
    plain = model_of(config_of("coalesced"), "fp32", [NOTHING] * 2)
    with torch.no_grad():
        assert torch.equal(model(ids), plain(ids))


def test_gradients_accumulate_over_micro_batches_in_flight() -> None:
    """Several micro-batches run forward before the first backward pass, as in a pipeline."""
    results = []
    for recomputed in (NOTHING, POLICIES["full"], frozenset({"qkv", "inner", "residual"})):
        model = model_of(config_of("coalesced"), "fp32", [recomputed] * 2)
        ids = tokens()
        losses = [model(ids[:1], ids[:1]), model(ids[1:], ids[1:])]
        for loss in losses:
            loss.backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert same(results[1], results[0]) and same(results[2], results[0])
