"""Fields of transfer: all that is missing, and all that would be ignored, is said at once."""

from typing import Any

import pytest

from hlat.config import OwnOptimizerConfig, RecipeError
from hlat.config.load import parse_recipe
from hlat.optim import optimizer_spec

SIZES = {"vocab_size": 512, "layers": 2, "hidden_size": 32, "intermediate_size": 96, "heads": 4}


def problems(**optimizer: Any) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"model": SIZES, "data": {"path": "none"}, "training": {"steps": 9}, "optimizer": optimizer})
    return {problem.path.removeprefix("optimizer."): str(problem) for problem in caught.value.problems}


def test_what_a_rule_needs_is_asked_for() -> None:
    assert set(problems(transfer="completep")) == {"base_hidden_size", "base_layers"}
    assert "Give its hidden_size" in problems(transfer="mup", kind="muon")["base_hidden_size"]


def test_what_a_rule_does_not_use_is_refused() -> None:
    assert set(problems(base_hidden_size=16, base_head_dim=8)) == {"base_hidden_size", "base_head_dim"}
    found = problems(transfer="mup", base_hidden_size=16, base_layers=2)
    assert set(found) == {"base_layers"} and "optimizer.transfer=completep" in found["base_layers"]
    with pytest.raises(RecipeError, match=r"optimizer\.transfer"):
        optimizer_spec(OwnOptimizerConfig.model_validate({"kind": "torch.optim:RAdam", "transfer": "mup"}), "fp32")
