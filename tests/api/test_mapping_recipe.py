"""A recipe as a mapping in Python: the same recipe as the file with the same sections, and the same errors."""

from pathlib import Path

import pytest
import yaml

import hlat


@pytest.fixture
def sections(tiny_recipe: str) -> dict:
    """The sections of the tiny recipe, with a text."""
    return yaml.safe_load(tiny_recipe) | {"model": {"preset": "tiny-34m"}}


@pytest.mark.parametrize("overrides", [{}, {"training.steps": 7, "data.path": "other"}, ["optimizer.lr=1e-4"]])
def test_a_mapping_is_the_file_with_these_sections(sections: dict, tmp_path: Path, overrides: object) -> None:
    sections["data"] = {"path": tmp_path / "texts"}  # a path as Python has it
    sections["optimizer"] = {"betas": (0.9, 0.99)}
    file = tmp_path / "recipe.yaml"
    written = sections | {"data": {"path": str(tmp_path / "texts")}, "optimizer": {"betas": [0.9, 0.99]}}
    file.write_text(yaml.safe_dump(written))
    before = repr(sections)
    assert hlat.load_recipe(sections, overrides) == hlat.load_recipe(file, overrides)
    assert repr(sections) == before, "the mapping of the caller stays as it was"


def test_all_problems_of_a_mapping_are_told_at_once(sections: dict) -> None:
    sections["data"] = {"path": "texts"}
    sections["training"] = {"stepz": 3}
    sections["batch"] = {"global_batch": 0}
    with pytest.raises(hlat.RecipeError) as raised:
        hlat.load_recipe(sections, {"optimizer.lr": -1})
    assert {"training.stepz", "batch.global_batch", "optimizer.lr"} <= {one.path for one in raised.value.problems}


def test_values_that_no_file_can_hold_are_refused(sections: dict) -> None:
    sections["data"] = {"path": "texts", "sources": [sections]}
    with pytest.raises(hlat.RecipeError, match="no recipe file can hold"):
        hlat.load_recipe(sections)
