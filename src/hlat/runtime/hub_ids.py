"""Names of data sets of the Hugging Face Hub where a path is expected: a message says what to write instead."""

import re

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILE_ENDING = re.compile(r"\.(jsonl?|ndjson|parquet|pq|arrow|txt|csv|tsv|gz|zst|bin|idx|model|ya?ml)$", re.IGNORECASE)


def dataset_id_advice(path: str) -> str:
    """Return what to write instead of a path that does not exist but has the form of an id; empty if it has not.

    Args:
        path: the path, as in ``HuggingFaceFW/fineweb``.
    """
    if _HUB_ID.fullmatch(path) is None or _FILE_ENDING.search(path):
        return ""
    folder = path.partition("/")[2]
    return (
        f"If it is a data set of the Hugging Face Hub, name its files, as in hf://datasets/{path}/**/*.parquet; or "
        f"download them with `hf download {path} --repo-type dataset --local-dir {folder}`, and give "
        f"'{folder}/**/*.parquet'."
    )
