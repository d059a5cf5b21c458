"""Which settings of the data section decide the prepared tokens, and how two sets of them differ.

data.unreadable_rows is not among them: whatever it is, what comes out is the same, or nothing.
"""

import re
from pathlib import Path
from typing import Any

from hlat.config.sections import DataConfig
from hlat.data.tokenizers import load_tokenizer


def recipe_locations(config: DataConfig) -> dict[str, list[str]]:
    """What of a recipe finds the corpus and the given tokenizer, as it is written there; empty for a trained one.

    Data stands in for what it was made from once that has gone, but only for what was asked for in these words.
    """
    corpus = {"data.path": config.path}
    corpus |= {f"data.sources.{index}.path": source.path for index, source in enumerate(config.sources)}
    corpus["data.validation.path"] = config.validation.path
    tokenizer = config.tokenizer
    end = "null" if tokenizer.eos_token is None else tokenizer.eos_token
    given = [f"data.tokenizer.path={tokenizer.path}", f"data.tokenizer.eos_token={end}"]
    return {
        "corpus": [f"{field}={path}" for field, path in corpus.items() if path is not None],
        "tokenizer": [] if tokenizer.path is None else given,
    }


def content_settings(config: DataConfig, tokenizer_sha256: str | None = None) -> dict[str, Any]:
    """The settings that decide the prepared content, by the names of their fields; paths are not among them.

    Args:
        config: the data section.
        tokenizer_sha256: what counts for a given tokenizer whose file is no longer there.

    Raises:
        DataError: a tokenizer that cannot be read; it counts by its content.
    """
    columns = [source.text_column or config.text_column for source in config.sources]
    settings: dict[str, Any] = {
        "data.text_column": [config.text_column, *columns] if config.path is not None else columns,
        "data.mode": config.mode,
        "data.duplicates": config.duplicates,
    }
    if config.mode == "online":
        settings["data.streams"] = config.streams  # small corpora are cut into blocks by it
    else:
        settings["data.shard_tokens"] = config.shard_tokens
    tokenizer = config.tokenizer
    if tokenizer.path is not None:
        gone = tokenizer_sha256 is not None and not Path(tokenizer.path).expanduser().exists()
        content = tokenizer_sha256 if gone else load_tokenizer(tokenizer.path, tokenizer.eos_token).sha256
        settings["data.tokenizer.path (content)"] = content
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


def setting_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One sentence for each setting that is not the same."""
    return [
        f"{name}: prepared with {_shown(before, name)}, now {_shown(now, name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name, _NOT_SET) != now.get(name, _NOT_SET)
    ]


_NOT_SET = object()


def _shown(settings: dict[str, Any], name: str) -> str:
    return str(settings[name]) if name in settings else "none"


def recipe_source_names(config: DataConfig) -> dict[int, str | None]:
    """What a recipe calls each source, by its index, None for nothing; -1 is the text of data.validation.path."""
    names: list[str | None] = [] if config.path is None else [None]
    return {-1: "validation", **dict(enumerate([*names, *(source.name for source in config.sources)]))}


def paths_by_source(places: list[str]) -> dict[int, str]:
    """The path of each source, by its index, from what ``places_of`` says of the corpus."""
    found = (re.match(r"data\.(?:sources\.(\d+)\.)?path=(.*)", place, re.DOTALL) for place in places)
    return {int(match[1] or 0): match[2] for match in found if match is not None}
