"""Fields of transfer: all that is missing, and all that would be ignored, is said at once."""

from typing import Any

import pytest

from hlat.config import OwnOptimizerConfig, RecipeError
from hlat.config.load import parse_recipe
from hlat.config.sections.model import ModelConfig
from hlat.config.sections.training import AdamWConfig
from hlat.model import scale_lines
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


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bases", [(32, 2, 8), (16, 2, 8), (32, 1, 8), (32, 2, 4)], ids=str)
def test_norms_that_cannot_be_multiplied_are_refused_exactly_where_a_model_would_multiply_them(
    architecture: str, tied: bool, bases: tuple[int, int, int]
) -> None:
    model = {**SIZES, "architecture": architecture, "tie_embeddings": tied}
    names = ("base_hidden_size", "base_layers", "base_head_dim")
    optimizer = {"transfer": "completep", **dict(zip(names, bases, strict=True))}
    found = []
    for ask in (
        lambda: parse_recipe(
            {"model": model, "data": {"path": "none"}, "training": {"steps": 9}, "optimizer": optimizer}
        ),
        lambda: list(scale_lines(ModelConfig.model_validate(model), AdamWConfig.model_validate(optimizer))),
    ):
        try:
            ask()
        except RecipeError as error:
            found.append([problem.path for problem in error.problems])
        else:
            found.append([])
    assert found[0] == found[1] and (architecture != "gpt_oss" or not found[0])
