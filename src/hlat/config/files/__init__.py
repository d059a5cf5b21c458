"""Recipe files and Hugging Face config.json files, read into plain values."""

from hlat.config.files.config_json import read_config_json
from hlat.config.files.hf_import import hf_to_model
from hlat.config.files.model_folder import ModelFolder, read_model_folder
from hlat.config.files.yaml_loader import RECIPE_ENDINGS, apply_overrides, find_recipe, merge, read_file
from hlat.config.files.yaml_text import load_yaml

__all__ = [
    "RECIPE_ENDINGS",
    "ModelFolder",
    "apply_overrides",
    "find_recipe",
    "hf_to_model",
    "load_yaml",
    "merge",
    "read_config_json",
    "read_file",
    "read_model_folder",
]
