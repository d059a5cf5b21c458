"""Which settings of the data section decide the prepared tokens, and how two sets of them differ."""

from pathlib import Path
from typing import Any

from hlat.config import DataConfig
from hlat.data.tokenizer import load_tokenizer


def places_of(config: DataConfig) -> list[str | None]:
    """Where the recipe looks: paths of the corpus, of validation text and of the tokenizer, as they are written."""
    sources = [config.path, *(source.path for source in config.sources)]
    return [*sources, config.validation.path, config.tokenizer.path]


def settings_of(config: DataConfig, tokenizer_sha256: str | None = None) -> dict[str, Any]:
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
        "data.shard_tokens": config.shard_tokens,
    }
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


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One sentence for each setting that is not the same."""
    return [
        f"{name}: prepared with {_shown(before, name)}, now {_shown(now, name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name, _NOT_SET) != now.get(name, _NOT_SET)
    ]


_NOT_SET = object()


def _shown(settings: dict[str, Any], name: str) -> str:
    return str(settings[name]) if name in settings else "none"
