"""The errors users see. Each message says what, where, why and what would work.

``HlatError`` is the root of everything that a user can put right. The command line prints it without a traceback
and leaves with its exit code; any other exception is our own bug and keeps its traceback.
"""


class HlatError(Exception):
    """Something that the user can put right. ``exit_code`` is what the process ends with.

    Attributes:
        from_rank: the rank where it happened, if that is another process than the one that raises it here.
    """

    exit_code = 2
    from_rank: int | None = None


class DataError(HlatError):
    """A corpus, a tokenizer or prepared data that cannot be used as asked."""


class CheckpointError(HlatError):
    """A checkpoint that is missing, damaged, or does not belong to this run."""


class LaunchError(HlatError):
    """The program cannot start here: device, processes, ports."""


class NumericsError(HlatError):
    """The loss, the gradient or the weights are no longer finite numbers."""

    exit_code = 4


class StorageError(HlatError):
    """The disk refused: full, read-only, or gone. Not the recipe's fault, so the exit code differs."""

    exit_code = 3
