"""A URL with a credential is refused in every field of a recipe, and not repeated; other URLs are accepted."""

import json
from typing import Any

import pytest

from hlat.config import RecipeError, load_recipe
from hlat.config.load import parse_recipe
from tests.support.fuzz.odd_values import fields

SECRETS = ["https://S3CR3T@host/x", "https://host/x?k=S3CR3T", "s3://u%3AS3CR3T@bucket/x", "https://h/x#a=S3CR3T"]


def recipe_with(field: str, value: Any) -> dict[str, Any]:
    """Recipe with a value in one field; for lists of sections in their first element."""
    content: dict[str, Any] = {"model": {"preset": "tiny-1m"}, "data": {"path": "x"}, "training": {"steps": 2}}
    top, *inner = field.split(".")
    for part in reversed(inner):
        value = [value] if part == "0" else {part: value}
    return {**content, top: {**content.get(top, {}), **value} if isinstance(value, dict) else value}


@pytest.mark.parametrize("secret", SECRETS)
def test_every_field_refuses_a_secret(secret: str) -> None:
    for field in fields():
        with pytest.raises(RecipeError) as caught:
            parse_recipe(recipe_with(field, secret))
        assert "S3CR3T" not in str(caught.value), field
        assert [p for p in caught.value.problems if p.path == field and "the URL holds" in p.reason], field


def test_keys_and_nested_values_with_a_secret_are_refused() -> None:
    secret = SECRETS[0]
    for wrong in ({secret: 1}, {"data": {"phases": [{"weights": {secret: 1}}]}}, {"data": {"sources": [[[secret]]]}}):
        with pytest.raises(RecipeError, match="the URL holds a user name or a token") as caught:
            parse_recipe({**recipe_with("run.name", "a"), **wrong})
        assert "S3CR3T" not in str(caught.value)


def test_messages_about_overrides_and_files_do_not_repeat_secrets(tmp_path) -> None:
    (tmp_path / "r.yaml").write_text(f"data: {{path: {SECRETS[0]}, ]\n")
    with pytest.raises(RecipeError, match=r"not valid YAML.*https://\.\.\.@host/x") as caught:
        load_recipe(tmp_path / "r.yaml")
    assert "S3CR3T" not in str(caught.value)
    (tmp_path / "r.yaml").write_text(json.dumps(recipe_with("run.name", "a")))
    for override in (f"data.path.x={SECRETS[1]}", f"{SECRETS[1]}", f"data.path=[{SECRETS[3]}", f"nosuch={SECRETS[2]}"):
        with pytest.raises(RecipeError) as caught:
            load_recipe(tmp_path / "r.yaml", [override])
        assert "S3CR3T" not in str(caught.value), override


def test_urls_of_public_downloads_are_accepted() -> None:
    for url in ("https://huggingface.co/x/resolve/main/a.jsonl?download=true", "s3://bucket/part-?.jsonl"):
        assert parse_recipe(recipe_with("data.path", url)).data.path == url


def test_the_message_names_a_way_out() -> None:
    with pytest.raises(RecipeError, match="fetch the file and give its path: the same text is the same data"):
        parse_recipe(recipe_with("data.path", SECRETS[1]))
