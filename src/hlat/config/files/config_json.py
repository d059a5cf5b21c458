"""Reading the config.json of a Hugging Face model; every error is the end of a sentence."""

import json
from pathlib import Path
from typing import Any

from hlat.config.value_checks import size_problem
from hlat.runtime.storage.small_files import read_small_file


def read_config_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a config.json.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        ValueError: says why it cannot be read, as the end of a sentence.
    """
    try:
        content = json.loads(read_small_file(path / "config.json" if path.is_dir() else path))
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno} is not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    if (too_large := size_problem(content)) is not None:
        raise ValueError(too_large.rstrip("."))
    return content
