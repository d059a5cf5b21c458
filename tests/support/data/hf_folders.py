"""Writer of the folders of Hugging Face's ``Dataset.save_to_disk`` for tests, from their description.

``datasets`` is not installed for the tests, since it brings pandas and more; ``tests/data/formats/saved_dataset`` is a
folder that it wrote.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc

STATE = {
    "_fingerprint": "6d967daf3c129edd",
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}


def write_dataset(folder: Path, tables: Sequence[pa.Table], batch: int = 1000, **state: Any) -> Path:
    """Write a dataset of several files, arrow streams of record batches of ``batch`` rows; return the folder."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(tables):05d}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=batch)
    content = {**STATE, "_data_files": [{"filename": name} for name in names], **state}
    (folder / "state.json").write_text(json.dumps(content, indent=2, sort_keys=True))
    info = {"citation": "", "description": "", "features": {}, "homepage": "", "license": ""}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
    return folder
