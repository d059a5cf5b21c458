"""The shipped recipes are valid, found by name, and HLAT's two are the published models and budgets."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from hlat.config import PRESETS, load_recipe, recipe_schema

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_is_valid_by_name_and_by_path(name):
    text = (FOLDER / f"{name}.yaml").read_text()
    has_text = any(key in text for key in ("  path:", "  sources:", "include:"))
    corpus = [] if has_text else ["data.path=corpus.txt"]
    assert load_recipe(name, corpus) == load_recipe(FOLDER / f"{name}.yaml", corpus)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_accepts_a_shipped_recipe(name, cli):
    lacks_text = name in ("quickstart", "books", "tiny-shakespeare")
    done = cli("check", "-v", "--no-files", FOLDER / f"{name}.yaml", *(["data.path=corpus.txt"] if lacks_text else []))
    assert done.returncode == 0, done.stderr
    assert "rates  fan-in" in done.stdout and "down_proj" in done.stdout


def test_a_folder_with_the_name_of_a_shipped_recipe_does_not_hide_it(tmp_path, monkeypatch):
    """`hlat quickstart` writes to the folder quickstart; the same command again has to work."""
    (tmp_path / "quickstart").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_recipe("quickstart", ["data.path=none"]).run.name == "quickstart"


def test_the_schema_for_editors_accepts_every_shipped_recipe_and_what_a_file_may_say():
    validator = jsonschema.Draft202012Validator(recipe_schema())
    for name in NAMES:
        validator.validate(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))
    validator.validate({"include": ["base.yaml"], "model": {"preset": "tiny-34m"}})
    assert not validator.is_valid({"model": {"heads": 7.5}}) and not validator.is_valid({"traning": {}})


@pytest.mark.parametrize(("name", "preset"), [("hlat-7b", "llama-2-7b"), ("hlat-70b", "llama-2-70b")])
def test_hlat_recipes_are_the_published_models(name, preset):
    model = load_recipe(name).model.model_dump(exclude_none=True)
    assert {key: model[key] for key in PRESETS[preset]} == PRESETS[preset]


@pytest.mark.parametrize("name", ["hlat-7b", "hlat-70b"])
def test_hlat_recipes_have_the_published_budget(name):
    recipe = load_recipe(name)
    assert recipe.tokens_per_step == 1024 * 4096
    assert recipe.total_steps == 429_154, "1.8 T tokens"
    assert recipe.horizon_steps == 500_000, "the cosine is longer than the run"


@pytest.mark.parametrize(("name", "published", "world"), [("trn2-7b", "hlat-7b", 64), ("trn2-70b", "hlat-70b", 512)])
def test_recipes_for_trainium2_are_the_published_runs_in_a_layout_without_a_pipeline(name, published, world):
    recipe, original = load_recipe(name, world=world), load_recipe(published)
    kept = ("model", "data", "batch", "optimizer", "schedule", "training", "precision")
    assert [getattr(recipe, section) for section in kept] == [getattr(original, section) for section in kept]
    assert recipe.parallel.pipeline == 1 and recipe.run.device == "neuron"
