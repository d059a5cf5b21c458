"""The coordinate check: what it observes, what a right rule gives, and that no wrong row of the table passes."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hlat.config import ModelConfig, OptimizerConfig, Recipe, parse_recipe
from hlat.ladder import CoordinateTable, coordinate_lines, coordinate_table, coordinates_json
from hlat.ladder.coordinates import (
    BOUND,
    DEPTH,
    EMBEDDING,
    FIRST,
    HIDDEN,
    LAST,
    LOGITS,
    MIDDLE,
    SCORES,
    WIDTH,
    observe,
    random_batch,
    recipe_of_size,
)
from hlat.model import build
from hlat.model.parametrization import Scale, scale_of
from hlat.model.spec import Component, TensorSpec
from tests.support.model.families import our_model, twin

# Muon's own share of a change is seen if AdamW, which moves the embedding, takes smaller steps.
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "adamw", "lr": 4e-3},
    "muon": {"kind": "muon", "lr": 2e-2, "adamw_lr": 1e-3},
}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {"qk_norm": True, "kv_heads": 2}}
COMPLETEP = {"transfer": "completep", "base_hidden_size": 64, "base_layers": 2}
# The ends of three sizes: a slope over a factor of 4.
WIDTHS, DEPTHS, STEPS = (32, 128), (2, 8), 3


def recipe_of(kind: str, model: str, **optimizer: Any) -> Recipe:
    sizes = {"vocab_size": 256, "layers": 2, "hidden_size": 64, "intermediate_size": 176, "heads": 4}
    return parse_recipe(
        {
            "model": sizes | MODELS[model],
            "data": {"path": "unused", "sequence_length": 64, "tokenizer": {"train": "char"}},
            "optimizer": KINDS[kind] | optimizer,
            "training": {"steps": 10},
        }
    )


def small(kind: str, model: str, **optimizer: Any) -> CoordinateTable:
    return coordinate_table(recipe_of(kind, model, **optimizer), WIDTHS, DEPTHS, STEPS)


def verdicts(table: CoordinateTable, axis: str) -> set[str]:
    return {row.verdict for row in table.rows if row.axis == axis}


def test_quantities_are_those_of_transformers() -> None:
    recipe = recipe_of_size(recipe_of("adamw", "qwen3"), 64, 4, 32)
    ours, batch = our_model(recipe.model), random_batch(recipe)
    found = observe(ours, batch)
    theirs = twin(ours, torch.float32)
    theirs.set_attn_implementation("eager")
    hidden: list[torch.Tensor] = []
    theirs.model.layers[2].mlp.down_proj.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    last: list[torch.Tensor] = []  # before the final norm, which the last of hidden_states has
    theirs.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    with torch.no_grad():
        out = theirs(batch.inputs_BS, output_hidden_states=True, output_attentions=True)
    states = out.hidden_states
    causal = found[SCORES].masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf).softmax(-1)
    expected = {
        EMBEDDING: (found[EMBEDDING], states[0]),
        FIRST: (found[FIRST], states[1]),
        MIDDLE: (found[MIDDLE], states[2]),  # of four blocks, two are before it
        SCORES: (causal, out.attentions[2]),
        HIDDEN: (found[HIDDEN], hidden[0]),
        LAST: (found[LAST], last[0]),
        LOGITS: (found[LOGITS], out.logits),
    }
    assert found.keys() == expected.keys()
    for ours_, theirs_ in expected.values():
        torch.testing.assert_close(ours_, theirs_, rtol=1e-4, atol=1e-5)
    # Nothing of the observation is left behind.
    with torch.no_grad():
        assert torch.equal(ours(batch.inputs_BS), found[LOGITS])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in ours.modules())


def test_slopes_are_those_of_numpy_and_sizes_those_of_the_initial_model() -> None:
    recipe = recipe_of("adamw", "llama")
    table = coordinate_table(recipe, (32, 64, 128), DEPTHS, 1)
    for row in table.rows:
        slope = np.polyfit(np.log(table.axes[row.axis]), np.log(row.values), 1)[0]
        assert row.slope == pytest.approx(slope, abs=1e-9)
    model = recipe_of_size(recipe, 64, 2, 32)
    fresh = observe(build(model.model, device="cpu", seed=model.training.seed), random_batch(model))
    for row in table.rows:
        if row.axis == WIDTH and not row.is_change:
            assert row.values[1] == pytest.approx(float(np.sqrt(np.mean(fresh[row.quantity].numpy() ** 2))), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("adamw", "qwen3"),
        ("muon", "llama"),
        pytest.param("adamw", "llama", marks=pytest.mark.slow),
        pytest.param("muon", "qwen3", marks=pytest.mark.slow),
    ],
)
def test_with_a_rule_everything_stays_and_without_it_does_not(kind: str, model: str) -> None:
    with_rule, without = small(kind, model, **COMPLETEP), small(kind, model)
    assert all(row.has_rule for row in with_rule.rows) and with_rule.broken == []
    assert not any(row.has_rule for row in without.rows) and without.broken == []
    assert "grows" in verdicts(without, WIDTH) and "grows" in verdicts(without, DEPTH)
    # n updates that agree, against a random sum: one power of the width more, before it saturates
    (logits,) = [row for row in without.rows if (row.axis, row.quantity, row.is_change) == (WIDTH, LOGITS, True)]
    assert logits.slope > 3 * BOUND


def test_mup_is_a_rule_for_widths_only() -> None:
    table = small("adamw", "llama", transfer="mup", base_hidden_size=64)
    assert {row.axis for row in table.rows if row.has_rule} == {WIDTH} and table.broken == []
    assert "grows" in verdicts(table, DEPTH)


# What a wrong row of the table in parametrization.py gives a tensor, where m and l are the factors of the base.
def hidden_rate(tensor: TensorSpec, scale: Scale, m: float, depth: float) -> Scale:
    return replace(scale, rate=scale.rate * m) if tensor.is_hidden_matrix else scale


def hidden_initial(tensor: TensorSpec, scale: Scale, m: float, depth: float) -> Scale:
    return replace(scale, initial=scale.initial * math.sqrt(m)) if tensor.is_hidden_matrix else scale


def embedding_initial(tensor: TensorSpec, scale: Scale, m: float, depth: float) -> Scale:
    return replace(scale, initial=scale.initial / math.sqrt(m)) if tensor.component is Component.EMBEDDING else scale


def embedding_rate(tensor: TensorSpec, scale: Scale, m: float, depth: float) -> Scale:
    return replace(scale, rate=scale.rate / m) if tensor.component is Component.EMBEDDING else scale


def head_multiplier(tensor: TensorSpec, scale: Scale, m: float, depth: float) -> Scale:
    is_head = tensor.component is Component.HEAD
    return replace(scale, initial=scale.initial * m, rate=scale.rate * m) if is_head else scale


def head_rate(tensor: TensorSpec, scale: Scale, m: float, depth: float) -> Scale:
    return replace(scale, rate=scale.rate * m) if tensor.component is Component.HEAD else scale


def added_multiplier(tensor: TensorSpec, scale: Scale, m: float, depth: float) -> Scale:
    is_added = tensor.is_added
    return replace(scale, initial=scale.initial * depth, rate=scale.rate * depth) if is_added else scale


def epsilon(tensor: TensorSpec, scale: Scale, m: float, depth: float) -> Scale:
    return replace(scale, eps=scale.eps * m)


@pytest.mark.parametrize(
    ("wrong", "kind", "axis"),
    [
        (hidden_rate, "adamw", WIDTH),
        (hidden_rate, "muon", WIDTH),
        (hidden_initial, "adamw", WIDTH),
        (embedding_initial, "adamw", WIDTH),
        (embedding_rate, "adamw", WIDTH),
        (head_multiplier, "adamw", WIDTH),
        (head_rate, "adamw", WIDTH),
        (added_multiplier, "adamw", DEPTH),
        (added_multiplier, "muon", DEPTH),
        (epsilon, "adamw", WIDTH),
    ],
)
def test_a_wrong_row_is_noticed(wrong: Any, kind: str, axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tensor: TensorSpec, model: ModelConfig, optimizer: OptimizerConfig) -> Scale:
        return wrong(tensor, scale_of(tensor, model, optimizer), model.hidden_size / 64, model.layers / 2)

    monkeypatch.setattr("hlat.model.decoder.scale_of", broken)
    # Epsilon matters where it is larger than the gradient.
    large = {"eps": 1e-2} if wrong is epsilon else {}
    assert axis in {row.axis for row in small(kind, "llama", **COMPLETEP, **large).broken}


def test_a_table_fits_a_terminal_and_is_json() -> None:
    table = small("adamw", "llama", **COMPLETEP)
    lines = list(coordinate_lines(table))
    assert max(map(len, lines)) <= 80 and lines[-1] == "All that the recipe's rule is about stays."
    content = json.loads(json.dumps(coordinates_json(table)))
    assert content["holds"] and len(content["rows"]) == 28 and content["axes"] == {"width": [32, 128], "depth": [2, 8]}
    wrong = replace(table, rows=tuple(replace(row, slope=-2.0) for row in table.rows))
    assert not coordinates_json(wrong)["holds"]
    assert list(coordinate_lines(wrong))[-1].startswith("Not as the rule promises: embedding (width), ")
