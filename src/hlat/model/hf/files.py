"""Files of a Hugging Face folder: names, JSON, and a folder that is created atomically."""

import errno
import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hlat.runtime.errors import CheckpointError, StorageError
from hlat.runtime.storage.fsync import sync_to_disk
from hlat.runtime.storage.small_files import read_small_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LARGEST_JSON = 1 << 28  # bytes; the index of a large model has megabytes
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def shard_name(number: int, count: int) -> str:
    """Return the file name of shard ``number`` (from 1) of ``count``, as transformers names it."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_json(path: Path, content: Any) -> None:
    """Write JSON as transformers does: indented, keys in the given order, newline at the end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, unreadable, or not a JSON object.
    """
    try:
        content = json.loads(read_small_file(path, _LARGEST_JSON))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file. Name a folder that contains a Hugging Face model.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object.")
    return content


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``target``; rename it to ``target`` after the block has ended without an error.

    Files and folders are fsynced before the rename.

    Raises:
        CheckpointError: the target exists and is not an empty folder.
        StorageError: the folder cannot be written; nothing is left behind.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: already exists and is not empty. Name a new folder.")
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in [*temporary.iterdir(), temporary]:
            sync_to_disk(file)
        if target.exists():
            target.rmdir()
        temporary.rename(target)
        sync_to_disk(target.parent)
    except OSError as error:
        remedy = (
            "Free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Check the disk and its permissions"
        )
        reason = error.strerror or str(error)
        raise StorageError(f"{target}: cannot be written: {reason}. {remedy}, or name another folder.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
