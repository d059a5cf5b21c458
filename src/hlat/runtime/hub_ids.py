"""Names of the Hugging Face hub where a path is expected: recognised, so that a message can say what to do instead."""

import re
from typing import Literal

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILE_ENDING = re.compile(r"\.(jsonl?|ndjson|parquet|pq|arrow|txt|csv|tsv|gz|zst|bin|idx|model|ya?ml)$", re.IGNORECASE)


def hub_id_advice(path: str, kind: Literal["tokenizer", "dataset", "model"]) -> str:
    """Return what to do with a path that does not exist but has the form of a hub id; empty if it has not.

    Args:
        path: the path, as in ``Qwen/Qwen3-8B``.
        kind: kind of thing that was expected there.
    """
    if _HUB_ID.fullmatch(path) is None or _FILE_ENDING.search(path):
        return ""
    folder = path.partition("/")[2]
    options = {
        "tokenizer": "--include 'tokenizer*' --local-dir",
        "dataset": "--repo-type dataset --local-dir",
        "model": "--local-dir",
    }[kind]
    name = {"tokenizer": folder, "dataset": f"'{folder}/**/*.parquet'", "model": folder}[kind]
    return (
        f"It looks like the id of a {kind} on the Hugging Face hub, and hlat reads files: download it with "
        f"`hf download {path} {options} {folder}`, and give {name}."
    )
