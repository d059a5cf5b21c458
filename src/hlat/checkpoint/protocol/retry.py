"""Save a checkpoint, with retries when the storage fails.

    CheckpointContent --store.save--> SaveResult
                      --fails-------> FailedAttempt reported --pause 1, 2, 4, ... seconds--> next attempt --> SaveResult

A save succeeds on all ranks or on none, so every rank sees the same failures and makes the same pauses.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint.protocol.commit import CheckpointContent
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import StateLostError, StorageError
from hlat.runtime.process.progress import blocking_call

_LONGEST_PAUSE = 60.0  # seconds


@dataclass(frozen=True)
class FailedAttempt:
    """A failed attempt to save that is followed by another attempt."""

    step: int
    attempts: int  # number of attempts so far
    message: str


@sendable
@dataclass(frozen=True)
class SaveResult:
    """Final outcome of a save."""

    step: int
    path: Path | None  # None if the save failed
    seconds: float  # until the checkpoint was durable or the save gave up, including pauses
    attempts: int
    message: str = ""  # why the save failed, or why old checkpoints could not be removed


FailureHandler = Callable[[FailedAttempt], None]
"""Called with every failed attempt that is followed by another one."""

Pause = Callable[[float], bool]
"""Waits for a number of seconds; returns True for another attempt, the same on all ranks."""


def sleep(seconds: float) -> bool:
    """Sleep, then ask for another attempt."""
    with blocking_call():
        time.sleep(seconds)
    return True


def save_with_retries(
    store: CheckpointStore,
    content: CheckpointContent,
    retries: int,
    on_failure: FailureHandler,
    pause: Pause = sleep,
    clock: Callable[[], float] = time.monotonic,
) -> SaveResult:
    """Save a checkpoint, retrying if the storage fails, then remove old checkpoints by the retention rule. Collective.

    Args:
        store: store that gets the checkpoint.
        content: content of this rank.
        retries: maximum number of attempts after the first one.
        on_failure: called with every failed attempt that is followed by another one.
        pause: waits before the next attempt, 1, 2, 4, ... seconds, at most a minute.
        clock: monotonic clock in seconds.
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
        on_failure(FailedAttempt(content.step, attempts, message))
        if not pause(min(2.0 ** (attempts - 1), _LONGEST_PAUSE)):
            break
    return SaveResult(content.step, None, clock() - begin, attempts, message)


def _prune(store: CheckpointStore) -> str:
    """Remove old checkpoints; return the error message if that fails. The new checkpoint is durable in any case."""
    try:
        store.prune()
    except StorageError as error:
        return str(error)
    return ""
