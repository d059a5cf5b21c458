"""Write, verify, list and remove checkpoints, each as a unit: a checkpoint is complete or does not exist."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.checkpoint.protocol.reader import open_checkpoint as open_checkpoint
    from hlat.checkpoint.protocol.reader import resolve as resolve

__getattr__ = lazily(__name__, {"reader": "open_checkpoint resolve"})  # scripts of users import them from here
