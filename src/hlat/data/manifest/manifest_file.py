"""Write and read manifests and other records as JSON files, in the versions of ``record_formats``."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hlat.data.manifest.manifest import MANIFEST_FILE, DataManifest, StrictRecord
from hlat.data.manifest.record_formats import FORMAT_VERSION, RECORD_FORMATS
from hlat.data.stores.atomic_files import write_atomic
from hlat.runtime.errors import DataError

_MAX_PROBLEMS = 5  # problems of one record that a message lists


class UnknownFormatError(Exception):
    """A record has a format version that this version of hlat does not read; the message names both."""


def write_data_manifest(folder: Path, manifest: DataManifest) -> None:
    """Write the manifest of a folder.

    Raises:
        OSError: the disk refused the write.
    """
    write_record(folder / MANIFEST_FILE, manifest.model_copy(update={"format_version": FORMAT_VERSION}))


def read_data_manifest(folder: Path) -> DataManifest | None:
    """Read the manifest of a folder; return None if it has none.

    Raises:
        DataError: the manifest is damaged, or has another format.
    """
    path = folder / MANIFEST_FILE
    try:
        return DataManifest.model_validate(read_record(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        remedy = "`hlat data prepare RECIPE` makes such a folder of texts."
        raise DataError(f"{folder}: is a file, and the folder of prepared data is expected. {remedy}") from error
    except UnknownFormatError as error:
        raise DataError(
            f"{path}: {error}. Prepare the data again in another data.prepared_dir, or use the version of hlat that "
            "wrote it."
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        problem = validation_summary(error) if isinstance(error, ValidationError) else str(error)
        raise DataError(
            f"{path}: damaged: {problem}. Restore the file, or delete {folder} and prepare again: the same corpus and "
            "settings give the same data, and runs can resume with it."
        ) from error


def write_record(path: Path, record: StrictRecord) -> None:
    """Write a record, which is of format ``FORMAT_VERSION``.

    Raises:
        OSError: the disk refused the write.
    """
    content = RECORD_FORMATS[FORMAT_VERSION].write(json.loads(record.model_dump_json()))
    write_atomic(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def read_record(path: Path) -> dict[str, Any]:
    """Read the fields of a record that ``write_record`` or an earlier version wrote.

    Raises:
        OSError: the file does not exist or cannot be read.
        ValueError: it is damaged; the message says how.
        UnknownFormatError: its format version is not read.
    """
    try:
        stored = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    if not isinstance(stored, dict):
        raise ValueError(f"a JSON {type(stored).__name__}, not an object")
    version = stored.get("format_version")
    if type(version) is not int or version not in RECORD_FORMATS:
        *others, newest = map(str, sorted(RECORD_FORMATS))
        raise UnknownFormatError(f"data format {version!r}; this version reads {', '.join(others)} and {newest}")
    return RECORD_FORMATS[version].read(stored)


def validation_summary(error: ValidationError) -> str:
    """Summarize the problems of a record in one line."""
    problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}".removeprefix(": ") for item in error.errors()]
    more = f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
    return "; ".join(problems[:_MAX_PROBLEMS]) + more
