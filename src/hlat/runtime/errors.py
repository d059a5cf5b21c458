"""Errors that users see. Each message says what is wrong, where, why, and what would work.

``HlatError`` is the root of all errors that a user can fix. The command line prints it without a traceback and exits
with its exit code. Any other exception is a bug of hlat and keeps its traceback.
"""

from collections.abc import Iterator

from hlat.runtime.urls import redact


class HlatError(Exception):
    """An error that the user can fix."""

    exit_code = 2  # exit code of the process that raised it
    retryable = False  # True if the same command may succeed without a change; the supervisor then restarts the run
    from_rank: int | None = None  # rank where the error happened, if another process than the one that raises it here

    def __init__(self, *arguments: object) -> None:
        # Messages go into logs, reports and events: URLs in them must not contain credentials.
        super().__init__(*(redact(item) if isinstance(item, str) else item for item in arguments))


class DataError(HlatError):
    """A corpus, a tokenizer or prepared data that cannot be used as requested."""


class CheckpointError(HlatError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class CheckpointFormatError(CheckpointError):
    """A complete checkpoint in a version of the format that is newer than this version of hlat reads."""


class LaunchError(HlatError):
    """A failure to start the program here: device, processes, ports."""


class MissingHostsError(LaunchError):
    """Too few hosts of a run have come: the same command may succeed later, when a scheduler starts it again."""

    exit_code = 75  # hlat.runtime.process.REQUEUE_CODE, which this module cannot import


class HardwareError(HlatError):
    """Hardware that the catalog does not list, or an inconsistent catalog."""


class PlanError(HlatError):
    """A request that the planner cannot answer: no layout fits, or the request contradicts itself."""


class NumericsError(HlatError):
    """A loss, gradient or weights that are no longer finite."""

    exit_code = 4


class CorruptionError(HlatError):
    """Replicas that must be equal differ: a machine changed bits. A restart resumes from the last good state."""

    exit_code = 5
    retryable = True


class PersistentCorruptionError(CorruptionError):
    """Corruption that was detected again in the same place: a restart there would not help."""

    exit_code = 4
    retryable = False


class DeviceMemoryError(HlatError):
    """A device with too little memory for the recipe. ``retryable`` once the run has done steps with it."""


class StorageError(HlatError):
    """A disk that is full, read-only or gone. The recipe is not at fault, so the exit code differs."""

    exit_code = 3
    retryable = True


class StateLostError(StorageError):
    """Saved state of a run that is gone: a restart would not find it either, or would begin another run."""

    retryable = False


def causes(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error and its causes."""
    # torch's pipelines raise a RuntimeError from the exception of a stage.
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def first_line(error: BaseException) -> str:
    """Return what an error says, without the stack that torch's C++ errors append."""
    return str(error).strip().partition("\n")[0]


def error_class(name: str, exit_code: int) -> type[HlatError]:
    """Return the class of another process's error: by name, else by exit code; or LaunchError."""
    known = {kind.__name__: kind for kind in subclasses(HlatError) if kind.__module__ == __name__}
    by_code = {3: StorageError, 4: NumericsError, 5: CorruptionError}
    return known.get(name) or by_code.get(exit_code, LaunchError)


def subclasses(kind: type[HlatError]) -> list[type[HlatError]]:
    """Return all classes of errors below one, of the modules that are imported."""
    return [each for child in kind.__subclasses__() for each in (child, *subclasses(child))]
