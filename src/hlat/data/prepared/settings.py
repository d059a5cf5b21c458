"""Settings of the data section that decide the prepared tokens, and the differences between two sets of them.

    data section --content_settings--> what decides tokens --setting_differences--> one sentence per difference

data.unreadable_rows is not among them: with any value, the result is the same, or preparation fails.
"""

import re
from pathlib import Path
from typing import Any

from hlat.config import DataConfig
from hlat.data.corpus_files import source_columns
from hlat.data.stores.remote import local_path
from hlat.data.tokenizers.load import load_tokenizer


def recipe_locations(config: DataConfig) -> dict[str, list[str]]:
    """List the settings that locate the corpus and the tokenizer, as "field=value", by "corpus" and "tokenizer".

    After corpus or tokenizer was deleted, prepared data is still used for recipes with the same locations. A tokenizer
    trained on the corpus has none.
    """
    corpus = {"data.path": config.path}
    corpus |= {f"data.sources.{index}.path": source.path for index, source in enumerate(config.sources)}
    corpus["data.validation.path"] = config.validation.path
    tokenizer = config.tokenizer
    end = "null" if tokenizer.eos_token is None else tokenizer.eos_token
    loaded = [f"data.tokenizer.path={tokenizer.path}", f"data.tokenizer.eos_token={end}"]
    return {
        "corpus": [f"{field}={path}" for field, path in corpus.items() if path is not None],
        "tokenizer": [] if tokenizer.path is None else loaded,
    }


def content_settings(config: DataConfig, tokenizer_sha256: str | None = None) -> dict[str, Any]:
    """Return the settings that decide the prepared content, by field name; paths are not among them.

    ``tokenizer_sha256`` stands for the recipe's tokenizer if its file is gone. DataError if the tokenizer cannot be
    read.
    """
    settings: dict[str, Any] = {
        **_columns(config),
        "data.mode": config.mode,
        "data.duplicates": config.duplicates,
    }
    if config.mode == "online":
        settings["data.streams"] = config.streams  # decides the size of the blocks of small corpora
    else:
        settings["data.shard_tokens"] = config.shard_tokens
    tokenizer = config.tokenizer
    if tokenizer.path is not None:
        is_deleted = tokenizer_sha256 is not None and not Path(local_path(tokenizer.path)).exists()
        settings["data.tokenizer.path (content)"] = (
            tokenizer_sha256
            if is_deleted
            else load_tokenizer(tokenizer.path, tokenizer.eos_token, is_saved=True).sha256  # prepare is strict
        )
    else:
        settings["data.tokenizer.train"] = tokenizer.train
        settings["data.tokenizer.eos_token"] = tokenizer.eos_token
        if tokenizer.train == "bpe":
            settings["data.tokenizer.vocab_size"] = tokenizer.vocab_size
            settings["data.tokenizer.train_bytes"] = tokenizer.train_bytes
    validation = config.validation
    settings["data.validation.path"] = "given" if validation.path is not None else None
    if validation.path is None:
        settings["data.validation.fraction"] = validation.fraction
        if validation.fraction > 0:
            settings["data.validation.by"] = validation.by
    return settings


def _columns(config: DataConfig) -> dict[str, list[str | None]]:
    """Return the columns of the sources by the field that names them: text_column, and others that a source has."""
    columns = source_columns(config)
    fields = ["text_column", *(column.kind.field for column in columns)]
    return {f"data.{field}": [c.name if c.kind.field == field else None for c in columns] for field in fields}


def setting_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe each setting that differs, in one sentence each."""
    return [
        f"{name}: prepared with {_format(before, name)}, now {_format(now, name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name, _NOT_SET) != now.get(name, _NOT_SET)
    ]


_NOT_SET = object()


def _format(settings: dict[str, Any], name: str) -> str:
    return str(settings[name]) if name in settings else "none"


def recipe_source_names(config: DataConfig) -> dict[int, str | None]:
    """Return the name of each source by index, or None; -1 is data.validation.path, "validation"."""
    names: list[str | None] = [] if config.path is None else [None]
    return {-1: "validation", **dict(enumerate([*names, *(source.name for source in config.sources)]))}


def paths_by_source(locations: list[str]) -> dict[int, str]:
    """Extract the path of each source, by its index, from the "corpus" entry of ``recipe_locations``."""
    matches = (re.match(r"data\.(?:sources\.(\d+)\.)?path=(.*)", location, re.DOTALL) for location in locations)
    return {int(match[1] or 0): match[2] for match in matches if match is not None}
