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


@pytest.mark.parametrize("wrong", [5, None, 2.5, ["quickstart"], b"quickstart"])
def test_what_can_be_no_recipe_is_refused_in_words(wrong: object) -> None:
    for call in (hlat.load_recipe, hlat.train):
        with pytest.raises(hlat.RecipeError, match="is no recipe") as refused:
            call(wrong)  # type: ignore[operator]
        assert "Give the path of a recipe file" in str(refused.value)


@pytest.mark.parametrize("overrides", [5, [5], {5: 1}])
def test_what_can_be_no_overrides_is_refused_in_words(overrides: object) -> None:
    with pytest.raises(hlat.RecipeError, match=r"holds no overrides.*training\.steps=100"):
        hlat.load_recipe("quickstart", overrides)  # type: ignore[arg-type]


def test_a_recipe_that_is_constructed_of_wrong_sections_has_the_errors_of_a_file(tmp_path: Path) -> None:
    sections: dict[str, object] = {"model": {"layers": "two"}, "data": {"path": "x"}, "training": {}, "mdel": {}}
    with pytest.raises(hlat.RecipeError) as refused:
        hlat.Recipe(**sections)  # type: ignore[arg-type]
    with pytest.raises(hlat.RecipeError) as of_mapping:
        hlat.load_recipe(sections)
    assert [each.path for each in of_mapping.value.problems] == [each.path for each in refused.value.problems]
    assert "pydantic" not in str(refused.value) and "validation error" not in str(refused.value)
    with pytest.raises(hlat.RecipeError, match="takes sections by name"):
        hlat.Recipe(5)  # type: ignore[call-arg]
    with pytest.raises(hlat.RecipeError, match=r"hlat\.load_recipe"):
        hlat.Recipe(model={"preset": "tiny-1m"}, data={"path": "x"}, training={"steps": 1})  # type: ignore[arg-type]


def test_a_recipe_can_be_constructed_of_its_own_sections() -> None:
    found = hlat.load_recipe("quickstart", {"data.path": "x"})
    assert hlat.Recipe(**found.model_dump()) == found == hlat.Recipe(**dict(found)) == found.model_copy(deep=True)


def test_a_loaded_recipe_that_is_changed_says_how_it_is_done() -> None:
    found = hlat.load_recipe("quickstart", {"data.path": "x"})
    with pytest.raises(hlat.RecipeError, match=r"steps: cannot be changed.*hlat\.load_recipe\(PATH"):
        found.training.steps = 3  # type: ignore[misc]
    assert found.model_copy(deep=True) == found


def test_a_function_that_there_is_not_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'trian'; did you mean train\?"):
        hlat.trian  # noqa: B018
    with pytest.raises(AttributeError, match=r"it has average, .*, train"):
        hlat.fit  # noqa: B018
