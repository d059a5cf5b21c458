"""The JSON schema of recipe files, for editors.

A file may leave out more than a resolved recipe: a preset stands for the numbers of a model, and includes stand for
whole sections.
"""

from typing import Any

from hlat.config.recipe import Recipe


def recipe_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a recipe file."""
    schema = Recipe.model_json_schema()
    schema.pop("required", None)  # an included file may hold any section
    schema["$defs"]["ModelConfig"].pop("required", None)  # a preset or a config.json may hold any number
    schema["properties"]["include"] = {
        "description": "Recipe file or files, relative to this one, whose sections lie underneath these.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    schema["$defs"]["ModelConfig"]["properties"]["from"] = {
        "description": "Folder of weights to start from, a checkpoint of hlat or a Hugging Face model: stands for its "
        "numbers in this section, for checkpoint.init_from and for data.tokenizer.path.",
        "anyOf": [{"type": "string"}, {"type": "null"}],
    }
    return schema
