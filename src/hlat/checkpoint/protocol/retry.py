"""A save that is tried again when the disk refuses, and what came of it.

    Content --store.save--> SaveResult            refused --pause 1, 2, 4, ... seconds--> once more --> SaveResult
                            each refusal --tell--> Refusal

The pauses are the same on every rank, as the refusals are: a save succeeds on all ranks or on none.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint.protocol.commit import CheckpointContent
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.runtime import StateLostError, StorageError
from hlat.runtime.distributed import sendable


@dataclass(frozen=True)
class FailedAttempt:
    """A try that failed and is followed by another one."""

    step: int
    attempts: int  # so far
    message: str


@sendable
@dataclass(frozen=True)
class SaveResult:
    """What came of a save in the end."""

    step: int
    path: Path | None  # None: there is no such checkpoint
    seconds: float  # from the beginning until it was durable or given up, pauses included
    attempts: int
    message: str = ""  # why there is none, or why old ones could not be removed


Tell = Callable[[FailedAttempt], None]

Pause = Callable[[float], bool]
"""Waits for so many seconds; says whether there is to be another try, which all ranks have to be told alike."""


def wait(seconds: float) -> bool:
    """Pause, and try again."""
    time.sleep(seconds)
    return True


def save_with_retries(
    store: CheckpointStore,
    content: CheckpointContent,
    retries: int,
    tell: Tell,
    pause: Pause = wait,
    clock: Callable[[], float] = time.monotonic,
) -> SaveResult:
    """Save, several times if need be, then remove what the retention rule does not keep. Collective.

    Args:
        store: where to.
        content: what.
        retries: how many more tries a save has that failed.
        tell: told of every try that is followed by another one.
        pause: waits before the next try.
        clock: seconds, monotonic.
    """
    begin, attempts = clock(), 0
    while True:
        attempts += 1
        try:
            path = store.save(content.step, content.chunks, content.meta, content.files)
        except StateLostError as error:
            return SaveResult(content.step, None, clock() - begin, attempts, str(error))
        except StorageError as error:
            message = str(error)
        else:
            return SaveResult(content.step, path, clock() - begin, attempts, _prune(store))
        if attempts > retries:
            break
        tell(FailedAttempt(content.step, attempts, message))
        if not pause(2.0 ** (attempts - 1)):
            break
    return SaveResult(content.step, None, clock() - begin, attempts, message)


def _prune(store: CheckpointStore) -> str:
    """The new checkpoint is durable, whatever becomes of the old ones."""
    try:
        store.prune()
    except StorageError as error:
        return str(error)
    return ""
