"""The table of odd values: each rule finds its example and not the usual value beside it; shipped recipes have none."""

from pathlib import Path
from typing import Any

import pytest

from hlat.config import load_recipe
from hlat.config.load import parse_recipe
from hlat.config.notes import ODD_VALUES, odd_settings

BASE: dict[str, Any] = {
    "model": {"preset": "tiny-1m"},
    "data": {"path": "x"},
    "schedule": {"warmup_steps": 100},
    "training": {"steps": 5000},
}
ROOT = Path(__file__).resolve().parents[3]

# rule, an odd section and a usual one
EXAMPLES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("learning-rate", {"optimizer": {"lr": 3.0}}, {"optimizer": {"lr": 0.01}}),
    ("learning-rate", {"optimizer": {"lr": 1e-7}}, {"optimizer": {"lr": 1e-5}}),
    ("learning-rate", {"optimizer": {"kind": "muon", "adamw_lr": 1.0}}, {"optimizer": {"kind": "muon"}}),
    ("betas", {"optimizer": {"betas": [0.999, 0.9]}}, {"optimizer": {"betas": [0.9, 0.999]}}),
    ("betas", {"optimizer": {"betas": [0.1, 0.95]}}, {"optimizer": {"betas": [0.9, 0.95]}}),
    ("weight-decay", {"optimizer": {"weight_decay": 1.0}}, {"optimizer": {"weight_decay": 0.2}}),
    ("epsilon", {"optimizer": {"eps": 0.001}}, {"optimizer": {"eps": 1e-5}}),
    ("epsilon", {"optimizer": {"eps": 1e-30}}, {"optimizer": {"eps": 1e-15}}),
    ("clipping", {"optimizer": {"clip_norm": 1000.0}}, {"optimizer": {"clip_norm": None}}),
    ("clipping", {"optimizer": {"clip_norm": 0.001}}, {"optimizer": {"clip_norm": 0.1}}),
    ("z-loss", {"optimizer": {"z_loss": 1.0}}, {"optimizer": {"z_loss": 1e-4}}),
    ("warm-up", {"schedule": {"warmup_steps": 4000}}, {"schedule": {"warmup_steps": 2000}}),
    ("no-warm-up", {"schedule": {"warmup_steps": 0}}, {"schedule": {"warmup_steps": 0}, "training": {"steps": 100}}),
    (
        "ramp",
        {"batch": {"ramp": [{"tokens": 10**12, "global_batch": 8}]}},
        {"batch": {"ramp": [{"tokens": 10**6, "global_batch": 8}]}},
    ),
    ("floor", {"schedule": {"min_ratio": 1.0}}, {"schedule": {"kind": "constant", "min_ratio": 1.0}}),
    ("horizon", {"schedule": {"horizon_steps": 1000}}, {"schedule": {"horizon_steps": 4000}}),
    ("no-validation", {"data": {"validation": {"fraction": 0.0}}}, {"data": {"validation": {"path": "y"}}}),
    ("evaluation", {"evaluation": {"every_steps": 1}}, {"evaluation": {"every_steps": 50}}),
    ("logging", {"training": {"log_every": 6000}}, {"training": {"log_every": 500}}),
    ("average", {"training": {"ema": {"start_step": 5000}}}, {"training": {"ema": {"start_step": 100}}}),
    ("average", {"training": {"ema": {"decay": 0.9999}}}, {"training": {"ema": {"decay": 0.999}}}),
    (
        "idle-device",
        {"batch": {"micro_batch": 1}, "data": {"sequence_length": 128}},
        {"batch": {"micro_batch": 1}, "data": {"sequence_length": 2048}},
    ),
    ("initial-weights", {"model": {"init_std": 1.0}}, {"model": {"init_std": 0.02}}),
]


def rules(change: dict[str, Any]) -> list[str]:
    sections = {name: {**BASE.get(name, {}), **change.get(name, {})} for name in {**BASE, **change}}
    return [note.rule for note in odd_settings(parse_recipe(sections))]


@pytest.mark.parametrize(("rule", "odd", "usual"), EXAMPLES)
def test_each_rule_finds_its_example_and_not_the_usual_value(rule, odd, usual):
    assert set(rules(odd)) == {rule}
    assert rules(usual) == []


def test_every_rule_has_an_example_a_name_of_its_own_and_a_line_in_the_documentation():
    names = [rule.name for rule in ODD_VALUES]
    assert sorted(set(names)) == sorted(names) and set(names) == {rule for rule, _, _ in EXAMPLES}
    page = (ROOT / "docs" / "checks.md").read_text(encoding="utf-8")
    assert [name for name in names if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
def test_shipped_recipes_have_usual_values(name):
    given = [] if name.startswith(("hlat", "trn2")) else ["data.path=x"]
    assert [str(note) for note in odd_settings(load_recipe(name, given))] == []


def test_a_note_says_field_value_reason_and_what_is_usual():
    sections = {**BASE, "optimizer": {"lr": 3.0}}
    (note,) = odd_settings(parse_recipe(sections))
    assert str(note).startswith("optimizer.lr=3: the first steps") and "Usual are 1e-4" in str(note)
    assert str(note).endswith("[learning-rate]")
