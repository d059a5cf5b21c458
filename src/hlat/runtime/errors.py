"""The errors users see. Each message says what, where, why and what would work.

``HlatError`` is the root of everything that a user can put right. The command line prints it without a traceback
and leaves with its exit code; any other exception is our own bug and keeps its traceback.
"""

from hlat.runtime.urls import redact


class HlatError(Exception):
    """Something that the user can put right. ``exit_code`` is what the process ends with.

    Attributes:
        from_rank: the rank where it happened, if that is another process than the one that raises it here.
        retryable: whether the same command may fare better without anybody's doing: during training it is tried again.
    """

    exit_code = 2
    retryable = False
    from_rank: int | None = None

    def __init__(self, *arguments: object) -> None:
        # Messages go into logs, reports and events: no URL in them may open anything.
        super().__init__(*(redact(one) if isinstance(one, str) else one for one in arguments))


class DataError(HlatError):
    """A corpus, a tokenizer or prepared data that cannot be used as asked."""


class CheckpointError(HlatError):
    """A checkpoint that is missing, damaged, or does not belong to this run."""


class LaunchError(HlatError):
    """The program cannot start here: device, processes, ports."""


class HardwareError(HlatError):
    """Hardware that the catalog does not know, or a catalog that does not hold together."""


class PlanError(HlatError):
    """A question that the planner cannot answer: nothing fits, or the question contradicts itself."""


class NumericsError(HlatError):
    """The loss, the gradient or the weights are no longer finite numbers."""

    exit_code = 4


class CorruptionError(HlatError):
    """Copies that have to be equal differ: a machine changed bits. Starting again goes on from the last good state."""

    exit_code = 5
    retryable = True


class PersistentCorruptionError(CorruptionError):
    """It happened again in the same place: starting again there would not help."""

    exit_code = 4
    retryable = False


class StorageError(HlatError):
    """The disk refused: full, read-only, or gone. Not the recipe's fault, so the exit code differs."""

    exit_code = 3
    retryable = True


class StateLostError(StorageError):
    """What a run had stored is not there any more: another attempt would find no more, or begin another run."""

    retryable = False
